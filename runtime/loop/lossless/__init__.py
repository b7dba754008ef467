"""The check that drafts change no token and no distribution."""

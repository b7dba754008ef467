"""The check that drafts change no token, and no distribution of sampled tokens."""

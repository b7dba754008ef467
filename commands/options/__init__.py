"""Flags that commands share, their hints, and how flags become an engine, a drafter and sampling parameters."""

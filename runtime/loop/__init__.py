"""Draft, step, verify, commit: orchestrator and leader mode, serving, and sessions above them."""

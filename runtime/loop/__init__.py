"""The loop: draft, step, verify, commit. Orchestrator mode, leader mode, serving, and sessions above them."""

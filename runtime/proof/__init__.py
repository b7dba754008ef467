"""Proof of answers: receipts, fingerprints of engines, and which tokens an engine would have chosen."""

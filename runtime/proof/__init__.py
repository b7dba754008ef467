"""Proof of answers: receipts, fingerprints of engines, and the tokens that an engine would have chosen."""

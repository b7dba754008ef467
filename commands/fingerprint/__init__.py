"""`specdec fingerprint`: a digest of an engine's bits, and whether another engine gives the same."""

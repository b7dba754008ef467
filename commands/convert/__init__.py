"""`specdec convert`: a model becomes a checkpoint."""

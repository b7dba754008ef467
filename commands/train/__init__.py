"""`specdec train`: trains a drafting head on the model's own answers."""

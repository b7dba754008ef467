"""What is special about a family of models: one file for each family, or for families that share it."""

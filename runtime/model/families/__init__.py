"""Families of models that have something special: one file for each family, or for families that share it."""

"""Drafters: one spec for each, one file for each algorithm, and what pays."""

"""Drafters: the settings of each, one file for each algorithm, and the choice of a draft's length."""

"""Comparisons of systems on the same prompts: scores, noise, speed."""

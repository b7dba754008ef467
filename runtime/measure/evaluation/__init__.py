"""Systems compared on the same prompts: scores, noise, speed."""

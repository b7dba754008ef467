"""A model's step, traced and compiled: token programs, or torch.compile."""

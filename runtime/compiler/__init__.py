"""A model's step, captured and compiled: token programs, AOTInductor, torch.compile."""

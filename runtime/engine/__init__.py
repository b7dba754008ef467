"""An opened engine: its step, its memory, its ranks and its devices."""

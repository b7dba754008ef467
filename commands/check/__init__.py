"""`specdec check`: recomputes answers from their receipts, and names the first token that is not the engine's."""

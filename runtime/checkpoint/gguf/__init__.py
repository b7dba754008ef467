"""GGUF files: their header, weights, config and tokenizer."""

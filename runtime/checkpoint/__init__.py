"""Files of models, checkpoints and engines: read, checked, written; their configs, tokenizers and formats."""

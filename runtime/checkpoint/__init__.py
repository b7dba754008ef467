"""Files of models, checkpoints and engines, read, checked and written: configs, tokenizers and quantization formats."""

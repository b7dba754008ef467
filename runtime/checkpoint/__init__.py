"""Files of models, checkpoints and engines: configs, tokenizers, quantization formats, and the engines in the cache."""

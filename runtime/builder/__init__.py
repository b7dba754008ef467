"""Convert and build: from a model's files to an engine, checked against transformers and kept in the cache."""

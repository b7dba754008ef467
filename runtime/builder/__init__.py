"""Convert and build: from a model's files to a checkpoint and an engine, which is checked and kept in the cache."""

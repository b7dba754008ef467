"""`specdec list` and `specdec cache`: models that have engines in the cache, and removal of the oldest engines."""

"""Errors, files, digests, locks, the cache directory, and processes, for every room."""

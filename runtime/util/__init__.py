"""Errors, files, locks, the cache of engines, and processes, for every room."""

"""Errors, files, locks, the cache and processes: every room uses them, and they know nothing about models."""

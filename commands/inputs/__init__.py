"""Prompts and datasets that commands read."""

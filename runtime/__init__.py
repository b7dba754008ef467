"""The engine: everything but the command line."""

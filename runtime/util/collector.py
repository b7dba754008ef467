"""Python's garbage collector: it looks through all that torch imports, and frees none of it."""

import atexit
import gc


def collect_rarely() -> None:
    """Make collections rare. Before torch is imported: there they take a sixth of the import."""
    gc.set_threshold(50_000, 20, 100)
    atexit.register(gc.freeze)  # spares the last collection: the process gives all its memory back anyway

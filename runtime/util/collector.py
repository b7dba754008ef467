"""Python's garbage collector in a process that imports torch: by default it looks through all imported objects and
frees none.
"""

import atexit
import gc


def collect_rarely() -> None:
    """Make collections rare. Call this before torch is imported: with Python's own thresholds, collections take a sixth
    of the import.
    """
    gc.set_threshold(50_000, 20, 100)
    atexit.register(gc.freeze)  # spares the last collection: the process gives all its memory back anyway

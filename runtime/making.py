"""One thread of a process at a time makes a model, or builds or opens an engine."""

import os
from threading import RLock

# While transformers makes a model and torch compiles one, parts of both are others for all threads, and modules are
# found half imported. Two threads would take each other's parts for those to put back. Whoever also locks a file locks
# this first.
MAKING = RLock()
if hasattr(os, "register_at_fork"):  # a child has no thread that could end what another was making
    os.register_at_fork(after_in_child=MAKING._at_fork_reinit)  # type: ignore[attr-defined]

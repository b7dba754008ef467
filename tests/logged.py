"""Messages that are logged. pytest's `caplog` is off: for it torch would make a record of every step of an export."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def logged(name: str | None = None) -> Iterator[list[str]]:
    """The messages that reach the logger of this name, or the root's, until the end."""
    logger, handler, messages = logging.getLogger(name), logging.Handler(), list[str]()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)

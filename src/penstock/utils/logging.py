"""One logger per module under the name `penstock`, written to stderr. Prompts and outputs are never logged."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


def configure(level: str) -> None:
    """Sets up the `penstock` loggers once per process; later calls only change the level.

    `level` is DEBUG, INFO, WARNING or ERROR; an unknown one counts as WARNING.
    """
    root = logging.getLogger("penstock")
    if not root.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s %(name)s: %(message)s", "%H:%M:%S"))
        root.addHandler(handler)
        root.propagate = False
    root.setLevel(level if level in ("DEBUG", "INFO", "WARNING", "ERROR") else "WARNING")


def enable_access_log(name: str) -> None:
    """Enables the access log of the HTTP server's logger `name`."""
    logger = logging.getLogger(name)
    logger.addHandler(logging.StreamHandler())
    logger.setLevel(logging.INFO)
    logger.propagate = False


@contextmanager
def errors_only() -> Iterator[None]:
    """Suppresses warnings while the body runs, for code that simulates failures."""
    root = logging.getLogger("penstock")
    level = root.level
    root.setLevel(logging.ERROR)
    try:
        yield
    finally:
        root.setLevel(level)


def get_logger(name: str) -> logging.Logger:
    """The logger of the module `name` (pass `__name__`)."""
    return logging.getLogger(name)

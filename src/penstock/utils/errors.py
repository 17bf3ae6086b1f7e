"""Penstock's exceptions, by whose fault it is.

    PenstockError
    ├── ConfigError       the operator asked for something that cannot be: names the flag to change
    ├── RequestError      a client's request is at fault: names the field and the bound; becomes an HTTP 4xx
    └── EngineDeadError   the engine core has stopped and can serve nothing more

A failed `assert` is a bug in Penstock. Input from a client never meets one.
"""

from __future__ import annotations


class PenstockError(Exception):
    """Base of every error that Penstock raises on purpose."""


class ConfigError(PenstockError, ValueError):
    """The configuration, the checkpoint or the machine cannot do what was asked."""


class RequestError(PenstockError, ValueError):
    """One request is invalid. `field` is the request's field that is at fault."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class EngineDeadError(PenstockError):
    """The engine core died; the cause is in `__cause__` or in its log."""

"""Penstock's exceptions, by whose fault it is.

    PenstockError
    ├── ConfigError       the operator asked for something that cannot be: names the flag to change
    ├── RequestError      a client's request is at fault: names the field and the bound; becomes an HTTP 4xx
    ├── OverloadedError   the request is right, but there is no room for it now; becomes an HTTP 503
    ├── GrammarError      one request's grammar cannot go on; the request ends with it
    ├── WireError         another process sent what is no message
    ├── PeerError         another engine cannot be reached, or has refused; the caller continues without it
    └── EngineDeadError   the engine core has stopped and can serve nothing more; becomes an HTTP 503
        └── RanksLostError    another rank of this engine has ended, so this one cannot go on

A failed `assert` is a bug in Penstock. Input from a client never meets one.
"""

from __future__ import annotations


class PenstockError(Exception):
    """Base of every error that Penstock raises on purpose."""


class ConfigError(PenstockError, ValueError):
    """The configuration, the checkpoint or the machine cannot do what was asked."""


class RequestError(PenstockError, ValueError):
    """One request is invalid. `field` is what is at fault, `code` the OpenAI API's name for that, if it has one."""

    def __init__(self, message: str, field: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.field = field
        self.code = code


class OverloadedError(PenstockError):
    """The engine holds as many requests as it may, or takes no new ones: the same request may succeed later."""


class GrammarError(PenstockError):
    """A request's output left its grammar, or its grammar grew too complex: the request ends with this error."""


class WireError(PenstockError):
    """What another process sent is no message; the connection is of no use any more."""


class PeerError(PenstockError):
    """A peer is not there, is not who it was, or refuses. Never fatal: what was wanted of it is computed here."""


class EngineDeadError(PenstockError):
    """The engine core died; the cause is in `__cause__` or in its log."""


class RanksLostError(EngineDeadError):
    """Another rank of this engine has ended, or cannot be reached: no step can be completed any more."""

"""Penstock's exceptions: a class for each party at fault.

A failed `assert` is a bug in Penstock. Client input never reaches an assert.
"""

from __future__ import annotations


class PenstockError(Exception):
    """Base class of all errors that Penstock raises deliberately."""


class ConfigError(PenstockError, ValueError):
    """The configuration, the checkpoint or the machine does not support the request: names the flag to change."""


class RequestError(PenstockError, ValueError):
    """A client's request is invalid: names the field and the bound; becomes an HTTP 4xx. `field` is the invalid field,
    and `code` the OpenAI API's error code, if there is one.
    """

    def __init__(self, message: str, field: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.field = field
        self.code = code


class OverloadedError(PenstockError):
    """The engine is at its limit of requests or accepts no new ones; becomes an HTTP 503: it may succeed later."""


class RequestFailedError(PenstockError):
    """The engine failed on one request, which ends as an HTTP 500; the reason is in its log."""


class GrammarError(PenstockError):
    """A request's output violated its grammar, or the grammar became too complex; ends the request."""


class WireError(PenstockError):
    """Another process sent an invalid message; the connection cannot be used any more."""


class PeerError(PenstockError):
    """A peer is unreachable, has a new identity, or refuses. Never fatal: this engine computes the KV itself."""


class EngineDeadError(PenstockError):
    """The engine core died and serves no requests (HTTP 503); the cause is in `__cause__` or in its log."""


class RanksLostError(EngineDeadError):
    """Another rank of this engine has ended or is unreachable: no further step can be completed."""

"""Penstock's exceptions, by the party at fault.

    PenstockError
    ├── ConfigError       the operator's configuration is invalid: names the flag to change
    ├── RequestError      a client's request is at fault: names the field and the bound; becomes an HTTP 4xx
    ├── OverloadedError   the request is valid, but there is no capacity for it now; becomes an HTTP 503
    ├── RequestFailedError  this engine failed on one request, for an unexpected reason; becomes an HTTP 500
    ├── GrammarError      one request's grammar cannot continue; the request ends with this error
    ├── WireError         another process sent an invalid message
    ├── PeerError         another engine is unreachable or has refused; the caller continues without it
    └── EngineDeadError   the engine core has stopped and cannot serve requests; becomes an HTTP 503
        └── RanksLostError    another rank of this engine has ended, so this one cannot continue

A failed `assert` is a bug in Penstock. Client input never reaches an assert.
"""

from __future__ import annotations


class PenstockError(Exception):
    """Base class of all errors that Penstock raises deliberately."""


class ConfigError(PenstockError, ValueError):
    """The configuration, the checkpoint or the machine does not support the request."""


class RequestError(PenstockError, ValueError):
    """One request is invalid. `field` names the invalid field, and `code` is the OpenAI API's error code, if there is
    one.
    """

    def __init__(self, message: str, field: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.field = field
        self.code = code


class OverloadedError(PenstockError):
    """The engine is at its limit of requests or accepts no new ones; the same request may succeed later."""


class RequestFailedError(PenstockError):
    """The engine failed on one request, which ends; the reason is in its log."""


class GrammarError(PenstockError):
    """A request's output violated its grammar, or the grammar became too complex; ends the request."""


class WireError(PenstockError):
    """Another process sent an invalid message; the connection cannot be used any more."""


class PeerError(PenstockError):
    """A peer is unreachable, has a new identity, or refuses. Never fatal: this engine computes the KV itself."""


class EngineDeadError(PenstockError):
    """The engine core died; the cause is in `__cause__` or in its log."""


class RanksLostError(EngineDeadError):
    """Another rank of this engine has ended or is unreachable: no further step can be completed."""

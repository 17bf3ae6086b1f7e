"""Names of transfers for tests."""

from __future__ import annotations

from penstock.messages.kv_transfer import TransferId


def named(request: str, part: int = 0) -> TransferId:
    """Returns the name of a request's transfer; different for every request and part."""
    return TransferId(request, 0, part)

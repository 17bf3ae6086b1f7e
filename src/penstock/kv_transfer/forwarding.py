"""A part in front of another part of a connector."""

from __future__ import annotations

from typing import Any


class Forwarding:
    """What it does not say itself, `inner` says: exactly the optional abilities that `inner` has."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

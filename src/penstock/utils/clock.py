"""Clocks. Code that needs the time takes a clock as an argument; only `SystemClock` reads the machine's clock."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Monotonic seconds; only differences are meaningful."""
        ...


class SystemClock:
    def now(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        """Seconds since the epoch, for output that people read."""
        return time.time()  # noqa: TID251 - this is the one reader


class ManualClock:
    """A clock that only advances when it is set."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        assert seconds >= 0, seconds
        self._now += seconds

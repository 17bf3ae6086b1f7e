"""The only place that reads the machine's clock."""

from __future__ import annotations

import time


class SystemClock:
    def now(self) -> float:
        """Monotonic seconds; only differences mean anything."""
        return time.monotonic()

    def wall(self) -> float:
        """Seconds since the epoch, for what people read."""
        return time.time()  # noqa: TID251 - this is the one reader

"""Time limits that hold on an idle machine, for tests that other processes may disturb."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

NUM_TRIES = 3


class TooSlowError(AssertionError):
    """A time limit was exceeded; nothing else was wrong."""


def check_seconds(elapsed: float, seconds: float) -> None:
    """Raises TooSlowError unless `elapsed` is less than `seconds`."""
    if elapsed >= seconds:
        raise TooSlowError(f"{elapsed:.2f} seconds instead of less than {seconds:g}")


def retried_when_slow(test: Callable[..., None]) -> Callable[..., None]:
    """Repeats a test that was too slow: the last try counts."""

    @functools.wraps(test)
    def repeated(*args: Any, **kwargs: Any) -> None:
        for _ in range(NUM_TRIES - 1):
            try:
                test(*args, **kwargs)
                return
            except TooSlowError as slow:
                print(f"{test.__name__}: {slow}; tried again")  # noqa: T201
        test(*args, **kwargs)

    return repeated


def kill_soon(pid: int, seconds_stopped: float = 0) -> Callable[[], float]:
    """Kills a process in 0.2 seconds, after it has been stopped for `seconds_stopped`. Returns a function that returns
    the seconds since then.
    """
    killed: list[float] = []

    def kill() -> None:
        if seconds_stopped:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(seconds_stopped)
        killed.append(time.monotonic())
        os.kill(pid, signal.SIGKILL)

    threading.Timer(0.2, kill).start()
    return lambda: time.monotonic() - killed[0]

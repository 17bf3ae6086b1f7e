"""Ctrl-C at a moment when nothing is half done."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def interrupts_held() -> Iterator[Callable[[], None]]:
    """Holds back SIGINT while the body runs and raises KeyboardInterrupt after it, if one came.

    A body that goes on for long calls what it is given wherever nothing is half done: that raises KeyboardInterrupt
    there. Only the main thread is ever interrupted; elsewhere, and where the program has its own handler or an outer
    body holds interrupts back already, nothing changes.
    """
    came = False

    def note(_signal: int, _frame: object) -> None:
        nonlocal came
        came = True

    def let_through() -> None:
        nonlocal came
        if came:
            came = False
            raise KeyboardInterrupt

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield let_through
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield let_through
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        let_through()

"""What Ctrl-C does: nothing while something is half done, the end at once while a program starts."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import NoReturn

EXIT_CODE = 128 + signal.SIGINT
"""The exit code of a program that an interrupt has ended, as shells report it."""


@contextlib.contextmanager
def interrupts_end_at_once() -> Iterator[None]:
    """While the body runs, SIGINT ends the process with `EXIT_CODE` and without a traceback.

    For imports and for loading a model: a KeyboardInterrupt that is raised there may be lost in a library, or be shown
    with the library's traceback. Nothing is cleaned up, so the body must hold nothing that outlives the process. Takes
    effect in the main thread only.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end(_signal: int, _frame: object) -> NoReturn:
    with contextlib.suppress(OSError):
        os.write(2, b"\n")
    os._exit(EXIT_CODE)


@contextlib.contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Blocks SIGINT in this thread while the body runs; a process that is started in the body never receives one.

    A terminal sends Ctrl-C to all processes in the foreground. A child process that its parent ends must not answer
    with a traceback of its own, also not before its first line runs. An interrupt that another thread of this process
    receives is held back too.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with interrupts_held():
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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

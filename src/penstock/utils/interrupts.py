"""Handling of Ctrl-C: deferred during critical sections, immediate exit while a program starts."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import NoReturn

EXIT_CODE = 128 + signal.SIGINT
"""The exit code of a program ended by an interrupt, as shells report it."""


@contextlib.contextmanager
def interrupts_end_at_once() -> Iterator[None]:
    """While the body runs, SIGINT ends the process with `EXIT_CODE` and without a traceback.

    For imports and for loading a model: there a library may swallow a KeyboardInterrupt, or print a traceback. Nothing
    is cleaned up, so the body must hold nothing that outlives the process. Takes effect in the main thread only.
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
    """Blocks SIGINT in this thread while the body runs; a process that is started in the body never receives it.

    A terminal sends Ctrl-C to all processes in the foreground. A child process that its parent terminates must not
    print a traceback, even before its first line runs. An interrupt that another thread of this process receives is
    deferred too.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with interrupts_held():
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def interrupts_held() -> Iterator[Callable[[], None]]:
    """Defers SIGINT while the body runs and raises KeyboardInterrupt after it, if one arrived.

    A long-running body calls the given function at points where its state is consistent; that raises KeyboardInterrupt
    there. Only the main thread is ever interrupted. In other threads, with a handler of the program's own, or within
    another such body, this has no effect.
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

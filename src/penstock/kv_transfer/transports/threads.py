"""The threads of one endpoint."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from penstock.utils.errors import PeerError


class ThreadGroup:
    """Threads that `join` waits for. They are daemons: a process that ends does not wait for a transfer.

    None is started any more when `closing` is set.
    """

    def __init__(self, name: str, closing: threading.Event) -> None:
        self._name = name
        self._closing = closing
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()

    def start(self, work: Callable[..., None], *args: object) -> None:
        """Starts a thread. Raises PeerError if the endpoint closes, or the system has no more threads."""
        self.check_open()

        def run() -> None:
            try:
                work(*args)
            finally:
                with self._lock:
                    self._threads.remove(thread)

        thread = threading.Thread(target=run, name=self._name, daemon=True)
        with self._lock:
            self._threads.add(thread)
        try:
            thread.start()
        except RuntimeError as error:
            with self._lock:
                self._threads.remove(thread)
            raise PeerError(f"no thread for a connection: {error}") from error

    def check_open(self) -> None:
        """Raises PeerError if `closing` is set."""
        if self._closing.is_set():
            raise PeerError("this endpoint has been closed")

    def has_ended(self, seconds: float) -> bool:
        """Waits for all threads, for at most this many seconds in total; returns whether all have ended."""
        deadline = time.monotonic() + seconds
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def join(self, seconds: float) -> None:
        assert self.has_ended(seconds), f"a thread has not ended within {seconds} seconds"

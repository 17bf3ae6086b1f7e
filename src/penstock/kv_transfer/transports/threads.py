"""The threads of one endpoint."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from penstock.utils.errors import PeerError


class ThreadGroup:
    """Threads that `join` waits for. They are daemons: a process that ends does not wait for a transfer."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()

    def start(self, work: Callable[..., None], *args: object) -> None:
        """Starts a thread. Raises PeerError if the system has no more threads."""

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

    def join(self, seconds: float) -> bool:
        """Waits for all threads, for at most this many seconds in total; returns whether all have ended."""
        deadline = time.monotonic() + seconds
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

"""KV transfers between the calls of an `LLM`, when other engines may request its KV while its program does other work.

While the connector has work and no call uses the engine core, a thread steps it. The connector's waker starts this
thread, and it ends with the work. A call pauses it first, and waits at most for the current step.

This object does not keep an `LLM` alive. The connector, whose threads may outlive the `LLM`, has only a weak reference
to it, and `close` is called when the `LLM` is collected.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator

from penstock.engine.build import Engine
from penstock.utils import logging
from penstock.utils.errors import EngineDeadError

logger = logging.get_logger(__name__)


class IdleTransfers:
    """`pause`, `resume`, `paused` and `close` belong to the `LLM`, which is used by one thread at a time."""

    def __init__(self, engine: Engine) -> None:
        self._core = engine.core
        self._takes_waker = engine.connector.takes_waker
        # Held during a step. Reentrant, because a step's thread may collect the LLM, which calls `close`.
        self._stepping = threading.RLock()
        self._is_paused = False
        self._is_closed = False
        # Guards the thread, and the flag of a wake-up that it has not processed.
        self._state = threading.Lock()
        self._is_serving = False
        self._has_news = False
        if self._takes_waker:
            reference: weakref.ref[IdleTransfers] = weakref.ref(self)
            engine.connector.set_waker(lambda: _wake(reference))

    def wake(self) -> None:
        """Called when the connector may have work. May be called from any thread."""
        with self._state:
            self._has_news = True
            if self._is_serving or self._is_closed or _is_exiting():
                return
            self._is_serving = True
        threading.Thread(target=self._serve, name="penstock-transfers", daemon=True).start()

    def pause(self) -> None:
        """Returns when no step runs; none begins until `resume`."""
        self._is_paused = True
        with self._stepping:
            pass

    def resume(self) -> None:
        """The caller no longer uses the core; unfinished transfers continue."""
        goes_on = self._takes_waker and self._core.has_transfers
        self._is_paused = False
        if goes_on or self._has_news:
            self.wake()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """No step runs within this context. Has no effect between `pause` and `resume`."""
        if self._is_paused:
            yield
            return
        try:
            self.pause()
            yield
        finally:
            self.resume()

    def close(self) -> None:
        """Ends all steps. Idempotent."""
        self._is_closed = True
        with self._stepping:
            pass

    def _serve(self) -> None:
        while self._take_news():
            while self._step():
                pass

    def _take_news(self) -> bool:
        """Returns False if there is no wake-up, and the thread ends."""
        with self._state:
            self._is_serving = self._has_news and not self._is_paused and not self._is_closed
            self._has_news = self._has_news and not self._is_serving
            return self._is_serving

    def _step(self) -> bool:
        """Returns False if there is no work, or the core is in use."""
        with self._stepping:
            if self._is_paused or self._is_closed or _is_exiting() or not self._core.has_transfers:
                return False
            try:
                self._core.step()
            except EngineDeadError as error:
                # The next call raises it. While the interpreter exits, its thread pools execute no step; they say so
                # before the main thread has ended.
                if not _is_exiting() and "cannot schedule new futures" not in str(error):
                    logger.error("a step for KV transfers failed: %s", error)
                return False
            return True


def _wake(reference: weakref.ref[IdleTransfers]) -> None:
    transfers = reference()
    if transfers is not None:
        transfers.wake()


def _is_exiting() -> bool:
    """Returns whether the interpreter is exiting. A thread that waits for the interpreter lock may not get it again."""
    return not threading.main_thread().is_alive()

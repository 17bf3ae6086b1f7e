"""KV transfers between the calls of an `LLM`: other engines may want its KV while its program does something else.

While the connector has work and no call uses the engine core, a thread steps it. The connector's waker starts this
thread, and it ends with the work. A call pauses it first, and waits for no more than the step that runs.

Nothing here keeps an `LLM` alive. The connector, whose own threads may live on, knows this object by a weak reference,
and `close` is called when the `LLM` is collected.
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
        # Held during a step. Reentrant, because a step's thread may collect the LLM, which closes this.
        self._stepping = threading.RLock()
        self._is_paused = False
        self._is_closed = False
        # The thread, and whether there is news that it has not looked at.
        self._state = threading.Lock()
        self._is_serving = False
        self._has_news = False
        if self._takes_waker:
            reference: weakref.ref[IdleTransfers] = weakref.ref(self)
            engine.connector.set_waker(lambda: _wake(reference))

    def wake(self) -> None:
        """The connector may have work. May be called from any thread."""
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
        """The caller is done with the core; transfers that are still under way go on."""
        goes_on = self._takes_waker and self._core.has_transfers
        self._is_paused = False
        if goes_on or self._has_news:
            self.wake()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """No step runs meanwhile. Within `pause` and `resume` nothing changes."""
        if self._is_paused:
            yield
            return
        try:
            self.pause()
            yield
        finally:
            self.resume()

    def close(self) -> None:
        """No step runs any more. Idempotent."""
        self._is_closed = True
        with self._stepping:
            pass

    def _serve(self) -> None:
        while self._take_news():
            while self._step():
                pass

    def _take_news(self) -> bool:
        """False when there is none, and the thread ends."""
        with self._state:
            self._is_serving = self._has_news and not self._is_paused and not self._is_closed
            self._has_news = self._has_news and not self._is_serving
            return self._is_serving

    def _step(self) -> bool:
        """False when there is nothing to do, or others use the core."""
        with self._stepping:
            if self._is_paused or self._is_closed or _is_exiting() or not self._core.has_transfers:
                return False
            try:
                self._core.step()
            except EngineDeadError as error:
                # The next call raises it. While the interpreter exits, its thread pools take no step.
                if not _is_exiting():
                    logger.error("a step for KV transfers failed: %s", error)
                return False
            return True


def _wake(reference: weakref.ref[IdleTransfers]) -> None:
    transfers = reference()
    if transfers is not None:
        transfers.wake()


def _is_exiting() -> bool:
    """Whether the interpreter has begun to exit. A thread that waits for the interpreter lock may not get it again."""
    return not threading.main_thread().is_alive()

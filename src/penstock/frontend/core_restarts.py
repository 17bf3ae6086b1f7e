"""The engine core's process and, if restarts are allowed, its successors.

A core that was ready once and dies unexpectedly is restarted with the same configuration, after a delay that grows with
each attempt. Consecutive attempts are limited; a core that has served for a while resets their number. While there is
no core, `client` raises. Requests in progress when a core dies are lost: the handler is notified, and fails them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from penstock.config.replicas import CorePlan
from penstock.engine.core_messages import Ready, Refused
from penstock.frontend.core_client import CoreClient
from penstock.messages.stats import StepReport
from penstock.utils import logging
from penstock.utils.clock import Clock, SystemClock
from penstock.utils.errors import EngineDeadError, OverloadedError, PenstockError

logger = logging.get_logger(__name__)

RECOVERED_SECONDS = 60.0
_MAX_WAIT_SECONDS = 30.0

Handler = Callable[[StepReport | Refused | EngineDeadError | Ready], None]
"""Receives the core's messages, on the event loop: EngineDeadError when a core dies, Ready when the next one serves."""


class RestartingCore:
    """Owns one core at a time. Belongs to the event loop on which it was started.

    `died` is set when a core has died and will not be restarted.
    """

    def __init__(self, plan: CorePlan, client: CoreClient, max_restarts: int, clock: Clock = SystemClock()) -> None:  # noqa: B008
        """`client` must be ready. `max_restarts` limits consecutive restarts; 0 allows none."""
        self.died = asyncio.Event()
        self.num_restarts = 0
        self._plan = plan
        self._client = client
        self._max_restarts = max_restarts
        self._clock = clock
        self._ready_since = clock.now()
        self._attempts = 0
        self._outage: EngineDeadError | None = None
        self._restarting: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._handlers: list[Handler] = []

    def add_handler(self, handler: Handler) -> None:
        """Every handler receives the messages of all engines of the core."""
        self._handlers.append(handler)
        if len(self._handlers) == 1:
            self._listen()
        elif self._outage is not None:
            handler(self._outage)

    @property
    def client(self) -> CoreClient:
        """The core that serves. Raises OverloadedError during a restart and EngineDeadError after the last death."""
        if self._outage is None:
            return self._client
        if self._restarting is None:
            raise EngineDeadError(str(self._outage))
        raise OverloadedError("the engine has failed and is being started again: try again later")

    @property
    def death(self) -> EngineDeadError | None:
        """The reason for the last core's death; None while one serves or is being started."""
        return self._outage if self._restarting is None else None

    @property
    def outage(self) -> EngineDeadError | None:
        """The reason why there is no core now; None while one serves."""
        return self._outage

    def abort_requests(self, request_ids: tuple[str, ...]) -> None:
        """Aborts requests. Unknown ones are ignored, and so is a missing core."""
        if self._outage is None:
            self._client.abort_requests(request_ids)

    async def shutdown(self) -> None:
        """Stops the core, or the start of one. Idempotent."""
        self._closing.set()
        await self._client.shutdown()
        if self._restarting is not None:
            await self._restarting

    def _listen(self) -> None:
        self._client.set_handler(self._on_message)
        if self._client.death is not None:
            # The core was ready, and died before anything listened.
            self._on_message(self._client.death)

    def _on_message(self, message: StepReport | Refused | EngineDeadError) -> None:
        if isinstance(message, EngineDeadError):
            self._on_death(message)
        self._tell(message)

    def _tell(self, message: StepReport | Refused | EngineDeadError | Ready) -> None:
        for handler in self._handlers:
            handler(message)

    def _on_death(self, error: EngineDeadError) -> None:
        self._outage = error
        if self._clock.now() - self._ready_since >= RECOVERED_SECONDS:
            self._attempts = 0
        if self._closing.is_set() or self._attempts >= self._max_restarts:
            self.died.set()
            return
        logger.error("the engine is gone: %s", error)
        self._restarting = asyncio.create_task(self._restart())

    async def _restart(self) -> None:
        """Repeats until a core serves, no attempt is left, or `shutdown` is called."""
        while self._attempts < self._max_restarts and not self._closing.is_set():
            seconds = min(_MAX_WAIT_SECONDS, 2.0**self._attempts)
            self._attempts += 1
            logger.warning(
                "the engine is started again in %.0f s: attempt %d of %d", seconds, self._attempts, self._max_restarts
            )
            try:
                # Its memory and its ports must be free first.
                await self._client.shutdown()
                await self._pause(seconds)
                if not self._closing.is_set():
                    await self._start()
                    return
            except Exception as error:
                # Any error: nothing else would end the wait. Includes ConfigError: the arguments worked before, so the
                # cause is the machine, and may be temporary.
                self._outage = error if isinstance(error, EngineDeadError) else EngineDeadError(str(error))
                is_bug = not isinstance(error, PenstockError | OSError)
                logger.error("the engine could not be started again: %s", error, exc_info=is_bug)
        self._restarting = None
        self.died.set()

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._closing.wait(), seconds)

    async def _start(self) -> None:
        self._client = await CoreClient.start(self._plan)
        if self._closing.is_set():
            await self._client.shutdown()
        for message in await self._client.ready:
            self._tell(message)
        self._ready_since = self._clock.now()
        self.num_restarts += 1
        self._outage = self._restarting = None
        logger.warning("the engine has been started again")
        self._listen()

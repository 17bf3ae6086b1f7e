"""The front end's connection to the engine core's process: starts it, talks to it, and detects its death at once."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

from penstock.config import env
from penstock.config.replicas import CorePlan
from penstock.engine.core_messages import (
    CODEC,
    AbortRequests,
    CheckIntegrity,
    ForgetAdapter,
    GetBlockMap,
    GetExpertMap,
    Ready,
    Refused,
    Reply,
    ResetPrefixCache,
)
from penstock.messages.requests import EngineRequest
from penstock.messages.stats import BlockMap, ExpertMap, StepReport
from penstock.utils.child_process import ChildProcess, Failed
from penstock.utils.errors import ConfigError, EngineDeadError, WireError
from penstock.utils.machine import bound_to
from penstock.utils.wire import FrameReader

_EXIT_SECONDS = 15.0
_DEATH_SECONDS = 1.0

Handler = Callable[[StepReport | Refused | EngineDeadError], None]
"""Receives the core's messages, on the event loop; an EngineDeadError comes last and once."""


class CoreClient(asyncio.Protocol):
    """One engine core process and the connection to it. Belongs to the event loop on which it was started.

    The process has several engines if they share experts: each call is for one of them, by its data parallel rank.
    """

    def __init__(self, process: ChildProcess, num_engines: int) -> None:
        self.ready: asyncio.Future[list[Ready]] = asyncio.get_running_loop().create_future()
        self.death: EngineDeadError | None = None
        self._process = process
        self._num_engines = num_engines
        self._engines: list[Ready] = []
        self._reader = FrameReader(CODEC)
        self._transport: asyncio.Transport | None = None
        self._handler: Handler = _ignore
        self._calls: dict[int, asyncio.Future[bool | BlockMap | ExpertMap]] = {}
        self._call_numbers = itertools.count()
        self._failure: Failed | None = None
        self._is_closing = False

    @classmethod
    async def start(cls, plan: CorePlan) -> CoreClient:
        """Starts the process. `ready` resolves to a message of each of its engines when the model is loaded, or raises
        ConfigError if it cannot be.
        """
        num_engines = plan.config.parallel.num_joint_engines
        with bound_to(plan.cores):
            process = ChildProcess(("-m", "penstock.engine.core_process"), env.for_child(plan.environment))
        loop = asyncio.get_running_loop()
        _, client = await loop.create_unix_connection(lambda: cls(process, num_engines), sock=process.connection)
        client._send(plan.config)
        return client

    def set_handler(self, handler: Handler) -> None:
        self._handler = handler

    def add_request(self, request: EngineRequest) -> None:
        """Submits a request; a refusal arrives as `Refused`. Raises EngineDeadError."""
        self._send(request)

    def abort_requests(self, request_ids: tuple[str, ...]) -> None:
        """Aborts requests. Unknown ones are ignored, and so is a dead core."""
        if self.death is None:
            self._send(AbortRequests(request_ids))

    async def reset_prefix_cache(self, reset_connector: bool = False, dp_rank: int = 0) -> bool:
        """See `EngineCore.reset_prefix_cache`."""
        return bool(await self._call(lambda number: ResetPrefixCache(number, reset_connector, dp_rank)))

    async def forget_adapter(self, digest: bytes, dp_rank: int = 0) -> bool:
        """See `EngineCore.forget_adapter`."""
        return bool(await self._call(lambda number: ForgetAdapter(number, digest, dp_rank)))

    async def block_map(self, max_cells: int, dp_rank: int = 0) -> BlockMap:
        """Returns the block pool as letters (`BlockPool.map`)."""
        found = await self._call(lambda number: GetBlockMap(number, max_cells, dp_rank))
        assert isinstance(found, BlockMap), found
        return found

    async def expert_map(self) -> ExpertMap:
        """Returns the loads of the experts that are balanced."""
        found = await self._call(GetExpertMap)
        assert isinstance(found, ExpertMap), found
        return found

    async def check_integrity(self, dp_rank: int = 0) -> None:
        """Raises AssertionError if the core's derived state is inconsistent."""
        await self._call(lambda number: CheckIntegrity(number, dp_rank))

    async def shutdown(self) -> None:
        """Disconnects and waits for the process to end. Idempotent."""
        self._is_closing = True
        if self._transport is not None:
            self._transport.close()
        if await asyncio.to_thread(self._process.ended, _EXIT_SECONDS) is None:
            await asyncio.to_thread(self._process.end)

    async def _call(self, make_message: Callable[[int], Any]) -> bool | BlockMap | ExpertMap:
        number = next(self._call_numbers)
        self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(make_message(number))
            return await self._calls[number]
        finally:
            del self._calls[number]

    def _send(self, message: Any) -> None:
        if self.death is not None:
            raise EngineDeadError(str(self.death))
        assert self._transport is not None, "not connected"
        self._transport.write(CODEC.encode(message))

    # ---- asyncio.Protocol ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # pyright: ignore[reportAttributeAccessIssue]

    def data_received(self, data: bytes) -> None:
        try:
            messages = self._reader.feed(data)
        except WireError as error:
            self._failure = Failed(str(error))
            self._process.kill()
            return
        for message in messages:
            self._handle(message)

    def _handle(self, message: Any) -> None:
        match message:
            case StepReport() | Refused():
                self._handler(message)
            case Reply(call):
                future = self._calls.get(call)
                if future is not None and not future.done():
                    _resolve(future, message)
            case Ready():
                self._engines.append(message)
                if len(self._engines) == self._num_engines:
                    self.ready.set_result(self._engines)
            case Failed():
                self._failure = message
            case _:
                raise AssertionError(f"the engine core sends no {type(message).__name__}")

    def connection_lost(self, exc: Exception | None) -> None:
        """Called when the core has ended: everything that waits for it is notified."""
        error = self._cause_of_death()
        self.death = error if isinstance(error, EngineDeadError) else EngineDeadError(str(error))
        if not self.ready.done():
            self.ready.set_exception(error)
            self.ready.exception()  # Marks it as seen: the task that started this client may have been cancelled.
        for future in self._calls.values():
            if not future.done():
                future.set_exception(self.death)
        self._handler(self.death)

    def _cause_of_death(self) -> Exception:
        if self._failure is not None:
            kind = ConfigError if self._failure.is_config else EngineDeadError
            return kind(self._failure.message)
        if self._is_closing:
            return EngineDeadError("the engine has stopped: it was shut down")
        how = self._process.ended(_DEATH_SECONDS)
        closed = "the engine core closed the connection"
        return EngineDeadError(closed if how is None else f"the engine core's process {how}")


def _resolve(future: asyncio.Future[bool | BlockMap | ExpertMap], reply: Reply) -> None:
    if reply.error is None:
        future.set_result(reply.value)
    else:
        future.set_exception(AssertionError(reply.error))


def _ignore(_: object) -> None:
    """The default handler before the front end is built."""

"""The views of all instances that publish KV events, updated over ZeroMQ."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import zmq
import zmq.asyncio

from penstock.router.health import pause
from penstock.router.instances import Instance
from penstock.router.kv_view import KVView
from penstock.router.pool import Pool
from penstock.utils.held_blocks import PromptKeys
from penstock.utils.logging import get_logger

logger = get_logger(__name__)

_MAX_MESSAGE_BYTES = 64 << 20
_NUMBER_BYTES = 8
_REPLAY_SECONDS = 10.0
_RETRY_SECONDS = 10.0


class KVSubscriptions:
    """An async context manager. `follow` must be called when instances have been added or removed."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._views: dict[str, KVView] = {}
        self._tasks: dict[Instance, asyncio.Task[None]] = {}

    async def __aenter__(self) -> Self:
        self._context = zmq.asyncio.Context()
        self.follow()
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._context.destroy(linger=0)

    def follow(self) -> None:
        """Subscribes to new instances of the pool, and unsubscribes from removed ones."""
        publishing = [member.instance for member in self._pool if member.instance.events]
        for instance in [each for each in self._tasks if each not in publishing]:
            self._tasks.pop(instance).cancel()
            del self._views[instance.url]
        for instance in publishing:
            if instance not in self._tasks:
                view = self._views[instance.url] = KVView()
                self._tasks[instance] = asyncio.create_task(self._follow(instance, view))

    def lost(self, url: str) -> None:
        """Forgets the blocks of an instance that has died."""
        if url in self._views:
            self._views[url].restart()

    @property
    def num_blocks(self) -> dict[str, int]:
        """The number of blocks by URL, for instances that publish events."""
        return {url: view.held.num_blocks for url, view in self._views.items()}

    def cached(self, prompt: PromptKeys) -> dict[str, int]:
        """Returns by URL how many of the prompt's tokens the instances hold."""
        found = ((url, view.held.num_cached(prompt)) for url, view in self._views.items())
        return {url: count for url, count in found if count}

    async def _follow(self, instance: Instance, view: KVView) -> None:
        """Takes events until it is cancelled. After an error, such as too many open files, it starts again."""
        while True:
            try:
                with self._connected(zmq.SUB, instance.events) as published:
                    await self._take_from(published, instance, view)
            except zmq.ZMQError as error:
                logger.error("%s: its KV events cannot be followed, trying again: %s", instance.url, error)
            view.restart()
            await pause(_RETRY_SECONDS)

    async def _take_from(self, published: Any, instance: Instance, view: KVView) -> None:
        # Replays are requested one at a time; published batches wait in the socket meanwhile.
        await self._replay(instance, view)
        while True:
            frames = await _received(published)
            if len(frames) == 3 and len(frames[1]) == _NUMBER_BYTES:
                batch = (int.from_bytes(frames[1], "big"), frames[2])
                if view.receive(*batch) is not None:
                    await self._replay(instance, view)
                    view.take(*batch)

    async def _replay(self, instance: Instance, view: KVView) -> None:
        """Requests the missing batches, as far as the instance still has them."""
        if not instance.replay:
            return
        try:
            with self._connected(zmq.DEALER, instance.replay) as asking:
                async with asyncio.timeout(_REPLAY_SECONDS):
                    await asking.send_multipart([b"", view.next_number.to_bytes(_NUMBER_BYTES, "big")])
                    while len(frames := await _received(asking)) == 4 and frames[3]:
                        view.take(int.from_bytes(frames[2], "big"), frames[3])
        except TimeoutError:
            logger.info("%s does not replay its KV events", instance.url)

    @contextmanager
    def _connected(self, kind: int, endpoint: str) -> Iterator[Any]:
        with self._context.socket(kind) as made:
            made.set(zmq.LINGER, 0)
            made.set(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
            made.set(zmq.IPV6, int("[" in endpoint))
            # A whole replay must fit; published batches are limited by the instance.
            made.set(zmq.RCVHWM, 0 if kind == zmq.DEALER else 100_000)
            if kind == zmq.SUB:
                made.set(zmq.SUBSCRIBE, b"")
            made.connect(endpoint)
            yield made


async def _received(socket: Any) -> list[bytes]:
    """Returns the next message. Other tasks run first, even if it has already arrived."""
    receiving = socket.recv_multipart()
    await asyncio.wait((receiving,))
    return receiving.result()

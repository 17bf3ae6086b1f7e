"""The router's subscriptions to the KV events of instances, over real sockets."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio

from penstock.engine.kv_events import encode_batch
from penstock.messages.kv_events import BlockStored
from penstock.router import kv_subscriptions
from penstock.router.instances import Instance, Role
from penstock.router.kv_subscriptions import KVSubscriptions
from penstock.router.pool import Pool

URL = "http://instance"


def instance(endpoint: str) -> Instance:
    return Instance(URL, Role.SERVE, events=endpoint)


class Publisher:
    """An instance that stores `num_blocks` blocks, and publishes so again and again."""

    def __init__(self, folder: Path, num_blocks: int) -> None:
        self.endpoint = f"ipc://{folder}/{num_blocks}"
        names = tuple(f"{number}".encode() for number in range(num_blocks))
        tokens = tuple(range(4 * num_blocks))
        stored = BlockStored(block_hashes=names, parent_block_hash=None, token_ids=tokens, block_size=4)
        self._batches = [encode_batch(0.0, [stored]), *[encode_batch(0.0, [])] * 49]

    async def publish(self) -> None:
        with zmq.asyncio.Context() as context, context.socket(zmq.PUB) as socket:
            socket.bind(self.endpoint)
            while True:
                for number, batch in enumerate(self._batches):
                    await socket.send_multipart([b"", number.to_bytes(8, "big"), batch])
                    await asyncio.sleep(0.001)


async def until_known(views: KVSubscriptions, num_blocks: int) -> None:
    async with asyncio.timeout(10):
        while views.num_blocks.get(URL) != num_blocks:
            await asyncio.sleep(0.005)


def test_an_instance_that_was_replaced_is_followed_at_its_new_endpoint(tmp_path: Path) -> None:
    async def check() -> None:
        first, second = Publisher(tmp_path, 1), Publisher(tmp_path, 2)
        publishing = [asyncio.create_task(each.publish()) for each in (first, second)]
        pool = Pool(30)
        pool.add(instance(first.endpoint))
        async with KVSubscriptions(pool) as views:
            await until_known(views, 1)
            pool.drain(URL, remove=True)
            pool.add(instance(second.endpoint))
            views.follow()
            await until_known(views, 2)
        for task in publishing:
            task.cancel()

    asyncio.run(check())


def test_a_subscription_that_fails_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make, failures = zmq.asyncio.Context.socket, [zmq.ZMQError(errno.EMFILE)] * 2

    def socket(context: Any, kind: int) -> Any:
        if kind == zmq.SUB and failures:
            raise failures.pop()
        return make(context, kind)

    async def check() -> None:
        publisher = Publisher(tmp_path, 3)
        publishing = asyncio.create_task(publisher.publish())
        pool = Pool(30)
        pool.add(instance(publisher.endpoint))
        async with KVSubscriptions(pool) as views:
            await until_known(views, 3)
        publishing.cancel()

    monkeypatch.setattr(zmq.asyncio.Context, "socket", socket)
    monkeypatch.setattr(kv_subscriptions, "_RETRY_SECONDS", 0.01)
    asyncio.run(check())
    assert caplog.text.count("Too many open files") == 2

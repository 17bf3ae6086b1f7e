"""Sends requests through a router while its instances die, drain, leave and join, and counts the outcomes."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import aiohttp

_LIMIT_S = 600.0


@dataclass
class Tally:
    """Counts of requests. `answered`: completely; `refused`: an error with a message; `cut`: by the end of the
    connection within the answer. `wrong` names those with none of the three: lost tokens, foreign tokens, two answers.
    """

    answered: int = 0
    refused: int = 0
    cut: int = 0
    wrong: list[str] = field(default_factory=list[str])
    messages: Counter[str] = field(default_factory=Counter[str])

    @property
    def total(self) -> int:
        return self.answered + self.refused + self.cut + len(self.wrong)


async def ask(session: aiohttp.ClientSession, url: str, name: str, num_tokens: int, tally: Tally) -> None:
    """Sends one streamed request, and checks it token by token."""
    body = {"prompt": name, "max_tokens": num_tokens, "stream": True}
    found: list[str] = []
    try:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            if response.status != 200:
                message = (await response.json())["error"]["message"]
                tally.refused += 1
                tally.messages[f"{response.status} {message.partition(';')[0].partition('http:')[0][:60]}"] += 1
                return
            async for line in response.content:
                if line.startswith(b"data: "):
                    found.append(line[6:].decode().strip())
    except (aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError, ConnectionResetError):
        # The client may drop data that it had received before the end of the connection.
        if found == expected(name, num_tokens)[: len(found)]:
            tally.cut += 1
        else:
            tally.wrong.append(f"{name}: {len(found)} of {num_tokens} tokens, then the connection's end")
        return
    if found == expected(name, num_tokens):
        tally.answered += 1
    else:
        tally.wrong.append(f"{name}: {len(found)} events: {found[:2]} ... {found[-2:]}")


def expected(name: str, num_tokens: int) -> list[str]:
    return [*(json.dumps({"name": name, "token": number}) for number in range(num_tokens)), "[DONE]"]


class Instances(Protocol):
    """Stub instances, in this process or another one."""

    urls: Sequence[str]

    async def stop(self, number: int) -> None: ...

    async def start(self, number: int) -> None: ...


@dataclass
class Disturbance:
    """Instances die for a while, are drained and resumed, or removed and added. Paced by requests, not by time, so that
    it does not depend on the machine: after every `every` requests something ends and something else begins.
    """

    session: aiohttp.ClientSession
    admin_url: str
    instances: Instances
    tally: Tally
    every: int
    rng: random.Random
    is_over: bool = False

    async def run(self) -> None:
        """Runs until `is_over`; then ends all disturbances."""
        while not self.is_over:
            number = self.rng.randrange(len(self.instances.urls))
            what = self.rng.choice(("die", "drain", "remove", "remove now"))
            await self._begin(what, number)
            await self._reach(self.tally.total + self.every)
            await self._end(what, number)

    async def _begin(self, what: str, number: int) -> None:
        url = self.instances.urls[number]
        if what == "die":
            await self.instances.stop(number)
        elif what == "drain":
            await self._administer("/drain", url)
        else:
            await self._administer("/remove", url, now=what == "remove now")

    async def _end(self, what: str, number: int) -> None:
        if what == "die":
            await self.instances.start(number)
        else:
            await self._administer("/instances", self.instances.urls[number], role="serve")

    async def _reach(self, total: int) -> None:
        while self.tally.total < total and not self.is_over:
            await asyncio.sleep(0.005)

    async def _administer(self, path: str, url: str, **more: object) -> None:
        async with self.session.post(self.admin_url + path, json={"url": url, **more}) as response:
            assert response.status == 200, await response.text()


async def storm(
    url: str, admin_url: str, instances: Instances, *, num_requests: int, concurrency: int, seed: int = 0
) -> Tally:
    """Sends all requests, `concurrency` at a time, with a hundred disturbances or one for every 10 requests."""
    rng, tally = random.Random(seed), Tally()
    names = iter(range(num_requests))
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(_LIMIT_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def client() -> None:
            for number in names:
                await ask(session, url, f"request {number}", rng.randrange(1, 40), tally)

        every = max(10, num_requests // 100)
        disturbance = Disturbance(session, admin_url, instances, tally, every, random.Random(seed + 1))

        async def clients() -> None:
            await asyncio.gather(*(client() for _ in range(concurrency)))
            disturbance.is_over = True

        await asyncio.gather(clients(), disturbance.run())
    return tally

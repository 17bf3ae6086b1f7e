"""What one instance or client of a router can take from the others."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.metrics.router import InstanceView, RouterMetrics
from penstock.router import http_client
from penstock.router.bodies import ClientRequest
from penstock.router.dispatcher import Dispatcher, Limits
from penstock.router.exchange import Exchanges
from penstock.router.http_client import Call, fetch
from penstock.router.instances import Instance, Role, Signal
from penstock.router.kv_subscriptions import _received
from penstock.router.pool import Pool
from penstock.router.prompts import TokenizedPrompts
from penstock.utils.errors import PeerError


def test_other_tasks_have_their_turn_between_messages() -> None:
    async def main() -> None:
        turns: list[int] = []

        async def other() -> None:
            for turn in range(10):
                turns.append(turn)
                await asyncio.sleep(0)

        def receive() -> asyncio.Future[list[bytes]]:
            found: asyncio.Future[list[bytes]] = asyncio.get_running_loop().create_future()
            found.set_result([b"message"])
            return found

        task = asyncio.create_task(other())
        for _ in range(10):
            assert await _received(SimpleNamespace(recv_multipart=receive)) == [b"message"]
        assert len(turns) == 10
        await task

    asyncio.run(main())


def test_an_answer_that_is_read_as_a_whole_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "_MAX_FETCHED_BYTES", 10)

    def upstream(*parts: bytes) -> Any:
        async def pass_to(take: Any) -> bool:
            return all(take(part, False) for part in parts)

        @contextlib.contextmanager
        def answer() -> Iterator[Any]:
            yield SimpleNamespace(status=200, headers=(), pass_to=pass_to)

        async def ask(_: Call) -> Any:
            return answer()

        return SimpleNamespace(ask=ask)

    call = Call("GET", "http://a/health")
    assert asyncio.run(fetch(upstream(b"12345", b"67890"), call, 5)) == (200, (), b"1234567890")
    with pytest.raises(PeerError, match="larger than 10 bytes"):
        asyncio.run(fetch(upstream(b"12345", b"67890", b"1"), call, 5))


def test_values_of_a_removed_instance_are_not_shown() -> None:
    metrics = RouterMetrics()
    line = (1.0, 0.01)
    view = InstanceView("http://gone", "serve", "ready", True, 0, 0, 3, line, line, line)
    assert b"http://gone" in metrics.render("", [view], 0, {})[0]
    assert b"http://gone" not in metrics.render("", [], 0, {})[0]


def make_exchanges(**fields: Any) -> Exchanges:
    exchanges = Exchanges.__new__(Exchanges)
    exchanges._scopes = defaultdict(dict)
    for name, value in fields.items():
        setattr(exchanges, name, value)
    return exchanges


def test_an_instance_may_be_cut_off_twice() -> None:
    async def main() -> None:
        exchanges = make_exchanges()
        async with asyncio.timeout(None) as scope:
            exchanges._scopes["a"][scope] = None
            exchanges.cut_off("a")
            try:
                await asyncio.Event().wait()
            finally:
                exchanges.cut_off("a")

    with pytest.raises(TimeoutError):
        asyncio.run(main())


def test_an_instance_owes_nothing_while_the_client_reads() -> None:
    seen: list[bool] = []
    lease = SimpleNamespace(is_sent=False, member=None)
    parts = iter([False, True])

    async def pass_to(take: Any) -> bool:
        seen.append(lease.is_sent)
        is_last = next(parts)
        take(b"part", is_last)
        return is_last

    async def drained() -> None:
        seen.append(lease.is_sent)

    client = SimpleNamespace(has_begun=True, write=lambda *_: True, drained=drained)
    answer = SimpleNamespace(status=200, headers=(), pass_to=pass_to)
    request = SimpleNamespace(target=lease, phase=None)
    attempt = SimpleNamespace(request=request, stream=None, tail=SimpleNamespace(add=lambda _: None))
    exchanges = make_exchanges(
        _dispatcher=SimpleNamespace(answer_goes_on=lambda *_: None), _clock=SimpleNamespace(now=lambda: 0.0)
    )
    asyncio.run(exchanges._pass_on(cast(Any, attempt), cast(Any, answer), cast(Any, client)))
    assert seen == [False, True, False, True]


def test_only_the_beginning_of_a_long_prompt_is_looked_up() -> None:
    """No other request proceeds meanwhile, and a body may list millions of tokens."""
    pool, looked_up = Pool(dead_after=10), list[int]()
    for url in ("http://a", "http://b"):
        pool.add(Instance(url, Role.SERVE))
        pool.observe(url, Signal.READY, 0)

    def cached(prompt: Any) -> dict[str, int]:
        looked_up.append(prompt.num_tokens)
        return {"http://a": prompt.num_tokens}

    views = cast(Any, SimpleNamespace(num_blocks={"http://a": 1}, cached=cached))
    prompts = TokenizedPrompts(Dispatcher(pool, Limits()), cast(Any, None), views)
    for num_tokens in (1 << 17, 1 << 20):
        body = {"prompt": [1] * num_tokens}
        found = asyncio.run(prompts.look_up(ClientRequest("POST", "/v1/completions", "/v1/completions", (), b"", body)))
        assert (found.num_tokens, found.cached) == (num_tokens, {"http://a": 1 << 17})
    assert looked_up == [1 << 17] * 2

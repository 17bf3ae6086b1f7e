"""Which instance computes a prompt, by measured rates: a decode instance itself, or one that loads from a sibling."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from aiohttp import web

from penstock.router.bodies import ClientRequest
from penstock.router.dispatcher import Computing, Dispatcher, Limits, Plan, Policy, Routed
from penstock.router.instances import Instance, Role, Signal
from penstock.router.kv_subscriptions import KVSubscriptions
from penstock.router.pool import Pool
from penstock.router.rates import Rate
from penstock.utils.held_blocks import PromptKeys
from tests.unit.router_stubs import Handler, Stub, abort, fail, never, routed, run, serve, until

LIMITS = Limits(max_outstanding=8, max_local_prefill=1000)


def dispatcher(limits: Limits = LIMITS, **roles: int) -> Dispatcher:
    """Returns a dispatcher with ready instances named p0, d0, s0 and so on, which share KV."""
    pool = Pool(30)
    for role, count in roles.items():
        for number in range(count):
            url = f"{role[0]}{number}"
            pool.add(Instance(url, Role(role)))
            pool.learn(url, (), shares_kv=True)
            pool.observe(url, Signal.READY, 0)
    return Dispatcher(pool, limits)


def request(num_tokens: int, **cached: int) -> Routed:
    token_ids = range(num_tokens)
    return Routed(lambda: True, num_prompt_tokens=num_tokens, cached=cached, token_ids=token_ids, is_timed=True)


def plan_of(router: Dispatcher, each: Routed, now: float) -> Plan:
    decision = router.submit(each, now)
    assert isinstance(decision, Plan), decision
    return decision


def answer(router: Dispatcher, each: Routed, now: float, prefill: float = 0.0, first: float = 0.0) -> Computing:
    """Runs a request: its prefill instance takes `prefill` seconds, and the first token comes `first` seconds later."""
    plan = plan_of(router, each, now)
    if plan.prefill is not None:
        router.prefill_ends(each, now + prefill, is_done=True)
    router.answer_goes_on(each, now + prefill + first)
    router.end(each)
    router.check_integrity()
    return plan.computing


def measured(limits: Limits = LIMITS, **more: int) -> Dispatcher:
    """A prefill instance computes 1000 tokens/s; a load takes 0.1 s and 0.1 ms for each token."""
    router = dispatcher(limits, prefill=1, decode=1, **more)
    for number, size in enumerate((1000, 2000)):
        assert answer(router, request(size), number, size / 1000, 0.1 + size / 10_000) is Computing.PREFILL
    return router


# ---- Rates ----


def rate(*pairs: tuple[int, float]) -> Rate:
    made = Rate()
    for tokens, seconds in pairs:
        made.add(tokens, seconds, 0)
    return made


def test_a_rate_is_a_line_through_what_was_measured() -> None:
    made = rate(*((tokens, 0.5 + tokens / 100) for tokens in (10, 700, 30, 200)))
    assert made.line() == pytest.approx((0.5, 0.01))
    assert made.seconds(1000) == pytest.approx(10.5)


@pytest.mark.parametrize(
    ("pairs", "line"),
    [
        (((100, 2.0),), (0.0, 0.02)),  # equal lengths say nothing of the time for none
        (((100, 2.0), (100, 2.0), (101, 2.02)), (0.0, 0.02)),
        (((0, 2.0),), (2.0, 0.0)),
        (((100, 3.0), (1000, 1.0)), (1.947, 0.0)),  # longer is not sooner
        (((100, 0.0), (1000, 9.0)), (0.0, 0.009)),  # no request takes less than nothing
    ],
)
def test_a_rate_is_never_negative(pairs: Any, line: tuple[float, float]) -> None:
    assert rate(*pairs).line() == pytest.approx(line, rel=0.02)


def test_later_measurements_weigh_more_and_old_ones_are_forgotten() -> None:
    made = rate(*[(100, 1.0)] * 50, *[(100, 2.0)] * 10)
    assert 1.6 < made.seconds(100) < 1.7
    assert made.is_known(59)
    assert not made.is_known(60)
    made.add(100, 5.0, 60)
    assert made.seconds(100) == pytest.approx(5.0)


# ---- Decode instances that compute prompts ----


def test_prompts_are_divided_until_both_halves_are_measured() -> None:
    router = dispatcher(prefill=1, decode=1)
    assert answer(router, request(10), 0, 1.0, 1.0) is Computing.PREFILL
    # The decode instance counts as fast as the other one until it has computed a prompt, and saves the load.
    assert answer(router, request(10), 1, 1.0) is Computing.DECODE
    assert answer(router, request(10), 62, 1.0) is Computing.PREFILL, "the load is to be measured anew"


def test_answers_that_are_not_streamed_measure_no_load() -> None:
    router = dispatcher(prefill=1, decode=1)
    for now in range(3):
        each = replace(request(10), is_timed=False)
        assert answer(router, each, now, 1.0, 1.0) is Computing.PREFILL


def test_a_short_or_cached_prompt_is_computed_where_it_is_answered() -> None:
    for size, cached, computing in (
        (100, 0, Computing.DECODE),  # 0.1 s, against 0.1 s and a load of 0.11 s
        (600, 0, Computing.DECODE),  # 0.6 s, against 0.6 s and 0.16 s
        (700, 0, Computing.PREFILL),  # 0.7 s, against 0.7 s and 0.17 s: below the margin
        (2000, 0, Computing.PREFILL),
        (2000, 1800, Computing.DECODE),  # the prefill instance would compute all of it
    ):
        router = measured()
        assert plan_of(router, request(size, d0=cached), 4).computing is computing, (size, cached)


def test_the_queue_of_each_side_counts() -> None:
    router = measured()
    assert plan_of(router, request(900), 4).computing is Computing.PREFILL
    # Now 900 tokens are ahead at the prefill instance.
    assert plan_of(router, request(900), 4).computing is Computing.DECODE
    # And as many at the decode instance.
    assert plan_of(router, request(900), 4).computing is Computing.PREFILL


def test_a_slow_decode_instance_computes_no_prompts_until_its_rate_is_forgotten() -> None:
    router = measured()
    assert answer(router, request(100), 4, first=3.0) is Computing.DECODE
    assert answer(router, request(100), 10, 0.1, 0.1) is Computing.PREFILL
    # The others are measured all the time.
    for now in range(20, 70, 10):
        answer(router, request(1000), now, 1.0, 0.2)
    assert answer(router, request(100), 70, first=0.1) is Computing.DECODE


def test_the_prompts_that_decode_instances_compute_are_limited() -> None:
    off = measured(replace(LIMITS, max_local_prefill=0))
    assert plan_of(off, request(1), 4).computing is Computing.PREFILL
    few = measured(replace(LIMITS, max_self_prefills=1))
    first = request(10)
    assert [plan_of(few, each, 4).computing for each in (first, request(10))] == [Computing.DECODE, Computing.PREFILL]
    few.answer_goes_on(first, 4.01)
    assert plan_of(few, request(10), 5).computing is Computing.DECODE
    few.check_integrity()


def test_a_short_prompt_does_not_wait_for_a_prefill_instance() -> None:
    router = dispatcher(replace(LIMITS, max_outstanding=1), prefill=1, decode=3)
    assert plan_of(router, request(1001), 0).computing is Computing.PREFILL
    assert router.submit(request(1001), 0) is None
    # Another client's: nothing is measured yet, but any time is less than that.
    assert plan_of(router, replace(request(100), model="m"), 0).computing is Computing.DECODE


def test_a_request_that_a_decode_instance_has_failed_is_divided_elsewhere() -> None:
    router = measured()
    router.pool.add(Instance("d1", Role.DECODE))
    router.pool.observe("d1", Signal.READY, 4)
    each = request(10, d0=8)
    assert plan_of(router, each, 4).target.url == "d0"
    decision = router.failed(each, "d0", "x", 5)
    assert isinstance(decision, Plan)
    assert (decision.target.url, decision.computing) == ("d1", Computing.PREFILL), "it has measured no load"
    router.check_integrity()


# ---- Prefixes from siblings ----


def loaded(**cached: int) -> tuple[Dispatcher, Routed]:
    """Returns instances of 1000 tokens/s, of which s0 has much to do, and a request."""
    router = dispatcher(serve=2)
    assert answer(router, request(1000, s0=1), 0, first=1.0) is Computing.WHOLE
    for _ in range(5):
        assert plan_of(router, request(3000, s0=3000), 2).target.url == "s0"
    return router, request(1000, **cached)


def test_an_instance_with_room_loads_the_beginning_from_one_that_has_it() -> None:
    router, each = loaded(s0=800, s1=160)
    plan = plan_of(router, each, 2)
    assert (plan.target.url, plan.computing, plan.num_shared, plan.num_cached) == ("s1", Computing.SIBLING, 800, 160)
    assert plan.prefill is not None
    assert plan.prefill.url == "s0"
    found = router.pool.get("s1")
    assert found is not None
    assert found.num_prompt_tokens == 200
    router.prefill_ends(each, 2.1, is_done=True)
    router.answer_goes_on(each, 2.5)
    # 0.2 s of the 0.4 s since then are those of the rest.
    assert found.loads.seconds(640) == pytest.approx(0.2, rel=0.01)
    assert plan.prefill.url == "s0"
    source = router.pool.get("s0")
    assert source is not None
    assert source.shares.seconds(640) == pytest.approx(0.1, rel=0.01)
    assert not found.prompts.is_known(2.5)
    router.end(each)
    router.check_integrity()


@pytest.mark.parametrize("cached", [{}, {"s0": 63}, {"s0": 200, "s1": 160}, {"s1": 800}])
def test_little_is_not_loaded(cached: dict[str, int]) -> None:
    router, each = loaded(**cached)
    assert plan_of(router, each, 2).computing is Computing.WHOLE


def test_nothing_is_loaded_where_computing_is_sooner_or_that_is_unknown() -> None:
    router, each = loaded(s0=800)
    assert answer(router, each, 2, first=0.2 + 0.7) is Computing.SIBLING
    assert plan_of(router, request(1000, s0=800), 3).computing is Computing.WHOLE, "0.7 s, against 0.8 s"
    assert plan_of(router, request(1000, s0=800), 63).computing is Computing.WHOLE, "no rate is known"


def test_only_instances_that_say_so_share() -> None:
    for url in ("s0", "s1"):
        router, each = loaded(s0=800)
        router.pool.learn(url, (), shares_kv=False)
        assert plan_of(router, each, 2).computing is Computing.WHOLE
    router, each = loaded(s0=800)
    each.is_divisible = lambda: False
    assert plan_of(router, each, 2).computing is Computing.WHOLE
    router, each = loaded(s0=800)
    router.pool.drain("s0")
    assert plan_of(router, each, 2).computing is Computing.WHOLE


def test_a_sibling_that_fails_is_left_out() -> None:
    router, each = loaded(s0=800)
    plan_of(router, each, 2)
    decision = router.failed(each, "s0", "x", 3)
    assert isinstance(decision, Plan)
    assert (decision.target.url, decision.computing) == ("s1", Computing.WHOLE)
    router.check_integrity()


@pytest.mark.parametrize("has_failed", [False, True])
def test_a_sibling_that_keeps_others_waiting_is_left_out_for_a_minute(has_failed: bool) -> None:
    router, each = loaded(s0=800)
    assert plan_of(router, each, 2).computing is Computing.SIBLING
    if has_failed:
        router.failed(each, "s0", "it has not answered within 5 seconds", 7)
    else:
        router.prefill_ends(each, 7, is_done=True)
    router.end(each)
    again = request(1000, s0=800)
    assert plan_of(router, again, 8).computing is Computing.WHOLE
    router.end(again)
    assert answer(router, request(1000), 66, first=1.0) is Computing.WHOLE, "so that a rate is known"
    assert plan_of(router, request(1000, s0=800), 68).computing is Computing.SIBLING, "it may no longer be busy"
    router.check_integrity()


def test_a_sibling_is_not_asked_while_it_has_prompts_to_compute() -> None:
    router, each = loaded(s0=800)
    busy = request(3000, s0=2000)
    assert plan_of(router, busy, 2).target.url == "s0"
    assert plan_of(router, each, 2).computing is Computing.WHOLE, "its 1000 tokens come first"
    router.end(each)
    router.end(busy)
    assert plan_of(router, request(1000, s0=800), 2).computing is Computing.SIBLING


TOKENS = list(range(100))


async def stream(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    if body.get("max_tokens") == 1 and not body.get("stream"):
        return web.json_response({"choices": [], "kv_transfer_params": {"ticket": "t"}})
    await asyncio.sleep(0.02)
    return web.Response(text=f"data: {json.dumps(body)}\n\ndata: [DONE]\n\n")


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """What instances have of every prompt, as if they had published it."""
    cached: dict[str, int] = {}

    def look_up(_: KVSubscriptions, prompt: PromptKeys) -> dict[str, int]:
        return {url: min(count, prompt.num_tokens) for url, count in cached.items()}

    monkeypatch.setattr(KVSubscriptions, "cached", look_up)
    monkeypatch.setattr(KVSubscriptions, "num_blocks", property(lambda _: cached))
    return cached


def sharing(handler: Handler) -> Stub:
    stub = serve(handler)
    stub.shares_kv = True
    return stub


@pytest.mark.parametrize("sibling", [stream, fail, abort])
def test_the_sibling_is_asked_for_its_prefix_and_the_target_gets_the_ticket(
    sibling: Handler, known: dict[str, int]
) -> None:
    async def check() -> None:
        target, other = sharing(stream), sharing(stream)
        async with routed(target, other, policy=Policy.PREFIX_AWARE) as client:
            body = {"model": "m", "prompt": TOKENS, "stream": True, "cache_salt": "s", "tools": []}
            known[target.url] = 1
            assert (await client.ask(body=body))[0] == 200
            # The other one has the prompt, and much to do.
            known[other.url] = 80
            other.handler = never
            busy = [asyncio.create_task(client.ask(body={**body, "n": 1})) for _ in range(1)]
            await until(lambda: other.num_requests == 1)
            other.handler = sibling
            status, content = await client.ask(body=body, headers={"Authorization": "Bearer k"})
            assert (status, content.endswith(b"[DONE]\n\n")) == (200, True)
            asked = other.bodies[-1]
            assert asked.pop("kv_transfer_params")["do_remote_decode"] is True
            prefix = {"model": "m", "cache_salt": "s", "prompt": TOKENS[:81], "max_tokens": 1, "stream": False}
            assert asked == prefix
            assert other.headers[-1]["Authorization"] == "Bearer k"
            assert target.bodies[-1].get("kv_transfer_params") == ({"ticket": "t"} if sibling is stream else None)
            assert await client.metric('penstock_router_prompts_total{computing="sibling"}') == 1
            for each in busy:
                each.cancel()

    run(check)


# ---- Lengths ----


def test_a_list_of_tokens_is_not_estimated() -> None:
    body = {"prompt": [10_000] * 7}
    made = ClientRequest("POST", "/v1/completions", "/v1/completions", (), json.dumps(body).encode(), body)
    assert made.estimate_tokens() == 7
    assert msgspec.structs.replace(made, completion={"prompt": "a"}).estimate_tokens() == len(made.body) // 4 + 1

"""The router's decisions without sockets, on a clock that the test moves."""

from __future__ import annotations

import asyncio
import json
from random import Random
from typing import Self, cast

import pytest

from penstock.cli.commands import make_parser
from penstock.router.bodies import is_divisible, only_prompt
from penstock.router.dispatcher import Computing, Decision, Dispatcher, Limits, Plan, Policy, Refusal, Routed
from penstock.router.health import HealthChecks, HealthConfig, Reply, signal_of, tokens_counted
from penstock.router.http_client import Call, HttpUpstream, Take
from penstock.router.instances import Instance, Role, Signal, State, make_instance, parse_instance
from penstock.router.observer import Usage, usage_of
from penstock.router.pool import Pool
from penstock.utils.clock import ManualClock
from penstock.utils.errors import ConfigError


def dispatcher(policy: Policy = Policy.PREFIX_AWARE, dead_after: float = 30, **roles: int) -> Dispatcher:
    """Returns a dispatcher with ready instances named p0, d0, s0 and so on."""
    pool = Pool(dead_after)
    for role, count in roles.items():
        for number in range(count):
            pool.add(Instance(f"{role[0]}{number}", Role(role)))
            pool.observe(f"{role[0]}{number}", Signal.READY, 0)
    return Dispatcher(pool, Limits(max_outstanding=2, max_queued=2, queue_timeout=10), policy)


def plan(decision: Decision) -> tuple[str, str | None]:
    assert isinstance(decision, Plan), decision
    return decision.target.url, decision.prefill and decision.prefill.url


def message(decision: Decision) -> str:
    assert isinstance(decision, Refusal), decision
    return decision.message


def request(num_prompt_tokens: int = 100, **cached: int) -> Routed:
    return Routed(lambda: True, num_prompt_tokens=num_prompt_tokens, cached=cached)


# ---- Choice ----


def test_a_prompt_goes_where_it_is_cached_unless_that_costs_more_than_computing_it() -> None:
    router = dispatcher(serve=3)
    decision = router.submit(request(400, s1=320), 0)
    assert plan(decision) == ("s1", None)
    assert isinstance(decision, Plan)
    assert decision.num_cached == 320
    # The other request there weighs 256 tokens and the 80 that it computes.
    assert plan(router.submit(request(400, s1=320), 0)) == ("s0", None)
    assert plan(router.submit(request(400, s1=352), 0)) == ("s1", None)


def test_both_halves_go_where_the_prompt_is_cached() -> None:
    assert plan(dispatcher(prefill=2, decode=2).submit(request(400, p1=160, d1=160), 0)) == ("d1", "p1")


def test_round_robin_ignores_load_and_caches() -> None:
    router = dispatcher(Policy.ROUND_ROBIN, serve=3)
    chosen = [plan(router.submit(request(10**6 * number, s0=900), 0))[0] for number in range(6)]
    assert chosen == ["s0", "s1", "s2"] * 2


def test_a_finished_prompt_is_no_load_of_its_prefill_instance() -> None:
    router = dispatcher(prefill=2, decode=1)
    first = request(10_000)
    assert plan(router.submit(first, 0)) == ("d0", "p0")
    router.prefill_ends(first, 1, is_done=True)
    assert plan(router.submit(request(), 1)) == ("d0", "p1")
    router.end(first)
    assert plan(router.submit(request(), 2)) == ("d0", "p0")
    router.check_integrity()


# ---- Retries ----


def test_another_prefill_instance_is_tried_and_then_the_decode_instance() -> None:
    router, each = dispatcher(prefill=2, decode=1), request()
    assert plan(router.submit(each, 0)) == ("d0", "p0")
    assert plan(router.failed(each, "p0", "x", 1)) == ("d0", "p1")
    decision = router.failed(each, "p1", "x", 2)
    assert plan(decision) == ("d0", None)
    assert isinstance(decision, Plan)
    assert decision.computing is Computing.FALLBACK
    router.answer_goes_on(each, 3)
    router.check_integrity()
    with pytest.raises(AssertionError):
        router.failed(each, "d0", "x", 4)


def test_a_request_is_not_given_to_the_same_instance_again() -> None:
    router, each = dispatcher(serve=2), request()
    assert plan(router.submit(each, 0)) == ("s0", None)
    assert plan(router.failed(each, "s0", "x", 1)) == ("s1", None)
    assert message(router.failed(each, "s1", "it broke", 2)) == "no instance is left that could answer; s1: it broke"


def test_a_retried_request_waits_ahead_of_later_requests() -> None:
    router = dispatcher(serve=2)
    running = [request() for _ in range(4)]
    chosen = [plan(router.submit(each, 0))[0] for each in running]
    assert chosen == ["s0", "s1"] * 2
    later = request()
    assert router.submit(later, 1) is None
    assert router.failed(running[0], "s0", "x", 2) is None
    router.end(running[1])
    assert [each for each, _ in router.poll(3)] == [running[0], later]
    router.check_integrity()


# ---- The queue ----


def test_the_queue_is_bounded_in_length_and_in_time() -> None:
    router = dispatcher(serve=1)
    running = [request() for _ in range(2)]
    assert all(plan(router.submit(each, 0)) for each in running)
    assert [router.submit(request(), now) for now in (0, 4)] == [None, None]
    assert message(router.submit(request(), 4)) == "2 requests are waiting already"
    assert router.next_poll == 10
    assert router.poll(9) == []
    ((late, decision),) = router.poll(10)
    assert message(decision) == "no instance was free within 10 seconds"
    router.end(late)
    assert (router.num_queued, router.next_poll) == (1, 14)


def test_a_request_that_no_instance_can_take_is_refused_at_once() -> None:
    router = dispatcher(serve=2)
    router.pool.observe("s0", Signal.LOST, 0)
    router.pool.drain("s1")
    assert message(router.submit(request(), 0)) == "no instance is left that could answer"
    router.pool.observe("s0", Signal.STARTING, 1)
    assert router.submit(request(), 1) is None, "an instance that is starting may answer soon"


def test_without_a_prefill_instance_decode_instances_compute_a_bounded_number_of_prompts() -> None:
    pool = dispatcher(decode=2).pool
    router = Dispatcher(pool, Limits(max_self_prefills=1))
    first = request()
    assert plan(router.submit(first, 0)) == ("d0", None)
    waiting = request()
    assert router.submit(waiting, 0) is None
    router.answer_goes_on(first, 1)
    assert [each for each, _ in router.poll(1)] == [waiting], "the first prompt has been computed"
    assert "may not compute prompts" in message(Dispatcher(pool, Limits(max_self_prefills=0)).submit(request(), 0))


# ---- Health ----


def test_a_silent_instance_becomes_unhealthy_and_then_dead_and_can_recover() -> None:
    pool = dispatcher(dead_after=30, serve=1).pool
    member = pool.get("s0")
    assert member is not None
    for now, signal, state, has_died in (
        (1, Signal.SILENT, State.UNHEALTHY, False),
        (20, Signal.STALLED, State.UNHEALTHY, False),
        (31, Signal.SILENT, State.DEAD, True),
        (32, Signal.SILENT, State.DEAD, False),
        (33, Signal.READY, State.READY, False),
        (34, Signal.SILENT, State.UNHEALTHY, False),
    ):
        assert pool.observe("s0", signal, now) is has_died
        assert member.state is state, now


def test_a_stalled_instance_gets_one_request_until_it_makes_progress() -> None:
    router = dispatcher(serve=1)
    pool = router.pool
    first = request()
    router.submit(first, 5)
    assert pool.stalled_for("s0", 65) == 60
    assert first.target is not None
    first.target.is_sent = True
    assert pool.stalled_for("s0", 65) == 0, "the instance waits for the client"
    first.target.is_sent = False
    pool.observe("s0", Signal.STALLED, 65)
    assert router.submit(request(), 65) is None
    router.end(first)
    assert pool.stalled_for("s0", 66) == 0, "it has no request"
    pool.observe("s0", Signal.READY, 66)
    ((second, _),) = router.poll(66)
    waiting = request()
    assert router.submit(waiting, 67) is None, "it already has a request"
    router.answer_goes_on(second, 68)
    assert [each for each, _ in router.poll(68)] == [waiting]


class HealthyInstance:
    """An instance that reports good health and counts tokens, for `HealthChecks` (an `exchange.Upstream`)."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.status, self.headers = 200, ()
        self.asked: list[str] = []
        self.body = b""

    async def ask(self, call: Call) -> Self:
        self.asked.append(call.url.rpartition("/")[2])
        self.body = (
            f"vllm:iteration_tokens_total_sum {self.num_tokens}".encode() if self.asked[-1] == "metrics" else b""
        )
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    async def pass_to(self, take: Take) -> bool:
        take(self.body, True)
        return True


def test_an_instance_that_reports_good_health_and_computes_nothing_has_stalled() -> None:
    router, clock, instance = dispatcher(serve=1), ManualClock(), HealthyInstance()
    checks = HealthChecks(router.pool, cast("HttpUpstream", instance), HealthConfig(stall_after=60), clock)
    member = router.pool.get("s0")
    assert member is not None

    def state_at(now: float, num_tokens: int) -> State:
        clock.advance(now - clock.now())
        instance.num_tokens, instance.asked = num_tokens, []
        asyncio.run(checks.check_all())
        return member.state

    assert state_at(1000, 5) is State.READY, "without requests there is nothing to compute"
    router.submit(request(), 1000)
    assert state_at(1029, 5) is State.READY
    assert "metrics" not in instance.asked, "metrics are read only in case of doubt"
    assert state_at(1031, 5) is State.READY
    assert state_at(1059, 6) is State.READY, "it computes a long prompt or an answer that is not streamed"
    assert state_at(1091, 6) is State.READY
    assert state_at(1120, 6) is State.UNHEALTHY
    assert "no progress for 61 s" in member.reason
    assert state_at(1121, 7) is State.READY


@pytest.mark.parametrize(
    ("health", "ready", "signal"),
    [
        (Reply(200, b'{"status": "ok"}'), Reply(200, b""), Signal.READY),
        (Reply(200, b""), Reply(404, b""), Signal.READY),
        (Reply(200, b"[]"), Reply(503, b'{"reason": "warming up"}'), Signal.STARTING),
        (Reply(200, b'{"status": "draining"}'), Reply(503, b""), Signal.DRAINING),
        (Reply(503, b'{"status": "dead"}'), Reply(503, b""), Signal.LOST),
        (Reply(500, b"\xff"), Reply(200, b""), Signal.STALLED),
        (Reply(200, b"[" * 100_000), Reply(200, b""), Signal.READY),
    ],
)
def test_the_signal_of_an_instances_replies(health: Reply, ready: Reply, signal: Signal) -> None:
    assert signal_of(health, ready)[0] is signal


def test_the_reason_of_an_instance_is_one_line() -> None:
    health = Reply(500, json.dumps({"reason": "out of\nmemory\x1b[2J", "status": 7}).encode())
    assert signal_of(health, Reply(200, b"")) == (Signal.STALLED, "out of memory [2J")


def test_counters_of_tokens_are_added_up() -> None:
    text = (
        b"# HELP vllm:prompt_tokens_total x\n"
        b'vllm:prompt_tokens_total{engine="0"} 3.0\nvllm:prompt_tokens_total{engine="1"} 4.0\n'
        b'vllm:iteration_tokens_total_bucket{le="1"} 99.0\nvllm:iteration_tokens_total_sum 5.0\n'
    )
    assert tokens_counted(text) == 12
    assert tokens_counted(b"vllm:prompt_tokens_total x") == 0
    assert tokens_counted(b"<html>") == 0


# ---- Configuration ----


def test_an_instance_is_written_as_a_url_with_options() -> None:
    text = "http://h:1/v1/,bootstrap=http://h:2,events=tcp://h:3,replay=tcp://h:4"
    assert parse_instance(text, Role.PREFILL) == Instance(
        "http://h:1", Role.PREFILL, "http://h:2", "tcp://h:3", "tcp://h:4"
    )


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("h:1", "write it as http://HOST:PORT"),
        ("http://h:1?a=b", "write it as http://HOST:PORT"),
        ("http://h:1,http://h:2", "write NAME=VALUE, with the names bootstrap, events, replay"),
        ("http://h:1,event=tcp://h:3", "write NAME=VALUE"),
        ("http://h:1,events=h:3", "write it as tcp://HOST:PORT"),
        ("http://h:1,replay=tcp://h:3", "needs events"),
        ("http://h:1,bootstrap=http://h:2", "only prefill instances"),
    ],
)
def test_errors_in_an_instance_say_how_to_write_it(text: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        parse_instance(text, Role.SERVE)


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        ([], "name instances with --serve"),
        (["--prefill", "http://h"], "--prefill needs --decode"),
        (["--serve", "http://h", "--decode", "http://h/"], "http://h is named twice"),
        (["--serve", "http://h", "--host", "0.0.0.0"], "the router checks no keys"),
        (["--serve", "http://h,x"], "write NAME=VALUE"),
    ],
)
def test_the_command_names_missing_and_invalid_flags(flags: list[str], error: str) -> None:
    args = make_parser().parse_args(["route", *flags])
    with pytest.raises(ConfigError, match=error):
        args.run(args)


@pytest.mark.parametrize("name", ["interval", "timeout", "stall_after"])
def test_times_of_health_checks_are_checked(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        HealthConfig(**{name: 0}).check()
    with pytest.raises(ConfigError, match="bootstrap"):
        make_instance("http://h", Role.DECODE, "http://b")


@pytest.mark.parametrize(
    ("prompt", "only"),
    [("a", "a"), (["a"], "a"), ([1, 2], [1, 2]), ([[1, 2]], [1, 2]), (["a", "b"], None), ([[1], [2]], None)],
)
def test_only_one_prompt_can_be_divided(prompt: object, only: object) -> None:
    assert only_prompt({"prompt": prompt}) == only
    assert is_divisible({"prompt": prompt}) is (only is not None)
    assert is_divisible({"messages": []})


# ---- Random traffic ----


def disturb(router: Dispatcher, rng: Random, url: str, now: float) -> None:
    """Changes the state of an instance, which may have been removed."""
    what = rng.randrange(3)
    if url not in router.pool or what == 0:
        router.pool.add(Instance(url, {"p": Role.PREFILL, "d": Role.DECODE, "s": Role.SERVE}[url[0]]))
        router.pool.observe(url, Signal.READY, now)
    elif what == 1:
        router.pool.observe(url, rng.choice(list(Signal)), now)
    else:
        router.pool.drain(url, remove=rng.random() < 0.5)


@pytest.mark.parametrize("seed", range(20))
def test_random_traffic_leaves_nothing_behind(seed: int) -> None:
    """Requests arrive, fail, are answered and end while instances fall silent, drain, are removed and return."""
    rng, now = Random(seed), 0.0
    router = dispatcher(prefill=2, decode=2, serve=1, dead_after=3)
    urls = [each.url for each in router.pool]
    planned: dict[Routed, Plan] = {}

    def take(each: Routed, decision: Decision) -> None:
        if isinstance(decision, Plan):
            assert not each.failed & {decision.target.url, decision.prefill and decision.prefill.url}
            planned[each] = decision
        elif decision is not None:
            router.end(each)

    for _ in range(400):
        now += rng.random()
        what, url = rng.randrange(6), rng.choice(urls)
        running = list(planned)
        if what == 0:
            each = request(rng.randrange(1000), **{url: 160})
            take(each, router.submit(each, now))
        elif what == 1 and running:
            each = rng.choice(running)
            if rng.random() < 0.5:
                router.answer_goes_on(each, now)
            router.end(each)
            del planned[each]
        elif what == 2 and running:
            each = rng.choice(running)
            chosen = planned.pop(each)
            at = rng.choice([chosen.target, chosen.prefill or chosen.target])
            take(each, router.failed(each, at.url, "x", now))
        elif what > 2:
            disturb(router, rng, url, now)
        for each, decision in router.poll(now):
            take(each, decision)
        router.check_integrity()
    for each in list(router._live):
        router.end(each)
    router.check_integrity()
    assert (router.num_live, router.num_queued) == (0, 0)
    assert all(member.num_outstanding == 0 for member in router.pool)


@pytest.mark.parametrize(
    ("usage", "found"),
    [
        (b'{"prompt_tokens": 3, "completion_tokens": 2}', Usage(3, 2)),
        (b'{"prompt_tokens": ' + b"9" * 400 + b', "completion_tokens": 2}', Usage(0, 2)),
        (b'{"prompt_tokens": ' + b"[" * 99_999, None),
    ],
)
def test_the_usage_of_an_answer(usage: bytes, found: Usage | None) -> None:
    assert usage_of(b'{"usage": ' + usage + b"}") == found

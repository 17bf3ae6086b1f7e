"""Worlds of a router alone: whether its decisions on where prompts are computed are good, with instances whose speeds
change. The dispatcher, its pool and its cost model are the real ones; an instance is its speeds.

A decision must not cost much more time than the other way if the router can know better: if it knows both, and has
measured each often enough since it has changed or was forgotten, or so long ago that it should have forgotten it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from penstock.router.dispatcher import Computing, Dispatcher, Limits, Plan, Routed
from penstock.router.instances import Instance, Role, Signal
from penstock.router.pool import Member, Pool
from penstock.router.rates import Rate
from penstock.simulation.trace import Trace, ViolationError, describe
from penstock.simulation.world import RunResult

_OFTEN = 80
_STILL_OLD = 10
"""Measurements. Until so many have been made after a change, an average may be mostly of earlier ones."""
_FORGOTTEN_AFTER = 65.0
_TRIED_AGAIN_AFTER = 55.0
_LEAST_SHARED = 64
_MANY = 12
_MANY_TOKENS = 100_000
_TOLERATED = 2.0
"""A decision may take so many times as long as the other way: its estimates are lines, and it wants a margin."""
_NEGLIGIBLE = 0.05
"""Seconds that are not worth a decision."""


@dataclass(frozen=True, slots=True)
class RoutingSetup:
    """`has_halves`: a prefill instance and decode instances, instead of serving ones that share KV. `pause`: the mean
    of the seconds between requests.
    """

    has_halves: bool
    num_instances: int
    num_requests: int
    pause: float
    max_tokens: int
    num_changes: int


@dataclass(frozen=True, slots=True)
class _Speed:
    """Seconds for each token of a prompt, until KV is offered, and for a load and each of its tokens."""

    token: float
    share: float
    load: float
    loaded_token: float


class RoutingWorld:
    """Requests one after the other, each of which ends before the next begins. Beside it, an instance may have others,
    whose prompts it has computed.
    """

    def __init__(self, setup: RoutingSetup, seed: str) -> None:
        self._setup = setup
        self._rng = random.Random(seed)
        self._trace = Trace()
        self._counters = Counter[str]()
        self._pool = Pool(30)
        first, others = (Role.PREFILL, Role.DECODE) if setup.has_halves else (Role.SERVE, Role.SERVE)
        self._urls = [f"instance{number}" for number in range(setup.num_instances)]
        for url in self._urls:
            self._pool.add(Instance(url, others if url != self._urls[0] else first))
            self._pool.learn(url, (), shares_kv=True)
            self._pool.observe(url, Signal.READY, 0)
        self._answering = self._urls[1:] if setup.has_halves else self._urls
        self._router = Dispatcher(self._pool, Limits(max_local_prefill=setup.max_tokens))
        self._speeds = {url: self._draw_speed() for url in self._urls}
        # By instance and what is measured of it: how often since it changed or was forgotten, and when last.
        self._uses = Counter[tuple[str, str]]()
        self._used_at: dict[tuple[str, str], float] = {}
        self._tried_at: dict[tuple[str, str], float] = {}

    def run(self) -> RunResult:
        """Raises nothing: failures are in the result."""
        rng, setup = self._rng, self._setup
        changes = {rng.randrange(setup.num_requests) for _ in range(setup.num_changes)}
        now = 100.0
        for number in range(setup.num_requests):
            self._trace.tick = number
            if number in changes:
                self._change(rng.choice(self._urls))
            try:
                now = self._ask(f"r{number}", now + rng.expovariate(1 / setup.pause))
            except Exception as error:  # noqa: BLE001 - the result says what it was
                return self._result(number, *describe(error))
        return self._result(setup.num_requests)

    def _result(self, number: int, violation: str = "", subjects: tuple[str, ...] = ()) -> RunResult:
        trace = self._trace.about(subjects) if violation else []
        return RunResult(self._trace.digest(), number, violation, trace, dict[str, float](self._counters))

    def _change(self, url: str) -> None:
        self._speeds[url] = self._draw_speed()
        self._counters["changes"] += 1
        for key in [key for key in self._uses if key[0] == url]:
            self._uses[key] = -_STILL_OLD
        self._trace.note(url, f"now has {self._speeds[url]}", url)

    def _draw_speed(self) -> _Speed:
        rng = self._rng
        return _Speed(
            token=rng.choice([0.0002, 0.001, 0.01]),
            share=rng.choice([0.005, 0.005, 5.0]),
            load=rng.choice([0.01, 0.5]),
            loaded_token=rng.choice([0.00001, 0.002]),
        )

    def _ask(self, name: str, now: float) -> float:
        """Runs a request; returns when it has ended. Raises ViolationError for a bad decision."""
        rng, router = self._rng, self._router
        num_tokens = rng.randrange(1, self._setup.max_tokens)
        cached = {url: rng.randrange(num_tokens) for url in self._urls if rng.random() < 0.5}
        token_ids = range(num_tokens)
        request = Routed(lambda: True, num_prompt_tokens=num_tokens, cached=cached, token_ids=token_ids, is_timed=True)
        running = self._occupy(rng.choice(self._answering), rng.choice([0, 0, _MANY]), now)
        plan = router.submit(request, now)
        if not isinstance(plan, Plan):
            raise ViolationError(f"{name} is not placed: {plan}", name)
        self._counters[plan.computing] += 1
        seconds, until_ready = self._seconds(request, plan)
        self._trace.note(plan.target.url, f"{plan.computing} {num_tokens} {cached}: {seconds:.3f} s", name)
        self._judge(name, request, plan, now)
        for key, rate in self._rates(plan):
            self._uses[key] = self._uses[key] + 1 if rate.is_known(now + seconds) else 1
            self._used_at[key] = now + seconds
        if plan.prefill is not None:
            router.prefill_ends(request, now + until_ready, is_done=True)
        router.answer_goes_on(request, now + seconds)
        for each in (request, *running):
            router.end(each)
        self._counters["finished"] += 1
        router.check_integrity()
        return now + seconds

    def _occupy(self, url: str, count: int, now: float) -> list[Routed]:
        """Gives an instance requests that have nothing to compute."""
        num_tokens = _MANY_TOKENS  # so that no other instance gets one
        made = [Routed(lambda: False, num_prompt_tokens=num_tokens, cached={url: num_tokens}) for _ in range(count)]
        for each in made:
            self._router.submit(each, now)
        return made

    def _judge(self, name: str, request: Routed, plan: Plan, now: float) -> None:
        seconds, _ = self._seconds(request, plan)
        for other in self._others(request, plan):
            least, _ = self._seconds(request, other)
            if seconds <= _TOLERATED * least + _NEGLIGIBLE:
                self._counters["good"] += 1
                continue
            rates = [*self._rates(plan), *self._rates(other)]
            if all(self._is_settled(key, rate, now) for key, rate in rates):
                reason = "and knows both"
            elif self._is_repeated(plan, now) and all(self._is_settled(*each, now) for each in self._rates(other)):
                reason = "and has just tried that"
            else:
                self._counters["learning"] += 1
                continue
            raise ViolationError(
                f"{name}: the router chose {plan.computing} ({seconds:.3f} s) and not {other.computing} "
                f"({least:.3f} s), {reason}",
                name,
            )

    def _is_settled(self, key: tuple[str, str], rate: Rate, now: float) -> bool:
        if not rate.is_known(now):
            return False
        return self._uses[key] >= _OFTEN or now - self._used_at[key] > _FORGOTTEN_AFTER

    def _is_repeated(self, plan: Plan, now: float) -> bool:
        """Returns whether a beginning was loaded in this way, which is measured each time, not long ago."""
        if plan.prefill is None or not plan.num_shared:
            return False
        key = (plan.target.url, plan.prefill.url)
        before, self._tried_at[key] = self._tried_at.get(key, 0.0), now
        is_measured = self._uses[plan.prefill.url, "shares"] > 0 and self._uses[plan.target.url, "loads"] > 0
        return is_measured and now - before < _TRIED_AGAIN_AFTER

    def _seconds(self, request: Routed, plan: Plan) -> tuple[float, float]:
        """Returns the seconds until the first token, and until the other instance has done its part."""
        speed, missing = self._speeds[plan.target.url], request.num_missing(plan.target.url)
        if plan.prefill is None:
            return speed.token * missing, 0.0
        there, missing_there = self._speeds[plan.prefill.url], request.num_missing(plan.prefill.url)
        if plan.num_shared:
            num_loaded, rest = missing - missing_there, speed.token * missing_there
            until_ready = there.share
        else:
            num_loaded, rest = missing, 0.0
            until_ready = there.token * missing_there
        return until_ready + speed.load + speed.loaded_token * num_loaded + rest, until_ready

    def _others(self, request: Routed, plan: Plan) -> Iterator[Plan]:
        """Returns the ways that were not taken."""
        if plan.prefill is not None:
            alone = Computing.DECODE if self._setup.has_halves else Computing.WHOLE
            yield msgspec.structs.replace(plan, computing=alone, prefill=None, num_shared=0)
            return
        missing = request.num_missing(plan.target.url)
        for member in self._pool:
            num_shared = missing - request.num_missing(member.url)
            if member.instance.role is Role.PREFILL:
                yield msgspec.structs.replace(plan, computing=Computing.PREFILL, prefill=member.instance)
            elif member.instance.role is Role.SERVE and num_shared >= _LEAST_SHARED:
                num_shared = request.num_prompt_tokens - request.num_missing(member.url)
                yield msgspec.structs.replace(
                    plan, computing=Computing.SIBLING, prefill=member.instance, num_shared=num_shared
                )

    def _rates(self, plan: Plan) -> Iterator[tuple[tuple[str, str], Rate]]:
        """Returns what the router measures, and must know, of a way."""
        target = self._member(plan.target)
        if plan.prefill is None:
            yield (target.url, "prompts"), target.prompts
            return
        yield (target.url, "loads"), target.loads
        other = self._member(plan.prefill)
        if plan.num_shared:
            yield (other.url, "shares"), other.shares
        else:
            yield (other.url, "prompts"), other.prompts

    def _member(self, instance: Instance) -> Member:
        member = self._pool.get(instance.url)
        assert member is not None, instance
        return member

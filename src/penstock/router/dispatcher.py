"""Decides where each request goes, when it waits, and what happens when an instance fails, without I/O.

A request that can be placed gets a `Plan`; one that has to wait gets `None` and later its plan, from `poll`; one that
cannot be served gets a `Refusal`. A request that fails before the first byte of its answer is planned again, without
the instance that failed, and within the limits; so is the rest of an answer that can be continued. `end` must follow
every `submit`, however the request ends.

Belongs to one thread. Time is an argument.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import msgspec

from penstock.router.costs import CostModel
from penstock.router.instances import Instance, Role
from penstock.router.pool import Lease, Member, Pool
from penstock.router.waiting import FairQueue
from penstock.utils.errors import ConfigError
from penstock.utils.placement import least_loaded

_MAX_LOST = 1


class Policy(enum.StrEnum):
    """How an instance is chosen for a request."""

    PREFIX_AWARE = "prefix-aware"
    """Chooses the least work, not counting cached tokens. Equals least-loaded if there are no KV events."""
    LEAST_LOADED = "least-loaded"
    ROUND_ROBIN = "round-robin"


@dataclass(frozen=True, slots=True)
class Limits:
    """`max_outstanding`: maximum concurrent requests of one instance. `max_self_prefills`: maximum concurrent prompts
    that decode instances compute. `max_local_prefill`: the most tokens of a prompt that one computes although there is
    a prefill instance, because its first token is then expected sooner. `queue_timeout` is in seconds.
    `max_migrations`: how often a stream may be continued by another instance.
    """

    max_outstanding: int = 256
    max_queued: int = 1024
    queue_timeout: float = 30.0
    max_retries: int = 2
    max_self_prefills: int = 4
    max_local_prefill: int = 512
    max_migrations: int = 3

    def check(self) -> None:
        """Raises ConfigError."""
        for name, value in asdict(self).items():
            low = int(name == "max_outstanding")
            if not value >= low:
                raise ConfigError(f"{name} must be at least {low}, got {value}")


class Phase(enum.StrEnum):
    """Transitions: NEW -> WAITING or PLANNED; PLANNED -> WAITING again after a failure, or ANSWERING; ANSWERING ->
    WAITING or PLANNED if the answer is continued elsewhere; any -> ENDED.
    """

    NEW = enum.auto()
    WAITING = enum.auto()
    PLANNED = enum.auto()
    ANSWERING = enum.auto()
    ENDED = enum.auto()


_NEXT = {
    Phase.NEW: {Phase.WAITING, Phase.PLANNED, Phase.ENDED},
    Phase.WAITING: {Phase.PLANNED, Phase.ENDED},
    Phase.PLANNED: {Phase.WAITING, Phase.PLANNED, Phase.ANSWERING, Phase.ENDED},
    Phase.ANSWERING: {Phase.WAITING, Phase.PLANNED, Phase.ENDED},
    Phase.ENDED: set[Phase](),
}


class Computing(enum.StrEnum):
    """Which instance computes a prompt."""

    WHOLE = "whole"
    """The one that answers."""
    PREFILL = "prefill"
    """A prefill instance, for the decode instance that answers."""
    DECODE = "decode"
    """The decode instance that answers, because that is expected to be sooner."""
    FALLBACK = "fallback"
    """The decode instance that answers, because no prefill instance is available."""
    SIBLING = "sibling"
    """The one that answers, after it has loaded the beginning from another one."""


@dataclass(slots=True, eq=False)
class Routed:
    """A request with the data for its routing. `is_divisible`: whether another instance can compute its prompt;
    evaluated only if not all instances compute whole requests, or another one has more of the prompt. `model`: the
    model's name, empty if any will do. `client`: whose request it is (`router.waiting`). `is_timed`: the first part of
    its answer comes with the first token.
    `token_ids`: the prompt, if it is known, and `cached` the number of its tokens that instances have, by URL.
    `num_loading`: how many tokens the target loads from another instance, which it could do from `loads_since` on.
    `num_lost`: how many times an instance may have died of it.
    `excluded`: the instances to which it could not go when it began to wait.
    """

    is_divisible: Callable[[], bool]
    model: str = ""
    client: str = ""
    num_prompt_tokens: int = 0
    cached: Mapping[str, int] = field(default_factory=dict[str, int])
    token_ids: Sequence[int] = ()
    is_timed: bool = False
    phase: Phase = Phase.NEW
    waits_since: float = 0.0
    failed: set[str] = field(default_factory=set[str])
    excluded: frozenset[str] = frozenset()
    num_failures: int = 0
    num_prefill_failures: int = 0
    num_lost: int = 0
    num_migrations: int = 0
    target: Lease | None = None
    prefill: Lease | None = None
    computes_itself: bool = False
    num_loading: int = 0
    loads_since: float | None = None

    @property
    def lane(self) -> tuple[str, frozenset[str]]:
        return self.client, self.excluded

    def num_missing(self, url: str) -> int:
        """Returns how many tokens of the prompt the instance does not have."""
        return max(0, self.num_prompt_tokens - self.cached.get(url, 0))


class Plan(msgspec.Struct, frozen=True):
    """`target` answers. `prefill` computes the prompt for it, or the `num_shared` tokens at its beginning that it has;
    None if the target does so itself. `num_cached`: how many tokens of the prompt the instance that computes it is
    expected to have.
    """

    target: Instance
    computing: Computing
    prefill: Instance | None = None
    num_cached: int = 0
    num_shared: int = 0


@dataclass(frozen=True, slots=True)
class Refusal:
    """A 503 response."""

    message: str


Decision = Plan | Refusal | None


class Dispatcher:
    def __init__(self, pool: Pool, limits: Limits, policy: Policy = Policy.PREFIX_AWARE) -> None:
        limits.check()
        self.pool = pool
        self.costs = CostModel(pool)
        self._limits = limits
        self._policy = policy
        self._queue = FairQueue[Routed]()
        self._displaced: list[Routed] = []  # to be refused
        self._live: set[Routed] = set()
        self._num_self_prefills = 0
        self._next_timeout = math.inf

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    @property
    def num_live(self) -> int:
        """The number of requests that have not ended."""
        return len(self._live)

    # ---- Lifecycle of a request ----

    def submit(self, request: Routed, now: float) -> Decision:
        self._live.add(request)
        # Where one with the same model waits, there is no room, unless it has failed where this one may go.
        is_overtaking = any(each.model == request.model and not each.failed for each in self._queue.heads())
        decision = None if is_overtaking else self._place(request, now)
        return self._wait(request, now) if decision is None else decision

    def failed(self, request: Routed, url: str, message: str, now: float, *, num_lost: int = 0) -> Decision:
        """Called when the instance `url` of the request's plan has failed, before the first byte of the answer.

        `num_lost`: how many times it may have died of this request. A request that was lost twice is not tried again,
        or it could end every instance.
        """
        assert request.phase is Phase.PLANNED, request.phase
        is_prefill = request.prefill is not None and request.prefill.member.url == url
        if is_prefill:
            self._measure_share(request, now)
        self._release(request)
        request.failed.add(url)
        request.num_lost += num_lost
        if request.num_lost > _MAX_LOST:
            return Refusal(f"{request.num_lost} times an instance has failed that had this request; {url}: {message}")
        if is_prefill:
            request.num_prefill_failures += 1
        else:
            request.num_failures += 1
            if request.num_failures > self._limits.max_retries:
                return Refusal(f"{request.num_failures} instances have failed on this request; {url}: {message}")
        decision = self._place(request, now, failure=f"{url}: {message}")
        # The request has waited before, so it precedes those that came later.
        return self._wait(request, now, is_first=True) if decision is None else decision

    def interrupted(self, request: Routed, excluded: Collection[str], message: str, now: float) -> Decision:
        """Called when an answer has ended too early and can be continued by an instance that is not `excluded`.

        It has made progress, so the request counts as a new one, except for `max_migrations`.
        """
        assert request.phase is Phase.ANSWERING, request.phase
        self._release(request)
        if request.num_migrations >= self._limits.max_migrations:
            return Refusal(f"the stream has been continued {request.num_migrations} times already; {message}")
        request.num_migrations += 1
        request.failed = set(excluded)
        request.num_failures = request.num_prefill_failures = request.num_lost = 0
        decision = self._place(request, now, failure=message)
        return self._wait(request, now, is_first=True) if decision is None else decision

    def may_continue_at(self, request: Routed, urls: Collection[str], num_before: int) -> bool:
        """Returns whether one of these instances could continue an answer now, after `num_before` others, so that it
        may be interrupted.
        """
        if self._queue or request.num_migrations >= self._limits.max_migrations:
            return False
        able = self._with_room(self.pool.of(Role.SERVE))
        if self.pool.of(Role.PREFILL) or self._limits.max_self_prefills:
            able += self._with_room(self.pool.of(Role.DECODE))
        return sum(self._room(each) for each in able if each.url in urls) > num_before

    def prefill_ends(self, request: Routed, now: float, *, is_done: bool) -> None:
        """Called when the plan's prefill instance is finished with the request; `is_done`: the prompt is computed."""
        if request.prefill is not None:
            if is_done and request.prefill.is_open:
                self.pool.progressed(request.prefill.member.url, now)
                self.pool.measure_prompt(request.prefill, now)
                request.loads_since = now
            self._measure_share(request, now)
            self.pool.release(request.prefill)

    def answer_goes_on(self, request: Routed, now: float) -> None:
        """Called for each part of the answer. After the first there are no retries."""
        assert request.target is not None, request.phase
        self.pool.progressed(request.target.member.url, now)
        if request.phase is Phase.ANSWERING:
            return
        self._move(request, Phase.ANSWERING)
        if request.is_timed and not request.num_migrations:
            self._measure(request, request.target, now)
        self.pool.prompt_is_computed(request.target)
        self._end_self_prefill(request)

    def _measure_share(self, request: Routed, now: float) -> None:
        """Called when an instance has offered KV that it has, or has failed to, which costs as much time."""
        lease = request.prefill
        if lease is not None and lease.member.instance.role is Role.SERVE and lease.is_open:
            lease.member.shares.add(request.num_loading, now - lease.since, now)

    def _measure(self, request: Routed, target: Lease, now: float) -> None:
        if request.prefill is None:
            self.pool.measure_prompt(target, now)
        elif request.num_loading and request.loads_since is not None:
            self.pool.measure_load(target, request.num_loading, request.loads_since, now)

    def end(self, request: Routed) -> None:
        """Ends the request. Idempotent."""
        if request.phase is not Phase.ENDED:
            self._release(request)
            self._queue.remove(request)
            self._live.discard(request)
            self._move(request, Phase.ENDED)

    def poll(self, now: float) -> list[tuple[Routed, Plan | Refusal]]:
        """Returns decisions on waiting requests. Call it after any event that may free capacity, and at `next_poll`."""
        full = Refusal("the queue is full, and this client has the most waiting requests: send fewer at a time")
        decided: list[tuple[Routed, Plan | Refusal]] = [(each, full) for each in self._displaced if each in self._live]
        self._displaced.clear()
        while (placed := self._place_next(now)) is not None:
            self._queue.take(placed[0])
            decided.append(placed)
        if now >= self._next_timeout:
            late = Refusal(f"no instance was free within {self._limits.queue_timeout:g} seconds")
            for request in [each for each in self._queue if now >= self._timeout_at(each)]:
                self._queue.remove(request)
                decided.append((request, late))
            self._next_timeout = min(map(self._timeout_at, self._queue), default=math.inf)
        return decided

    def _place_next(self, now: float) -> tuple[Routed, Plan | Refusal] | None:
        """Places the first request, in the order of the clients' turns, for which there is room."""
        without_room: set[str] = set()
        for request in self._queue.heads():
            if request.model in without_room and not request.failed:
                continue
            decision = self._place(request, now)
            if decision is not None:
                return request, decision
            if not request.failed:
                without_room.add(request.model)
        return None

    @property
    def next_poll(self) -> float:
        """The earliest time at which a waiting request may time out, or was displaced."""
        return -math.inf if self._displaced else self._next_timeout

    def _timeout_at(self, request: Routed) -> float:
        return request.waits_since + self._limits.queue_timeout

    # ---- Decisions ----

    def _wait(self, request: Routed, now: float, *, is_first: bool = False) -> Refusal | None:
        request.excluded = self.pool.without(request.model) | request.failed
        if len(self._queue) >= self._limits.max_queued:
            displaced = self._queue.pop_for(request.lane) if self._queue else None
            if displaced is None:
                return Refusal(f"{len(self._queue)} requests are waiting already")
            self._displaced.append(displaced)
        self._move(request, Phase.WAITING)
        request.waits_since = now
        self._queue.add(request, is_first=is_first)
        self._next_timeout = min(self._next_timeout, self._timeout_at(request))
        return None

    def _place(self, request: Routed, now: float, failure: str = "") -> Decision:
        pool = self.pool
        excluded = request.failed | pool.without(request.model)
        whole = self._with_room(pool.of(Role.SERVE, excluded))
        halves = self._with_room(pool.of(Role.DECODE, excluded))
        if not whole and not halves:
            if pool.may_serve_later(Role.SERVE, excluded) or pool.may_serve_later(Role.DECODE, excluded):
                return None
            return Refusal(f"no instance is left that could answer{'; ' + failure if failure else ''}")
        prefills = pool.of(Role.PREFILL, excluded)
        if not (prefills or halves):
            return self._use_whole(request, now, self._best(request, whole), excluded)
        if not request.is_divisible():
            return self._use(request, now, self._best(request, [*whole, *halves]))
        if request.num_prefill_failures > self._limits.max_retries:
            prefills = []
        if prefills:
            return self._place_halves(request, now, whole, halves, self._with_room(prefills))
        if whole:
            return self._use_whole(request, now, self._best(request, whole), excluded)
        if self._num_self_prefills < self._limits.max_self_prefills:
            return self._use(request, now, self._best(request, halves), Computing.FALLBACK)
        if not self._limits.max_self_prefills:
            return Refusal("no prefill instance is left, and decode instances may not compute prompts themselves")
        return None

    def _place_halves(
        self, request: Routed, now: float, whole: list[Member], halves: list[Member], prefills: list[Member]
    ) -> Plan | None:
        """Decides whether a prefill instance computes the prompt. All these have room; there may be none of a kind."""
        candidates = [*whole, *halves] if prefills or self._may_compute(request, halves) else whole
        if not candidates:
            return None
        target = self._best(request, candidates)
        if target.instance.role is Role.SERVE:
            return self._use(request, now, target)
        prefill = self._best(request, prefills) if prefills else None
        if self._may_compute(request, [target]) and (
            prefill is None or self.costs.is_sooner_alone(request, target, prefill, now)
        ):
            return self._use(request, now, target, Computing.DECODE)
        return None if prefill is None else self._use(request, now, target, Computing.PREFILL, prefill)

    def _may_compute(self, request: Routed, members: Sequence[Member]) -> bool:
        """Returns whether one of these decode instances may compute the prompt although there is a prefill instance."""
        least = min((request.num_missing(each.url) for each in members), default=math.inf)
        return least <= self._limits.max_local_prefill and self._num_self_prefills < self._limits.max_self_prefills

    def _use_whole(self, request: Routed, now: float, target: Member, excluded: Collection[str]) -> Plan:
        """Uses an instance that computes whole requests, and another one that has more of the prompt, if that helps."""
        source = None
        if request.token_ids and self._policy is Policy.PREFIX_AWARE:
            able = [each for each in self._with_room(self.pool.of(Role.SERVE, excluded)) if each is not target]
            source = self.costs.sibling(request, target, able, now)
        if source is None or not request.is_divisible():
            return self._use(request, now, target)
        return self._use(request, now, target, Computing.SIBLING, source)

    def _with_room(self, members: Sequence[Member]) -> list[Member]:
        return [each for each in members if self._room(each) > 0]

    def _room(self, member: Member) -> int:
        return (1 if member.is_suspect else self._limits.max_outstanding) - member.num_outstanding

    def _best(self, request: Routed, members: Sequence[Member]) -> Member:
        if self._policy is Policy.ROUND_ROBIN:
            return min(members, key=lambda member: member.last_chosen)
        return least_loaded(members, lambda member: request.cached.get(member.url, 0))

    def _use(
        self,
        request: Routed,
        now: float,
        target: Member,
        computing: Computing = Computing.WHOLE,
        prefill: Member | None = None,
    ) -> Plan:
        self._move(request, Phase.PLANNED)
        is_shared, missing = computing is Computing.SIBLING, request.num_missing(target.url)
        by_prefill = 0 if prefill is None else request.num_missing(prefill.url)
        num_shared = request.num_prompt_tokens - by_prefill if is_shared else 0
        if computing in (Computing.DECODE, Computing.FALLBACK):
            self._num_self_prefills += 1
            request.computes_itself = True
        by_target = missing if prefill is None else by_prefill if is_shared else 0
        request.target = self.pool.lease(target, by_target, now)
        request.prefill = None if prefill is None else self.pool.lease(prefill, 0 if is_shared else by_prefill, now)
        request.num_loading = missing - by_target
        num_cached = request.num_prompt_tokens - (by_prefill if prefill and not is_shared else missing)
        return Plan(target.instance, computing, prefill and prefill.instance, num_cached, num_shared)

    # ---- Leases of a request ----

    def _release(self, request: Routed) -> None:
        for lease in (request.target, request.prefill):
            if lease is not None:
                self.pool.release(lease)
        request.target = request.prefill = request.loads_since = None
        request.num_loading = 0
        self._end_self_prefill(request)

    def _end_self_prefill(self, request: Routed) -> None:
        self._num_self_prefills -= request.computes_itself
        request.computes_itself = False

    def _move(self, request: Routed, phase: Phase) -> None:
        assert phase in _NEXT[request.phase], (request.phase, phase)
        request.phase = phase

    def check_integrity(self) -> None:
        self.pool.check_integrity()
        leases = [lease for each in self._live for lease in (each.target, each.prefill) if lease and lease.is_open]
        assert sum(member.num_outstanding for member in self.pool) <= len(leases)
        assert self._num_self_prefills == sum(each.computes_itself for each in self._live)
        assert self._num_self_prefills <= self._limits.max_self_prefills
        assert all(each.phase is Phase.WAITING and each in self._live for each in self._queue)
        assert all(each.target is None or each.phase in (Phase.PLANNED, Phase.ANSWERING) for each in self._live)

"""The pool of instances: their states, and their current work.

Pure: time is an argument, and the results of health checks arrive as a `Signal`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.router.instances import TRANSITIONS, UNHEALTHY_SIGNALS, Instance, Role, Signal, State
from penstock.router.rates import Rate
from penstock.utils.logging import get_logger
from penstock.utils.placement import load

logger = get_logger(__name__)

_NONE: frozenset[str] = frozenset()


@dataclass(slots=True, eq=False)
class Member:
    """An instance in the pool. `reason` is the text of its last signal. `is_held`: the operator drains it;
    `is_leaving`: and it is removed when it has no requests left. `unhealthy_since`: the time of the first of the
    `UNHEALTHY_SIGNALS` after the last other signal. `progressed_at`: when it last got its first request or sent a part
    of an answer; `is_suspect`: it has stalled since, and gets one request at a time. `last_chosen` orders instances
    with the same load. `models` are the names of the models that it reports, none if it reports none; `shares_kv`:
    other instances can load KV from it, and it from them. `prompts` measures the prompts that it computes, one after
    the other, the last of which ended at `computed_at`; `loads` the KV that it loads from another instance, and
    `shares` how long others wait until it offers them KV, or has failed to. `fingerprint`: what the tokens of its
    streams depend on, None if it is unknown.
    """

    instance: Instance
    state: State = State.STARTING
    reason: str = ""
    is_held: bool = False
    is_leaving: bool = False
    unhealthy_since: float | None = None
    progressed_at: float = 0.0
    is_suspect: bool = False
    num_outstanding: int = 0
    num_prompt_tokens: int = 0
    num_chosen: int = 0
    last_chosen: int = 0
    models: tuple[str, ...] = ()
    shares_kv: bool = False
    fingerprint: str | None = None
    computed_at: float = 0.0
    prompts: Rate = field(default_factory=Rate)
    loads: Rate = field(default_factory=Rate)
    shares: Rate = field(default_factory=Rate)

    @property
    def url(self) -> str:
        return self.instance.url

    @property
    def load(self) -> int:
        """The load in prompt tokens."""
        return load(self.num_prompt_tokens, self.num_outstanding)


@dataclass(slots=True, eq=False)
class Lease:
    """One request's share of an instance, with the prompt tokens that the instance still has to compute for it."""

    member: Member
    num_prompt_tokens: int
    since: float
    is_open: bool = field(default=True)
    is_sent: bool = False
    """Whether nothing is expected of the instance: the client has yet to read what it has sent, or it has sent all."""


class Pool:
    """`dead_after`: seconds after which an unhealthy instance counts as dead."""

    def __init__(self, dead_after: float) -> None:
        self._dead_after = dead_after
        self._members: dict[str, Member] = {}
        self._leases: set[Lease] = set()
        self._num_chosen = 0
        # By role; None after a change.
        self._ready: Mapping[Role, Sequence[Member]] | None = None
        # By model, the instances that report only others; empty if all report the same. None after a change.
        self._others: Mapping[str, frozenset[str]] | None = None

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    def __contains__(self, url: str) -> bool:
        return url in self._members

    def get(self, url: str) -> Member | None:
        return self._members.get(url)

    # ---- Membership ----

    def add(self, instance: Instance) -> Member:
        """Adds an instance, or reactivates one that is being drained or removed, with its former role."""
        self._others = None
        member = self._members.setdefault(instance.url, Member(instance))
        member.is_held = member.is_leaving = False
        return member

    def drain(self, url: str, *, remove: bool = False) -> None:
        """Sends no new requests to the instance; with `remove` it is removed when it has none left."""
        member = self._members[url]
        member.is_held = True
        member.is_leaving = member.is_leaving or remove
        if member.state is State.READY:
            self._move(member, Signal.DRAINING)
        self._remove_if_idle(member)

    def resume(self, url: str) -> None:
        """Ends `drain`: the instance gets requests again after its next ready signal."""
        self.add(self._members[url].instance)

    def _remove_if_idle(self, member: Member) -> None:
        if member.is_leaving and not member.num_outstanding:
            self._members.pop(member.url, None)
            self._ready = self._others = None

    # ---- Models ----

    def learn(self, url: str, models: tuple[str, ...], *, shares_kv: bool = False) -> None:
        """Records what the instance reports of itself."""
        member = self._members.get(url)
        if member is None:
            return
        member.shares_kv = shares_kv
        if member.models != models:
            member.models = models
            self._others = None

    def without(self, model: str) -> frozenset[str]:
        """Returns the instances that report only other models; none if no instance reports this one."""
        if self._others is None:
            self._others = self._find_others()
        return self._others.get(model, _NONE)

    @property
    def has_groups(self) -> bool:
        """Whether instances report different models."""
        self.without("")
        return bool(self._others)

    def groups(self) -> list[Member]:
        """Returns a ready instance for each group of those that report the same models; none if all do."""
        found = {each.models: each for role in Role for each in self.of(role) if each.models}
        return list(found.values()) if self.has_groups else []

    def _find_others(self) -> Mapping[str, frozenset[str]]:
        reporting = [each for each in self._members.values() if each.models]
        if len({each.models for each in reporting}) < 2:
            return {}
        names = {name for each in reporting for name in each.models}
        return {name: frozenset(each.url for each in reporting if name not in each.models) for name in names}

    # ---- States ----

    def observe(self, url: str, signal: Signal, now: float, reason: str = "") -> bool:
        """Records an instance's signal. Returns True if the instance has died with it."""
        member = self._members.get(url)
        if member is None:
            return False
        member.is_suspect = member.is_suspect or signal is Signal.STALLED
        if signal in UNHEALTHY_SIGNALS:
            member.unhealthy_since = now if member.unhealthy_since is None else member.unhealthy_since
            if now - member.unhealthy_since >= self._dead_after:
                signal = Signal.LOST
        else:
            member.unhealthy_since = None
        if signal is Signal.READY and member.is_held:
            signal = Signal.DRAINING
        if signal in (Signal.STARTING, Signal.SILENT, Signal.LOST):
            # When it answers again it may be another process, with other weights.
            member.fingerprint = None
        member.reason = reason
        return self._move(member, signal)

    def _move(self, member: Member, signal: Signal) -> bool:
        before, member.state = member.state, TRANSITIONS[member.state][signal]
        if member.state is not before:
            self._ready = None
            logger.warning(
                "%s: %s -> %s%s", member.url, before, member.state, f" ({member.reason})" * bool(member.reason)
            )
        return member.state is State.DEAD and before is not State.DEAD

    def of(self, role: Role, excluded: Collection[str] = ()) -> Sequence[Member]:
        """Returns the members that may get requests."""
        if self._ready is None:
            self._ready = self._find_ready()
        ready = self._ready[role]
        return [each for each in ready if each.url not in excluded] if excluded else ready

    def _find_ready(self) -> Mapping[Role, Sequence[Member]]:
        ready = [each for each in self._members.values() if each.state is State.READY]
        return {role: tuple(each for each in ready if each.instance.role is role) for role in Role}

    def may_serve_later(self, role: Role, excluded: Collection[str] = ()) -> bool:
        """Returns whether an instance accepts requests, or may do so again without the operator's intervention."""
        return any(
            each.instance.role is role
            and not each.is_held
            and each.state in (State.STARTING, State.READY, State.UNHEALTHY)
            and each.url not in excluded
            for each in self._members.values()
        )

    def stalled_for(self, url: str, now: float) -> float:
        """Returns for how many seconds the instance has had requests and has sent no part of an answer. Requests whose
        clients have yet to read what it has sent do not count.
        """
        member = self._members.get(url)
        owes = any(lease.member is member and not lease.is_sent for lease in self._leases)
        return now - member.progressed_at if member is not None and owes else 0.0

    # ---- Load ----

    def lease(self, member: Member, num_prompt_tokens: int, now: float) -> Lease:
        lease = Lease(member, num_prompt_tokens, now)
        if not member.num_outstanding:
            member.progressed_at = now
        self._leases.add(lease)
        member.num_outstanding += 1
        member.num_prompt_tokens += num_prompt_tokens
        self._num_chosen += 1
        member.last_chosen = self._num_chosen
        member.num_chosen += 1
        return lease

    def progressed(self, url: str, now: float) -> None:
        """Records that the instance has computed something."""
        member = self._members.get(url)
        if member is not None:
            member.progressed_at = now
            member.is_suspect = False

    def measure_prompt(self, lease: Lease, now: float) -> None:
        """Called when the instance has just computed the lease's prompt tokens, after those of the prompts before."""
        member = lease.member
        if lease.num_prompt_tokens:
            member.prompts.add(lease.num_prompt_tokens, now - max(lease.since, member.computed_at), now)
            member.computed_at = now

    def measure_load(self, lease: Lease, num_tokens: int, since: float, now: float) -> None:
        """Called at the first token of a request for which the instance has loaded KV, and computed what the lease has
        left of the prompt.
        """
        rate = self.rate_of_prompts(lease.member, now) if lease.num_prompt_tokens else None
        computing = 0.0 if rate is None else rate.seconds(lease.num_prompt_tokens)
        lease.member.loads.add(num_tokens, max(0.0, now - since - computing), now)

    def rate_of_prompts(self, member: Member, now: float) -> Rate | None:
        """Returns how fast the instance computes prompts; if that is unknown, how fast the one measured last does that
        has the same models. None before the first measurement.
        """
        if member.prompts.is_known(now):
            return member.prompts
        others = [each for each in self._members.values() if each.models == member.models]
        known = [each for each in others if each.prompts.is_known(now)]
        return max(known, key=lambda each: each.computed_at).prompts if known else None

    def prompt_is_computed(self, lease: Lease) -> None:
        lease.member.num_prompt_tokens -= lease.num_prompt_tokens
        lease.num_prompt_tokens = 0

    def release(self, lease: Lease) -> None:
        """Ends the lease. Idempotent."""
        if not lease.is_open:
            return
        lease.is_open = False
        self.prompt_is_computed(lease)
        self._leases.discard(lease)
        lease.member.num_outstanding -= 1
        self._remove_if_idle(lease.member)

    def check_integrity(self) -> None:
        assert self._ready in (None, self._find_ready()), self._ready
        assert self._others in (None, self._find_others()), self._others
        for member in self._members.values():
            held = [lease for lease in self._leases if lease.member is member]
            assert member.num_outstanding == len(held), (member.url, member.num_outstanding, len(held))
            tokens = sum(lease.num_prompt_tokens for lease in held)
            assert member.num_prompt_tokens == tokens, (member.url, member.num_prompt_tokens, tokens)
            assert not (member.is_leaving and not held), f"{member.url} should have left"
            assert not (member.is_held and member.state is State.READY), f"{member.url} is held and ready"
        assert all(lease.is_open for lease in self._leases)

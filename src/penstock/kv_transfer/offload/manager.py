"""The index of the CPU tier and of the tiers below it.

The manager owns the chunks of a region but does not move their bytes: the engine's workers do so between engine blocks
and chunks, the tiers between chunks and their media. Every chunk is free, or belongs to one key and is in one state:

    WRITING     the engine is storing into it; not found yet
    PROMOTING   a tier is loading into it; not found yet
    READY       complete, and found
    DOOMED      no longer found, but still being read or written

and has one pin for each of its users: its writer, each load from it, each store into a tier below. A chunk is
reallocated only when it has no pin. A key has one chunk at most, a doomed one included: until its last user has ended
the key is a miss that cannot be stored, so that a late completion always finds its chunk.

Threading: one thread, the scheduler's. Only `shutdown` blocks.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from penstock.kv_transfer.offload import OffloadKey
from penstock.kv_transfer.offload.messages import StateChunks
from penstock.kv_transfer.offload.policies import CachePolicy
from penstock.kv_transfer.offload.tiers.base import (
    EventLog,
    JobResult,
    OffloadEvent,
    SecondaryTierManager,
    TierStats,
    TransferJob,
)
from penstock.messages.kv_events import MEDIUM_CPU


class LookupResult(enum.Enum):
    """PENDING: ask again, because the key is being stored or promoted from a tier."""

    HIT = "hit"
    PENDING = "pending"
    MISS = "miss"


class ChunkState(enum.Enum):
    WRITING = "writing"
    PROMOTING = "promoting"
    READY = "ready"
    DOOMED = "doomed"


# A chunk may also become free in any state if it has no pin.
TRANSITIONS: dict[ChunkState, frozenset[ChunkState]] = {
    ChunkState.WRITING: frozenset({ChunkState.READY, ChunkState.DOOMED}),
    ChunkState.PROMOTING: frozenset({ChunkState.READY, ChunkState.DOOMED}),
    ChunkState.READY: frozenset({ChunkState.DOOMED}),
    ChunkState.DOOMED: frozenset(),
}

# What a lookup finds of a chunk that is no longer written or promoted.
_LOOKUP = {ChunkState.READY: LookupResult.HIT, ChunkState.DOOMED: LookupResult.MISS}

# While a tier evicts, a growing prompt becomes the youngest again after an eighth as many evictions as it has keys.
_REFRESH_PART = 8
_LEAST_MOVING = 128


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """The chunk with a key's bytes, and their expected digest, None without attestation. `seconds` is how long a tier
    took to promote it, 0 if the engine stored it.
    """

    chunk_id: int
    digest: bytes | None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class OffloadStats:
    """Counts chunks. The gauges add up: free + stored + being written + pinned == chunks; all others are counters."""

    num_chunks: int
    num_free: int
    num_stored: int
    num_being_written: int
    num_pinned: int
    num_loads: int = 0
    num_stores: int = 0
    num_stores_failed: int = 0
    num_stores_without_room: int = 0
    num_evicted: int = 0
    num_promoted: int = 0
    num_promotions_failed: int = 0
    num_promotions_refused: int = 0
    num_cascaded: int = 0
    num_cascades_failed: int = 0
    num_cascades_dropped: int = 0
    num_bad: int = 0
    num_unknown_results: int = 0
    tiers: tuple[TierStats, ...] = ()


@dataclass(slots=True)
class _Chunk:
    chunk_id: int
    place: int
    moment: int
    state: ChunkState
    digest: bytes | None = None
    seconds: float = 0.0
    num_pins: int = 1


@dataclass(slots=True)
class Prompt:
    """One request's keys, head first, with their places. They last became the youngest at `moment`.

    Keys of it that are stored later have the same age, and are never younger. So a tail does not outlive its head, and
    the average work per completed block does not depend on the prompt's length. The moment is renewed when the tier's
    total of evictions reaches `refresh_at`.
    """

    places: dict[OffloadKey, int] = field(default_factory=dict[OffloadKey, int])
    moment: int = 0
    refresh_at: int = 0


class _Room:
    """The chunks of one kind: those that are free, and the policy that chooses which others become free."""

    def __init__(self, chunk_ids: range, policy: CachePolicy) -> None:
        self.chunk_ids = chunk_ids
        self.policy = policy
        self.free = list(reversed(chunk_ids))
        self.num_evicted = 0


class OffloadingManager:
    """`tiers` are ordered from the fastest to the slowest; a limit counts chunks in jobs that have not ended, and is by
    default a quarter of `num_chunks`, at least 128.

    The first `num_chunks` are for blocks of tokens, those behind them for `states`, if there are any. Each kind has its
    own policy, and evicts only chunks of its own. The keys of a prompt, and those of a call that needs room, are of one
    kind.
    """

    def __init__(
        self,
        num_chunks: int,
        policy: CachePolicy,
        tiers: Sequence[SecondaryTierManager] = (),
        max_cascading_chunks: int | None = None,
        max_promoting_chunks: int | None = None,
        states: StateChunks | None = None,
        state_policy: CachePolicy | None = None,
    ) -> None:
        assert num_chunks > 0, num_chunks
        self._rooms = [_Room(range(num_chunks), policy)]
        self._state_group = None if states is None else states.group
        if states is not None and state_policy is not None:
            self._rooms.append(_Room(range(num_chunks, num_chunks + states.num_chunks), state_policy))
        self._tiers = tuple(tiers)
        # A long prompt's chunks are complete at the same time, and the one that is dropped may be its only state.
        most = max(_LEAST_MOVING, num_chunks // 4)
        self._max_cascading = most if max_cascading_chunks is None else max_cascading_chunks
        self._max_promoting = most if max_promoting_chunks is None else max_promoting_chunks
        self._chunks: dict[OffloadKey, _Chunk] = {}
        self._writers: set[OffloadKey] = set()
        self._loads: Counter[OffloadKey] = Counter()
        self._jobs: dict[int, TransferJob] = {}
        self._next_job_id = 0
        # Chunks in jobs: True are promotions, False cascades.
        self._num_in_flight = Counter[bool]()
        self._events = EventLog(MEDIUM_CPU)
        self._counts: Counter[str] = Counter()

    def _room(self, key: OffloadKey) -> _Room:
        return self._rooms[key[0] == self._state_group]

    def lookup(self, key: OffloadKey) -> LookupResult:
        """Returns whether the CPU tier has the key; for the tiers below see `medium_of`. Changes nothing."""
        chunk = self._chunks.get(key)
        return LookupResult.MISS if chunk is None else _LOOKUP.get(chunk.state, LookupResult.PENDING)

    def medium_of(self, key: OffloadKey) -> str | None:
        """Returns the fastest medium that has the key now, or None. Changes nothing."""
        if self.lookup(key) is LookupResult.HIT:
            return MEDIUM_CPU
        return next((tier.medium for tier in self._tiers if tier.lookup(key)), None)

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Marks a prompt, head to tail, as used, so that the tiers keep it longer. Unknown keys are ignored."""
        for room in self._rooms:
            room.policy.touch([k for k in keys if self._room(k) is room and self.lookup(k) is LookupResult.HIT])
        for tier in self._tiers:
            tier.touch(keys)

    def promote(self, keys: Sequence[OffloadKey], first_place: int = 0, protected: Collection[OffloadKey] = ()) -> int:
        """Starts to promote keys, each from the first tier that has it.

        `keys` are consecutive blocks of one prompt, at least one, the first at `first_place`. Returns how many of
        them, from the head, are now here or being promoted; it stops where no tier has the key, where no chunk can be
        freed, or at the limit of concurrent promotions. Neither they nor the `protected` keys are evicted for it.
        """
        room = self._room(keys[0])
        wanted: dict[OffloadKey, tuple[int, SecondaryTierManager]] = {}
        for place, key in enumerate(keys, first_place):
            if self.lookup(key) is not LookupResult.MISS:
                continue
            tier = next((tier for tier in self._tiers if tier.lookup(key)), None)
            if tier is None or key in self._chunks or self._num_in_flight[True] + len(wanted) >= self._max_promoting:
                break
            wanted[key] = (place, tier)
        moment = room.policy.refresh([key for key in keys if self.lookup(key) is LookupResult.HIT])
        coming: dict[SecondaryTierManager, list[OffloadKey]] = {}
        chunk_ids = self._allocate(room, len(wanted), {*keys, *protected})
        for (key, (place, tier)), chunk_id in zip(wanted.items(), chunk_ids, strict=False):
            self._chunks[key] = _Chunk(chunk_id, place, moment, ChunkState.PROMOTING)
            coming.setdefault(tier, []).append(key)
        for tier, its_keys in coming.items():
            if not self._submit(tier, tuple(its_keys), is_promotion=True):
                self._counts["num_promotions_refused"] += len(its_keys)
                for key in its_keys:
                    self._unpin(key, self._doom(key))
        missing = (index for index, key in enumerate(keys) if self.lookup(key) is LookupResult.MISS)
        return next(missing, len(keys))

    def give_up(self, keys: Iterable[OffloadKey]) -> None:
        """Treats keys whose promotion takes too long as missing until it ends."""
        for key in keys:
            if key in self._chunks and self._chunks[key].state is ChunkState.PROMOTING:
                self._doom(key)

    def prepare_load(self, keys: Sequence[OffloadKey]) -> list[StoredChunk]:
        """Pins chunks that `lookup` just found, ordered from the head of their prompt, until `complete_load`."""
        chunks = [self._chunks[key] for key in keys]
        self.touch(keys)
        for key, chunk in zip(keys, chunks, strict=True):
            assert chunk.state is ChunkState.READY, (key, chunk)
            self._loads[key] += 1
            self._pin(key, chunk)
        self._counts["num_loads"] += len(keys)
        return [StoredChunk(chunk.chunk_id, chunk.digest, chunk.seconds) for chunk in chunks]

    def complete_load(self, keys: Sequence[OffloadKey]) -> None:
        """Ends one `prepare_load`, successful or not, which no longer reads these chunks."""
        for key in keys:
            assert self._loads[key] > 0, f"no load of {key} is running"
            if count := self._loads.pop(key) - 1:
                self._loads[key] = count
            self._unpin(key, self._chunks[key])

    def prepare_store(
        self, keys: Sequence[tuple[OffloadKey, int]], prompt: Prompt | None = None
    ) -> list[tuple[OffloadKey, int]]:
        """Returns chunks to write for a prompt's keys that are not here, as many from the head as there is room for.

        Each key comes with its place, its block's number in the prompt. They get the age that the `prompt` had when it
        was refreshed; without a `prompt` the keys are the whole prompt. Each returned (key, chunk id) must be given to
        `complete_store`.
        """
        if not keys:
            return []
        room = self._room(keys[0][0])
        prompt = prompt or Prompt(dict(keys))
        self._refresh(room, prompt, (key for key, _ in keys))
        missing = [(key, place) for key, place in keys if key not in self._chunks]
        chunk_ids = self._allocate(room, len(missing), prompt.places.keys())
        self._counts["num_stores_without_room"] += len(missing) - len(chunk_ids)
        stores: list[tuple[OffloadKey, int]] = []
        for (key, place), chunk_id in zip(missing, chunk_ids, strict=False):
            self._chunks[key] = _Chunk(chunk_id, place, prompt.moment, ChunkState.WRITING)
            self._writers.add(key)
            stores.append((key, chunk_id))
        return stores

    def _refresh(self, room: _Room, prompt: Prompt, keys: Iterable[OffloadKey]) -> None:
        """Keeps `keys` as young as their prompt; after enough evictions, makes the whole prompt the youngest."""
        if room.num_evicted >= prompt.refresh_at:
            here = [key for key in prompt.places if self.lookup(key) is LookupResult.HIT]
            prompt.moment = room.policy.refresh(here)
            prompt.refresh_at = room.num_evicted + len(prompt.places) // _REFRESH_PART
            keys = prompt.places
            for tier in self._tiers:
                tier.touch(here)
        for key in (key for key in keys if key in self._chunks):
            chunk = self._chunks[key]
            chunk.moment = max(chunk.moment, prompt.moment)
            if chunk.state is ChunkState.READY:
                room.policy.keep_with(key, prompt.moment)

    def complete_store(self, key: OffloadKey, digest: bytes | None, success: bool) -> None:
        """Called when the engine has written the key's chunk. Only now, and only on success, the key is found."""
        assert key in self._writers, f"no store of {key} is running"
        self._writers.remove(key)
        chunk = self._chunks[key]
        self._counts["num_stores" if success else "num_stores_failed"] += 1
        if success and chunk.state is ChunkState.WRITING:
            self._make_ready(key, chunk, digest)
            self._cascade(key)
        elif chunk.state is not ChunkState.DOOMED:
            self._doom(key)
        self._unpin(key, chunk)

    def mark_bad(self, key: OffloadKey) -> None:
        """Forgets a key with wrong bytes, here and in every tier."""
        self._counts["num_bad"] += 1
        chunk = self._chunks.get(key)
        if chunk is not None and chunk.state is not ChunkState.DOOMED:
            self._free_if_unused(key, self._doom(key))
        for tier in self._tiers:
            tier.forget(key)

    def poll(self) -> None:
        """Processes the jobs that the tiers have finished."""
        for tier in self._tiers:
            for result in tier.get_finished_jobs():
                if result.job_id not in self._jobs:
                    self._counts["num_unknown_results"] += 1
                    continue
                job = self._jobs.pop(result.job_id)
                self._num_in_flight[job.is_promotion] -= len(job.keys)
                if job.is_promotion:
                    self._on_promoted(job, result)
                else:
                    self._on_cascaded(job, result)

    def wait(self, seconds: float) -> None:
        """Returns when `poll` may have a job to process, at the latest after this many seconds."""
        busy = [tier for tier in self._tiers if tier.has_pending_work()]
        for tier in busy:
            tier.wait(seconds / len(busy))

    def reset(self) -> None:
        """Forgets everything, here and in the tiers; chunks in use become free when their users end."""
        for key, chunk in list(self._chunks.items()):
            if chunk.state is not ChunkState.DOOMED:
                self._doom(key)
            self._free_if_unused(key, chunk)
        for room in self._rooms:
            room.policy.clear()
        for tier in self._tiers:
            tier.reset()

    def take_events(self) -> list[OffloadEvent]:
        """Returns what each medium stored and removed since the last call; replaying all gives its content."""
        events = self._events.take()
        for tier in self._tiers:
            events += tier.take_events()
        return events

    @property
    def has_pending_work(self) -> bool:
        """Returns whether `poll` has a job to wait for."""
        return bool(self._jobs) or any(tier.has_pending_work() for tier in self._tiers)

    @property
    def stats(self) -> OffloadStats:
        num_stored = sum(room.policy.num_unpinned for room in self._rooms)
        num_being_written = len(self._writers) + self._num_in_flight[True]
        return OffloadStats(
            num_chunks=sum(len(room.chunk_ids) for room in self._rooms),
            num_free=sum(len(room.free) for room in self._rooms),
            num_stored=num_stored,
            num_being_written=num_being_written,
            num_pinned=len(self._chunks) - num_stored - num_being_written,
            num_evicted=sum(room.num_evicted for room in self._rooms),
            tiers=tuple(tier.stats() for tier in self._tiers),
            **self._counts,
        )

    def shutdown(self) -> None:
        """Waits for the tiers' running jobs. Nothing may be called afterwards."""
        for tier in self._tiers:
            tier.shutdown()

    def _allocate(self, room: _Room, num_wanted: int, protected: Collection[OffloadKey]) -> list[int]:
        """Returns free chunks of a kind, evicting as needed: `num_wanted`, or as many as can be had."""
        victims = room.policy.evict(max(0, num_wanted - len(room.free)), protected)
        for key in victims:
            self._events.removed(key)
            self._free_if_unused(key, self._chunks[key])
        room.num_evicted += len(victims)
        return [room.free.pop() for _ in range(min(num_wanted, len(room.free)))]

    def _cascade(self, key: OffloadKey) -> None:
        for tier in self._tiers:
            if tier.lookup(key):
                continue
            if self._num_in_flight[False] >= self._max_cascading or not self._submit(tier, (key,), is_promotion=False):
                self._counts["num_cascades_dropped"] += 1
            else:
                self._pin(key, self._chunks[key])

    def _submit(self, tier: SecondaryTierManager, keys: tuple[OffloadKey, ...], is_promotion: bool) -> bool:
        chunks = [self._chunks[key] for key in keys]
        chunk_ids, digests = zip(*((chunk.chunk_id, chunk.digest) for chunk in chunks), strict=True)
        job = TransferJob(self._next_job_id, keys, chunk_ids, digests, is_promotion)
        self._next_job_id += 1
        if not (tier.submit_load(job) if is_promotion else tier.submit_store(job)):
            return False
        self._jobs[job.job_id] = job
        self._num_in_flight[is_promotion] += len(keys)
        return True

    def _on_promoted(self, job: TransferJob, result: JobResult) -> None:
        digests = dict(zip(result.successful_keys, result.digests, strict=True))
        self._counts["num_promotions_failed"] += len(job.keys) - len(digests)
        for key in job.keys:
            chunk = self._chunks[key]
            if chunk.state is ChunkState.PROMOTING and key in digests:
                self._counts["num_promoted"] += 1
                chunk.seconds = result.seconds
                self._make_ready(key, chunk, digests[key])
            elif chunk.state is not ChunkState.DOOMED:
                self._doom(key)
            self._unpin(key, chunk)

    def _on_cascaded(self, job: TransferJob, result: JobResult) -> None:
        self._counts["num_cascaded"] += len(result.successful_keys)
        self._counts["num_cascades_failed"] += len(job.keys) - len(result.successful_keys)
        for key in job.keys:
            self._unpin(key, self._chunks[key])

    def _make_ready(self, key: OffloadKey, chunk: _Chunk, digest: bytes | None) -> None:
        self._set_state(chunk, ChunkState.READY)
        chunk.digest = digest
        policy = self._room(key).policy
        policy.insert(key, chunk.moment, chunk.place)
        # Its writer still holds a pin.
        policy.pin(key)
        self._events.stored(key)

    def _doom(self, key: OffloadKey) -> _Chunk:
        chunk = self._chunks[key]
        if chunk.state is ChunkState.READY:
            self._room(key).policy.remove(key)
            self._events.removed(key)
        self._set_state(chunk, ChunkState.DOOMED)
        return chunk

    def _set_state(self, chunk: _Chunk, state: ChunkState) -> None:
        assert state in TRANSITIONS[chunk.state], f"{chunk}: {chunk.state} -> {state}"
        chunk.state = state

    def _pin(self, key: OffloadKey, chunk: _Chunk) -> None:
        chunk.num_pins += 1
        if chunk.num_pins == 1:
            self._room(key).policy.pin(key)

    def _unpin(self, key: OffloadKey, chunk: _Chunk) -> None:
        assert chunk.num_pins > 0, f"{key} has no pin to lose"
        chunk.num_pins -= 1
        if chunk.state is ChunkState.DOOMED:
            self._free_if_unused(key, chunk)
        elif chunk.num_pins == 0:
            self._room(key).policy.unpin(key)

    def _free_if_unused(self, key: OffloadKey, chunk: _Chunk) -> None:
        if chunk.num_pins == 0:
            del self._chunks[key]
            self._room(key).free.append(chunk.chunk_id)

    def check_integrity(self) -> None:
        """Recomputes every pin from its users; asserts that each chunk is in one place and the policy agrees."""
        for room in self._rooms:
            used = [chunk.chunk_id for key, chunk in self._chunks.items() if self._room(key) is room]
            chunk_ids = sorted(room.free + used)
            assert chunk_ids == list(room.chunk_ids), chunk_ids
        pins = Counter(self._writers) + self._loads
        num_in_flight = Counter[bool]()
        for job in self._jobs.values():
            num_in_flight[job.is_promotion] += len(job.keys)
            pins.update(job.keys)
            places = tuple(self._chunks[key].chunk_id for key in job.keys)
            assert places == job.chunk_ids, f"job {job.job_id} uses {job.chunk_ids}, its keys lie in {places}"
        assert num_in_flight == self._num_in_flight, (num_in_flight, self._num_in_flight)
        assert pins.keys() <= self._chunks.keys(), pins.keys() - self._chunks.keys()
        for key, chunk in self._chunks.items():
            assert chunk.num_pins == pins[key], f"{key}: {chunk}, {pins[key]} users"
            assert chunk.num_pins or chunk.state is ChunkState.READY, f"{key} has no user and is not ready: {chunk}"
            assert (chunk.state is ChunkState.WRITING) <= (key in self._writers), f"{key} has no writer: {chunk}"
        ready = {k: chunk.num_pins > 0 for k, chunk in self._chunks.items() if chunk.state is ChunkState.READY}
        members = [(room, key, pin) for room in self._rooms for key, pin in room.policy.members().items()]
        assert all(self._room(key) is room for room, key, _ in members), members
        found = {key: is_pinned for _, key, is_pinned in members}
        assert found == ready, found.items() ^ ready.items()
        stats = self.stats
        assert stats.num_pinned >= 0, stats

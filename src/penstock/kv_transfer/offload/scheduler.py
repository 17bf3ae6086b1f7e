"""The scheduler's part of the `OffloadingConnector`: decides what to store, what to load, and whether loading pays.

Blocks are offered to the CPU tier when their KV is final and copied with the next step, before that step writes
anything; no engine block is ever held for a store. A prompt in a tier is loaded into newly allocated blocks if that is
faster than computing it; chunks on a slower tier are promoted to the CPU tier first, while the request waits.
"""

from __future__ import annotations

import enum
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import reduce
from typing import Any

import msgspec

from penstock.kv_transfer.connector import (
    FREED,
    NO_MATCH,
    PENDING,
    ConnectorEvent,
    FinishResult,
    LoadEnded,
    Match,
    RequestView,
)
from penstock.kv_transfer.digest import Attestation
from penstock.kv_transfer.ledger import TransferLedger, bad_ranges
from penstock.kv_transfer.null import NullSchedulerConnector
from penstock.kv_transfer.offload import OffloadKey
from penstock.kv_transfer.offload.cost_model import LoadCostModel
from penstock.kv_transfer.offload.manager import LookupResult, OffloadingManager, OffloadStats, Prompt
from penstock.kv_transfer.offload.messages import (
    LoadBlock,
    OffloadLoad,
    OffloadMetadata,
    OffloadSetup,
    OffloadStore,
    StoreBlock,
)
from penstock.kv_transfer.offload.region import OffloadRegion
from penstock.kv_transfer.offload.tiers.base import OffloadEvent, TierStats
from penstock.messages.kv_cache_spec import NULL_BLOCK, KVCacheConfig
from penstock.messages.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored, KVEvent
from penstock.messages.kv_transfer import (
    BadRange,
    HandshakePayload,
    KVConnectorOutput,
    ShardId,
    TransferId,
    TransferReport,
    TransferStatus,
)
from penstock.messages.outputs import FinishReason
from penstock.messages.scheduler_output import BlockIds, BlockTable, SchedulerOutput
from penstock.utils.clock import Clock
from penstock.utils.digest import add_digests
from penstock.utils.errors import RequestError
from penstock.utils.math import cdiv

# Steps with fewer tokens do not measure the cost of a prefill.
_PREFILL_TOKENS = 64
# Of the blocks that it found in the engine's cache, a request offers this many bytes at a time, or as many blocks as
# are new: a step must not wait until a long prompt is copied.
_OLD_BYTES = 16 << 20
# A request that gives up also gives up the promotions that it has awaited for longer than this, or than half of the
# time after which it gives up.
_STALLED_SECONDS = 3.0
_PARAMS = "kv_transfer_params"
_COUNTERS = tuple(each.name for each in fields(OffloadStats) if each.name != "tiers")
_TIER_COUNTERS = tuple(each.name for each in fields(TierStats) if each.name != "medium")


class OffloadPolicy(enum.StrEnum):
    """Which of a request's blocks are offered to the tiers: those that it computed, or also cached ones."""

    CHUNK_LEVEL = "chunk"
    REQUEST_LEVEL = "request"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class OffloadRules:
    """`policy` is for requests without one; `costs` is None to load all that can be loaded. A request gives up after
    `load_timeout` seconds.
    """

    attestation: Attestation
    policy: OffloadPolicy
    costs: LoadCostModel | None
    load_timeout: float


@dataclass(slots=True)
class _Request:
    policy: OffloadPolicy
    max_load_blocks: int
    max_offload_blocks: int
    num_loaded_blocks: int = 0
    num_offered_blocks: int = 0
    # Whether it has awaited keys since it last loaded, or last found nothing to load.
    has_awaited: bool = False
    # Keys that have not come yet, the tokens that the request had computed then, and since when it awaits these keys.
    awaited: tuple[tuple[OffloadKey, ...], int, float] = ((), 0, 0.0)
    # Keys that did not come. A tier may still have them, but the request could await them forever.
    lost: set[OffloadKey] = field(default_factory=set[OffloadKey])
    # The keys of blocks of tokens, and those of states.
    prompts: tuple[Prompt, Prompt] = field(default_factory=lambda: (Prompt(), Prompt()))


@dataclass(slots=True)
class _Offer:
    """Complete blocks of one request and kind that may be new to the tier: the block and its place in the prompt, by
    key.
    """

    prompt: Prompt
    blocks: dict[OffloadKey, tuple[int, int]]


@dataclass(slots=True)
class _Store:
    keys: Sequence[OffloadKey]


@dataclass(slots=True)
class _Load:
    transfer_id: TransferId
    index_of: dict[OffloadKey, int]
    first: int
    end: int
    medium: str
    since: float
    is_cancelled: bool = False


class OffloadingScheduler(NullSchedulerConnector):
    """`epoch` identifies this run of the engine: reports of another run are about unknown transfers."""

    def __init__(
        self,
        cache: KVCacheConfig,
        shards: frozenset[ShardId],
        region: OffloadRegion,
        manager: OffloadingManager,
        rules: OffloadRules,
        clock: Clock,
        epoch: str,
    ) -> None:
        self._epoch = epoch
        self._cache = cache
        self._groups = range(len(cache.groups))
        self._sliding_groups = [group for group in self._groups if cache.groups[group].spec.sliding_window]
        self._full_groups = [group for group in self._groups if group not in self._sliding_groups]
        self._state_groups = [group for group in self._groups if cache.groups[group].spec.is_recurrent]
        self._token_groups = [group for group in self._groups if group not in self._state_groups]
        self._most_old_blocks = max(1, _OLD_BYTES // max(1, sum(map(cache.block_bytes, self._token_groups))))
        self._shards = shards
        self._region = region
        self._manager = manager
        self._rules = rules
        self._clock = clock
        self._ledger = TransferLedger[_Load | _Store]()
        self._requests: dict[str, _Request] = {}
        # The content of the next step's metadata.
        self._new_loads: list[OffloadLoad] = []
        self._cancelled: list[TransferId] = []
        self._offers: list[_Offer] = []
        self._num_stores = 0
        self._num_corrupted = 0
        # Tokens and start times of the steps in flight, and the end of the last one.
        self._steps: deque[tuple[int, float]] = deque()
        self._last_end = 0.0

    def set_xfer_handshake_metadata_pp_aware(self, payloads: Mapping[ShardId, HandshakePayload | None]) -> None:
        """Does nothing: the context gives the layers and heads of each rank."""

    def worker_setup(self) -> OffloadSetup:
        return OffloadSetup(self._region.memory, self._region.chunk_bytes, self._region.states)

    # ---- Start and end of requests ----

    def on_new_request(self, request: RequestView) -> None:
        asked = request.kv_transfer_params
        given = asked.get("offload_policy")
        policy = self._rules.policy if given is None else given
        if policy not in list(OffloadPolicy):
            raise RequestError(f"offload_policy must be one of {', '.join(OffloadPolicy)}, got {policy!r}", _PARAMS)
        self._requests[request.request_id] = _Request(
            policy=OffloadPolicy(policy),
            max_load_blocks=self._limit(asked, "max_load_tokens"),
            max_offload_blocks=self._limit(asked, "max_offload_tokens"),
        )

    def _limit(self, asked: Mapping[str, Any], name: str) -> int:
        """Returns the limit in blocks, more than any request has if it sets none."""
        value = asked.get(name)
        if value is None:
            return sys.maxsize
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise RequestError(f"{name} must be a number of tokens, got {value!r}", _PARAMS)
        return value // self._cache.block_size

    def request_finished(self, request: RequestView, block_ids: BlockIds, reason: FinishReason) -> FinishResult:
        del self._requests[request.request_id]
        self._manager.touch([(group, block_hash) for block_hash in request.block_hashes for group in self._groups])
        return FREED

    # ---- Load ----

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> Match:
        size, state = self._cache.block_size, self._requests[request.request_id]
        awaited, state.awaited = state.awaited, ((), 0, 0.0)
        if awaited[0] and awaited[1] == num_computed_tokens and self._is_pending(awaited[0][-1]):
            state.awaited = awaited
            return PENDING  # without a look at all blocks in every step
        state.lost.update(key for key in awaited[0] if self._manager.lookup(key) is LookupResult.MISS)
        first = num_computed_tokens // size
        most = min((request.num_tokens - 1) // size, first + state.max_load_blocks - state.num_loaded_blocks)
        length = self._longest(request.block_hashes, first, most, lambda k: k not in state.lost and self._will_come(k))
        keys = [key for _, keys in self._needed(request.block_hashes, first, length) for key in keys]
        if keys and self._is_worth_it(state, keys, length - first):
            for start, of_group in self._needed(request.block_hashes, first, length):
                if of_group:
                    # The groups' keys are of use only together: none makes room for another one's.
                    self._manager.promote(of_group, self._place(of_group[0][0], start), keys)
            if pending := tuple(filter(self._is_pending, keys)):
                state.awaited = pending, num_computed_tokens, self._clock.now()
                state.has_awaited = True
                return PENDING
            # If the CPU tier has no room for all of it, a shorter prefix may be loadable.
            length = self._longest(request.block_hashes, first, length, self._is_here)
            if length > first:
                return Match((length - first) * size, is_async=True)
        state.has_awaited = False
        return NO_MATCH

    def _place(self, group: int, index: int) -> int:
        """Returns the place of a block in its prompt: of KV the tail leaves a tier first, of states the head, because
        the next turn of a conversation begins at the last one.
        """
        return -index if group in self._state_groups else index

    def _is_here(self, key: OffloadKey) -> bool:
        return self._manager.lookup(key) is LookupResult.HIT

    def _is_pending(self, key: OffloadKey) -> bool:
        return self._manager.lookup(key) is LookupResult.PENDING

    def _will_come(self, key: OffloadKey) -> bool:
        return self._is_pending(key) or self._manager.medium_of(key) is not None

    def _longest(self, hashes: Sequence[bytes], first: int, most: int, has: Callable[[OffloadKey], bool]) -> int:
        """Returns the largest number of blocks, at least `first`, for which every group has the blocks it needs."""
        length = most
        for group in self._full_groups:
            missing = (index for index in range(first, length) if not has((group, hashes[index])))
            length = next(missing, max(first, length))
        while length > first:
            missing = [
                index
                for group in self._sliding_groups
                for index in range(max(first, self._first_needed(group, length)), length)
                if not has((group, hashes[index]))
            ]
            if not missing:
                break
            length = min(missing)  # the windows of all lengths between contain it
        return length

    def _first_needed(self, group: int, num_blocks: int) -> int:
        size = self._cache.block_size
        return self._cache.groups[group].spec.first_needed_block(num_blocks * size, size)

    def _needed(self, hashes: Sequence[bytes], first: int, length: int) -> Iterator[tuple[int, list[OffloadKey]]]:
        """Yields per group the first block to load, and the keys from there on."""
        for group in self._groups:
            start = min(length, max(first, self._first_needed(group, length)))
            yield start, [(group, block_hash) for block_hash in hashes[start:length]]

    def _is_worth_it(self, state: _Request, keys: Sequence[OffloadKey], num_blocks: int) -> bool:
        if self._rules.costs is None or state.has_awaited:
            return True
        media = {self._manager.medium_of(key) or MEDIUM_CPU for key in keys}
        slowest = next((medium for medium in media if medium != MEDIUM_CPU), MEDIUM_CPU)
        return self._rules.costs.should_load(slowest, num_blocks * self._cache.block_size, self._num_bytes(keys))

    def _num_bytes(self, keys: Iterable[OffloadKey]) -> int:
        return sum(self._cache.block_bytes(group) for group, _ in keys)

    def update_state_after_alloc(
        self, request: RequestView, transfer_id: TransferId, block_ids: BlockIds, num_computed_tokens: int, end: int
    ) -> None:
        first, last = num_computed_tokens // self._cache.block_size, end // self._cache.block_size
        placed = [
            (group, table[index], index, (group, request.block_hashes[index]))
            for group, table in enumerate(block_ids)
            for index in range(first, last)
            if table[index] != NULL_BLOCK
        ]
        state = self._requests[request.request_id]
        chunks = self._manager.prepare_load([key for *_, key in placed])
        blocks = tuple(
            LoadBlock(group, block_id, chunk.chunk_id, index, chunk.digest)
            for (group, block_id, index, _), chunk in zip(placed, chunks, strict=True)
        )
        job_id = msgspec.structs.replace(transfer_id, epoch=self._epoch)
        index_of = {key: index for _, _, index, key in placed}
        # Not since it was promoted: the request may have waited for free blocks, which is no cost of the medium.
        seconds = max((chunk.seconds for chunk in chunks), default=0.0) if state.has_awaited else 0.0
        medium, since = MEDIUM_STORAGE if seconds else MEDIUM_CPU, self._clock.now() - seconds
        load = _Load(transfer_id, index_of, num_computed_tokens, end, medium, since)
        state.has_awaited = False
        state.num_loaded_blocks += last - first
        self._ledger.open(job_id, self._shards, load)
        self._new_loads.append(OffloadLoad(job_id, blocks))

    def cancel_load(self, request: RequestView) -> None:
        awaited = self._requests[request.request_id].awaited
        if self._clock.now() - awaited[2] > min(_STALLED_SECONDS, self._rules.load_timeout / 2):
            self._manager.give_up(awaited[0])
        for load in self._ledger:
            if isinstance(load, _Load) and load.transfer_id.number == request.hold_id.number:
                load.is_cancelled = True
                self._cancelled.append(msgspec.structs.replace(load.transfer_id, epoch=self._epoch))

    # ---- Store ----

    def on_blocks_complete(self, request: RequestView, block_ids: BlockTable, first: int, end: int) -> None:
        state = self._requests[request.request_id]
        if state.policy is OffloadPolicy.NONE:
            return
        end = min(end, state.max_offload_blocks)
        of_tokens, of_states = state.prompts
        num_known = len(of_tokens.places) // max(1, len(self._token_groups))
        for index, block_hash in enumerate(request.block_hashes[num_known:end], num_known):
            of_tokens.places.update(((group, block_hash), index) for group in self._token_groups)
        old = of_hit = range(0)
        if state.policy is OffloadPolicy.REQUEST_LEVEL:
            known = state.num_offered_blocks
            old = range(known, min(first, end, known + max(end - first, self._most_old_blocks)))
            # A hit has one state, which is released when the request has computed more.
            of_hit = old if known else range(min(first, end))
            state.num_offered_blocks = end if old.stop == min(first, end) else old.stop
        for prompt, groups, found in ((of_tokens, self._token_groups, old), (of_states, self._state_groups, of_hit)):
            blocks = {
                (group, request.block_hashes[index]): (block_ids[group][index], index)
                for group in groups
                for index in (*found, *range(first, end))
                if block_ids[group][index] != NULL_BLOCK
            }
            if prompt is of_states:
                prompt.places.update((key, index) for key, (_, index) in blocks.items())
            if blocks:
                self._offers.append(_Offer(prompt, blocks))

    def _take_stores(self) -> tuple[OffloadStore, ...]:
        offers, self._offers = self._offers, []
        blocks: list[StoreBlock] = []
        keys: list[OffloadKey] = []
        for offer in offers:
            offered = [(key, self._place(key[0], index)) for key, (_, index) in offer.blocks.items()]
            for key, chunk_id in self._manager.prepare_store(offered, offer.prompt):
                blocks.append(StoreBlock(key[0], offer.blocks[key][0], chunk_id, self._rules.attestation.covers(key)))
                keys.append(key)
        if not blocks:
            return ()
        self._num_stores += 1
        job_id = TransferId("", self._num_stores, epoch=self._epoch)
        self._ledger.open(job_id, self._shards, _Store(keys))
        return (OffloadStore(job_id, tuple(blocks)),)

    # ---- Steps ----

    def build_connector_meta(self, plan: SchedulerOutput) -> OffloadMetadata:
        loads, self._new_loads = tuple(self._new_loads), []
        cancelled, self._cancelled = tuple(self._cancelled), []
        self._steps.append((plan.total_num_scheduled_tokens, self._clock.now()))
        return OffloadMetadata(self._take_stores(), loads, cancelled)

    def update_connector_output(self, output: KVConnectorOutput) -> Sequence[ConnectorEvent]:
        self._manager.poll()
        self._measure_step()
        events: list[ConnectorEvent] = []
        for report in output.reports:
            match self._ledger.apply(report):
                case _Store(keys), reports:
                    self._on_stored(keys, reports)
                case _Load() as load, reports:
                    events.append(self._on_loaded(load, reports))
                case None:
                    pass
        return events

    def _measure_step(self) -> None:
        now = self._clock.now()
        num_tokens, since = self._steps.popleft() if self._steps else (0, now)
        if self._rules.costs is not None and num_tokens >= _PREFILL_TOKENS:
            self._rules.costs.on_computed(num_tokens, now - max(since, self._last_end))
        self._last_end = now

    def _on_stored(self, keys: Sequence[OffloadKey], reports: Sequence[TransferReport]) -> None:
        is_done = all(report.status is TransferStatus.DONE for report in reports)
        for index, key in enumerate(keys):
            of_shards = [report.digests[index] for report in reports] if is_done else []
            is_attested = is_done and all(of_shards)
            self._manager.complete_store(key, reduce(add_digests, of_shards) if is_attested else None, is_done)

    def _on_loaded(self, load: _Load, reports: Sequence[TransferReport]) -> LoadEnded:
        bad = bad_ranges(reports, len(self._cache.groups), load.first, load.end)
        if not load.is_cancelled:
            if self._rules.costs is not None:
                self._rules.costs.on_loaded(load.medium, self._num_bytes(load.index_of), self._clock.now() - load.since)
            for key in self._bad_keys(load, bad):
                self._num_corrupted += 1
                self._manager.mark_bad(key)
        self._manager.complete_load(tuple(load.index_of))
        return LoadEnded(load.transfer_id, bad)

    def _bad_keys(self, load: _Load, bad: Sequence[BadRange]) -> Iterator[OffloadKey]:
        size = self._cache.block_size
        for each in bad:
            indices = range(each.start // size, cdiv(each.end, size))
            yield from (key for key in load.index_of if key[0] == each.group and load.index_of[key] in indices)

    @property
    def has_pending_work(self) -> bool:
        return bool(self._offers or self._new_loads or len(self._ledger)) or self._manager.has_pending_work

    def wait(self, seconds: float) -> None:
        self._manager.wait(seconds)

    def take_events(self) -> Sequence[KVEvent]:
        """Returns the tiers' events. They have hashes only: a block's tokens are in the engine's own event."""
        return [self._event(event) for event in self._manager.take_events()]

    def _event(self, event: OffloadEvent) -> KVEvent:
        group, block_hash = event.key
        if not event.is_stored:
            return BlockRemoved(block_hashes=(block_hash,), group_idx=group, medium=event.medium)
        return BlockStored(
            block_hashes=(block_hash,),
            parent_block_hash=None,
            token_ids=(),
            block_size=self._cache.block_size,
            group_idx=group,
            medium=event.medium,
        )

    def counters(self) -> Mapping[str, float]:
        stats = self._manager.stats
        tiers = {f"{tier.medium}.{name}": getattr(tier, name) for tier in stats.tiers for name in _TIER_COUNTERS}
        return {**{name: getattr(stats, name) for name in _COUNTERS}, "num_corrupted": self._num_corrupted, **tiers}

    def reset_cache(self) -> bool:
        self._offers.clear()
        self._manager.reset()
        return True

    def check_integrity(self) -> None:
        self._ledger.check_integrity()
        self._manager.check_integrity()

    def shutdown(self) -> None:
        self._manager.shutdown()
        self._region.close()

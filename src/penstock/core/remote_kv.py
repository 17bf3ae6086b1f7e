"""Requests whose KV comes from outside the engine: the state of their loads, and the results.

A load that requests wait for ends in the prefix cache: when every shard has reported, its blocks are published, the
request releases them and is scheduled like any other, and finds them like any cached prefix. So a loaded block needs no
special treatment, a waiting request holds nothing that could starve another, and a failed load is only a shorter hit. A
request that loads synchronously runs in the same step that loads; if the load fails, the request is rewound like a
preempted one.

An asynchronous load pins its blocks (LOADING) until its terminal event, whatever happens to the request meanwhile: an
abort or a deadline detaches the request and leaves the blocks in quarantine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.core.containment import contained
from penstock.core.kv_cache_manager import KVCacheManager, PrefixHit
from penstock.core.request import Request, RequestStatus
from penstock.kv_transfer.connector import (
    NO_MATCH,
    PENDING,
    ConnectorEvent,
    FinishAction,
    LoadEnded,
    Match,
    Released,
    SchedulerConnector,
)
from penstock.kv_transfer.null import NullSchedulerConnector
from penstock.messages.kv_transfer import BadRange, KVConnectorOutput, TransferId
from penstock.messages.outputs import FinishReason
from penstock.messages.scheduler_output import BlockIds
from penstock.messages.stats import RemoteKVStats
from penstock.utils.clock import Clock, SystemClock
from penstock.utils.errors import RequestFailedError
from penstock.utils.logging import get_logger
from penstock.utils.math import cdiv

logger = get_logger(__name__)

# After this many failed loads a request is computed here, because further loads are likely to fail too.
MAX_FAILED_LOADS = 2
# A request that could load a block which another is loading already waits for that load for this share of the timeout.
SHARED_LOAD_PATIENCE = 0.1
# While abandoned loads pin more than this share of the pool, no other load begins: requests need blocks to run.
MAX_QUARANTINE = 0.25
# Likewise while requests wait for more than this share of the pool: if their peer hangs, others still run.
MAX_AWAITED = 0.5
# About so many pending requests are looked at in one round, because the time of each lookup is proportional to the
# blocks of the prompt.
_MAX_PENDING = 64
# No load is overdue before its deadline has been checked so often, once in each round of the scheduler. Steps may be
# long, and it takes some to begin a load and to learn that it has ended.
_LEAST_CHECKS = 5


@dataclass(frozen=True, slots=True)
class KVTransfer:
    """What the scheduler needs to move KV. `load_timeout` is in seconds; the policy is "recompute" or "fail"."""

    connector: SchedulerConnector
    load_failure_policy: str = "recompute"
    load_timeout: float = 30.0
    clock: Clock = field(default_factory=SystemClock)


NO_TRANSFER = KVTransfer(NullSchedulerConnector())


@dataclass(slots=True)
class _Load:
    request: Request
    first: int  # blocks
    end: int
    is_async: bool
    deadline: float
    num_blocks: Counter[bool]  # that a request waits for, as `BlockPool.count`
    hashes: Sequence[bytes]  # of these blocks
    is_detached: bool = False
    num_checks: int = 0  # of its deadline


class RemoteKV:
    """Tracks the loads and holds of the scheduler's requests. Belongs to the scheduler."""

    def __init__(self, transfer: KVTransfer, kv: KVCacheManager) -> None:
        self._connector = transfer.connector
        self._kv = kv
        self._timeout = transfer.load_timeout
        self._clock = transfer.clock
        self._loads: dict[TransferId, _Load] = {}
        self._loads_of: dict[Request, dict[TransferId, _Load]] = {}
        # Asynchronous loads only: the requests that wait for one, their blocks, and those pinned by detached ones.
        self._num_waiting = 0
        self._awaited: Counter[bool] = Counter()
        self._awaited_hashes: Counter[bytes] = Counter()
        self._quarantined: Counter[bool] = Counter()
        self._held: set[TransferId] = set()
        # The tokens of a request when it was preempted, and how many transfers had ended.
        self._starving: dict[Request, tuple[int, int]] = {}
        self._num_ended = 0
        self._asked_since: dict[str, float] = {}
        self.has_news = False
        """Whether the last step's result has ended a load or released blocks."""
        self._num_rounds = 0
        self._num_loads = self._num_failed = self._num_timeouts = self._num_loaded_tokens = 0

    @property
    def num_waiting(self) -> int:
        """Returns the number of requests that hold blocks and wait for their KV."""
        return self._num_waiting

    @property
    def earliest_deadline(self) -> float:
        """Returns when the first of the loads that requests wait for is overdue; infinity if there is none."""
        return min((load.deadline for load in self._waiting_loads), default=float("inf"))

    @property
    def _waiting_loads(self) -> list[_Load]:
        return [load for load in self._loads.values() if load.is_async and not load.is_detached]

    @property
    def num_holds(self) -> int:
        """Returns the number of ended requests whose blocks another engine may still read."""
        return len(self._held)

    @property
    def is_idle(self) -> bool:
        """Returns whether no transfer reads or writes a block."""
        return not self._loads and not self._held and not self._connector.has_pending_work

    def begin_round(self) -> None:
        """Called before the waiting requests are looked at."""
        self._num_rounds += 1

    def has_turn(self, request: Request, has_place: bool) -> bool:
        """Returns whether to look at a waiting request in this round: not while its KV is being loaded, or it waits for
        loads of others, or transfers pin the blocks that it needs or might load into.

        Requests whose match was pending take turns if there are many. The number of turns is a power of two, so that
        each of them has its turn in time even while the number changes.
        """
        starves = self._starving.get(request) == (request.num_tokens, self._num_ended) and (self._loads or self._held)
        if starves or request.status is RequestStatus.WAITING_FOR_REMOTE_KV:
            return False
        if request.waits_for_loads:
            return has_place and not (self._exceeds(self._awaited, MAX_AWAITED) and self._is_patient(request))
        num_turns = 1 << (len(self._asked_since) // _MAX_PENDING).bit_length()
        is_new = request.request_id not in self._asked_since
        return is_new or (self._num_rounds + request.arrival_index) % num_turns == 0

    def match(self, request: Request, hit: PrefixHit, has_place: bool) -> Match:
        """Returns what the connector can load after a hit; nothing if the request has waited or failed too often.

        `has_place`: the running requests and those that wait for their KV leave a place for one that loads. Without it,
        and while those that wait hold too many blocks, the request waits too. Raises RequestFailedError.
        """
        if hit.num_tokens < request.num_loaded_tokens:
            # What was loaded is gone, and has brought no token. That is a failure: while the request loads again, those
            # behind it may take the blocks that it needs to run, every time.
            request.num_failed_loads += 1
            request.num_loaded_tokens = 0
        request.waits_for_loads = False
        may_load = request.uses_prefix_cache and request.num_failed_loads < MAX_FAILED_LOADS
        if not may_load or self._exceeds(self._quarantined, MAX_QUARANTINE) or self._is_someone_starving:
            return NO_MATCH
        with contained(request.request_id, may_refuse=False):
            match = self._connector.get_num_new_matched_tokens(request, hit.num_tokens)
            if match.is_pending:
                if self._is_patient(request):
                    return match
                self._num_timeouts += 1
                request.num_failed_loads = MAX_FAILED_LOADS
                self._connector.cancel_load(request)
                match = NO_MATCH
        # The last known token is always computed: its logits are needed.
        block_size = self._kv.block_size
        num_tokens = min(match.num_tokens, request.num_tokens - 1 - hit.num_tokens) // block_size * block_size
        if num_tokens > 0 and match.is_async and (not has_place or self._exceeds(self._awaited, MAX_AWAITED)):
            # An answer that has begun does not wait.
            request.waits_for_loads = not request.num_output_tokens and (not has_place or self._is_patient(request))
            return PENDING if request.waits_for_loads else NO_MATCH
        if num_tokens > 0 and match.is_async and self._waits_for_same_load(request, hit):
            return PENDING
        self._asked_since.pop(request.request_id, None)
        return Match(num_tokens, match.is_async) if num_tokens > 0 else NO_MATCH

    def _waits_for_same_load(self, request: Request, hit: PrefixHit) -> bool:
        """Returns whether the request waits because the block after its hit is being loaded for another one.

        Sharing that load saves a transfer and its blocks. But a load may be lost, so the wait is much shorter than the
        time that a load may take, and a request that does not load itself never waits for one.
        """
        is_shared = request.block_hashes[hit.num_blocks] in self._awaited_hashes
        return is_shared and self._is_patient(request, SHARED_LOAD_PATIENCE)

    def _is_patient(self, request: Request, share: float = 1.0) -> bool:
        """Returns whether a request has waited for a match for less than a share of the timeout."""
        since = self._asked_since.setdefault(request.request_id, self._clock.now())
        return self._clock.now() - since < self._timeout * share

    def on_starved(self, request: Request) -> None:
        """Called when a request was preempted although it ran alone, because transfers pinned the blocks it needed.

        Until the request has gained a token, no other load begins; it is looked at again when a transfer has ended.
        """
        if self._loads or self._held:
            self._starving[request] = request.num_tokens, self._num_ended

    @property
    def _is_someone_starving(self) -> bool:
        for request, (num_tokens, _) in list(self._starving.items()):
            if request.num_tokens != num_tokens or request.status is RequestStatus.FINISHED:
                del self._starving[request]
        return bool(self._starving)

    def _exceeds(self, counts: Counter[bool], share: float) -> bool:
        """Returns whether so many blocks of a kind are more than a share of them."""
        return counts[False] > share * self._kv.pool.num_usable or counts[True] > share * self._kv.pool.num_states

    def begin(self, request: Request, block_ids: BlockIds, hit: PrefixHit, match: Match) -> None:
        """Hands the blocks after the hit to the connector, which loads them.

        Raises RequestFailedError; the request then has no blocks.
        """
        self._asked_since.pop(request.request_id, None)
        self._num_loads += 1
        transfer_id = TransferId(request.request_id, request.arrival_index, part=self._num_loads)
        end = hit.num_tokens + match.num_tokens
        blocks = slice(hit.num_blocks, end // self._kv.block_size)
        load = _Load(
            request=request,
            first=blocks.start,
            end=blocks.stop,
            is_async=match.is_async,
            deadline=self._clock.now() + self._timeout,
            num_blocks=self._kv.pool.count(i for table in block_ids for i in table[blocks] if match.is_async),
            hashes=request.block_hashes[blocks] if match.is_async else (),
        )
        self._loads[transfer_id] = load
        self._loads_of.setdefault(request, {})[transfer_id] = load
        if match.is_async:
            self._num_waiting += 1
            self._awaited.update(load.num_blocks)
            self._awaited_hashes.update(load.hashes)
            request.set_status(RequestStatus.WAITING_FOR_REMOTE_KV)
            self._kv.pin(transfer_id, block_ids, load.first, load.end, writes=True)
        try:
            with contained(request.request_id, may_refuse=False):
                self._connector.update_state_after_alloc(request, transfer_id, block_ids, hit.num_tokens, end)
        except RequestFailedError:
            self._revoke(transfer_id, load, len(block_ids))
            raise

    def _revoke(self, transfer_id: TransferId, load: _Load, num_groups: int) -> None:
        """Ends a load that the connector has failed to begin, like one that has loaded nothing. A later event for it
        has no effect.
        """
        size = self._kv.block_size
        missing = tuple(BadRange(group, load.first * size, load.end * size) for group in range(num_groups))
        self._on_ended(LoadEnded(transfer_id, missing))
        if not load.is_async:
            self._kv.release(load.request, fence=0)

    def poll(self) -> Iterator[tuple[Request, str]]:
        """Applies the ends of transfers that need no step. Yields as `apply`."""
        return self._apply(self._connector.poll())

    def apply(self, output: KVConnectorOutput) -> Iterator[tuple[Request, str]]:
        """Applies a step's results of transfers. Yields the requests that still need KV that is missing, and why."""
        events = self._connector.update_connector_output(output)
        self.has_news = bool(events)
        return self._apply(events)

    def _apply(self, events: Iterable[ConnectorEvent]) -> Iterator[tuple[Request, str]]:
        for event in events:
            if isinstance(event, Released):
                self._on_released(event)
            elif (request := self._on_ended(event)) is not None:
                yield request, event.reason

    def _on_ended(self, event: LoadEnded) -> Request | None:
        """Applies the result of a load; returns the request if it still needs KV that is missing."""
        load = self._loads.pop(event.transfer_id, None)
        if load is None:
            return None
        self._num_ended += 1
        self._num_failed += bool(event.bad_ranges)
        if load.is_async:
            self._kv.unpin(event.transfer_id)
        if load.is_detached:
            self._quarantined.subtract(load.num_blocks)
            return None
        self._end_waiting(load)
        mine = self._loads_of[load.request]
        del mine[event.transfer_id]
        if not mine:
            del self._loads_of[load.request]
        request = load.request
        if load.is_async:
            bad = self._bad_blocks(event.bad_ranges)
            self._num_loaded_tokens += self._kv.publish_loaded(request, load.first, load.end, bad)
            request.num_loaded_tokens = 0 if event.bad_ranges else load.end * self._kv.block_size
            self._kv.release(request, fence=0)
            request.set_status(RequestStatus.WAITING)
        elif not event.bad_ranges:
            self._num_loaded_tokens += (load.end - load.first) * self._kv.block_size
        request.num_failed_loads += bool(event.bad_ranges)
        return request if event.bad_ranges else None

    def _end_waiting(self, load: _Load) -> None:
        """Called when no request waits for the load any more."""
        self._num_waiting -= load.is_async
        self._awaited.subtract(load.num_blocks)
        for block_hash in load.hashes:
            self._awaited_hashes[block_hash] -= 1
            if not self._awaited_hashes[block_hash]:
                del self._awaited_hashes[block_hash]

    def finish(self, request: Request, block_ids: BlockIds, reason: FinishReason) -> Mapping[str, Any] | None:
        """Ends a request, whose blocks the connector may continue to read. Returns the parameters for the response."""
        if block_ids:
            first, end = self._kv.publish_last_state(request)
            if first < end:
                self._connector.on_blocks_complete(request, self._kv.published_blocks(request), first, end)
        result = self._connector.request_finished(request, block_ids, reason)
        if result.action is FinishAction.HOLD and block_ids:
            self._held.add(request.hold_id)
            self._kv.pin(request.hold_id, block_ids, 0, None, writes=False)
        return result.kv_transfer_params

    def _on_released(self, event: Released) -> None:
        """Releases blocks that are no longer read. A repeated or unknown release has no effect."""
        if event.transfer_id in self._held:
            self._num_ended += 1
            self._held.remove(event.transfer_id)
            self._kv.unpin(event.transfer_id)

    def detach(self, request: Request) -> None:
        """Abandons the loads of a request that ends or is rewound."""
        self._asked_since.pop(request.request_id, None)
        for load in self._loads_of.pop(request, {}).values():
            load.is_detached = True
            self._end_waiting(load)
            self._quarantined.update(load.num_blocks)
            self._connector.cancel_load(request)

    def give_up_overdue(self) -> Iterator[tuple[Request, str]]:
        """Detaches requests from loads that have missed their deadline. Yields them, and why; none loads again."""
        now, waiting = self._clock.now(), self._waiting_loads
        for load in waiting:
            load.num_checks += 1
        for request in [each.request for each in waiting if each.deadline <= now and each.num_checks > _LEAST_CHECKS]:
            self._num_timeouts += 1
            self.detach(request)
            self._kv.release(request, fence=0)
            request.set_status(RequestStatus.WAITING)
            request.num_failed_loads = MAX_FAILED_LOADS
            reason = f"it has not arrived within {self._timeout:g} seconds"
            logger.warning("KV of %s is not loaded: %s", request.request_id, reason)
            yield request, reason

    def stats(self) -> RemoteKVStats:
        return RemoteKVStats(self._num_loads, self._num_failed, self._num_timeouts, self._num_loaded_tokens)

    def _bad_blocks(self, ranges: Iterable[BadRange]) -> set[tuple[int, int]]:
        size = self._kv.block_size
        return {(bad.group, index) for bad in ranges for index in range(bad.start // size, cdiv(bad.end, size))}

    def check_integrity(self) -> None:
        for transfer_id, load in self._loads.items():
            waits = load.request.status is RequestStatus.WAITING_FOR_REMOTE_KV
            assert load.is_detached or not load.is_async or waits, f"{transfer_id}: {load.request.status}"
        waiting = self._waiting_loads
        assert self._num_waiting == len(waiting), self._num_waiting
        assert self._awaited_hashes == Counter(block_hash for load in waiting for block_hash in load.hashes)
        assert self._awaited == sum((load.num_blocks for load in waiting), Counter[bool]()), self._awaited
        detached = sum((load.num_blocks for load in self._loads.values() if load.is_detached), Counter[bool]())
        assert self._quarantined == detached, self._quarantined
        assert sum(map(len, self._loads_of.values())) == sum(not load.is_detached for load in self._loads.values())
        self._connector.check_integrity()

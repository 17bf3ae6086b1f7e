"""Manages the KV blocks of requests in all groups: prefix cache lookup, allocation, publication and release.

A request's block table has one entry per block from the start of its prompt, in every group; entries that its group
no longer needs (before a sliding window) are the null block. A model that stores no KV has no groups: its requests
have no tables and need no blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Set
from dataclasses import dataclass

from penstock.core.block_pool import BlockPool
from penstock.core.kv_cache_groups import AttentionGroup
from penstock.core.kv_events import KVEventRecorder
from penstock.core.request import Request, RequestStatus
from penstock.messages.kv_cache_spec import NULL_BLOCK, KVCacheConfig
from penstock.messages.kv_events import KVEvent
from penstock.messages.kv_transfer import TransferId
from penstock.messages.scheduler_output import BlockIds, BlockTable
from penstock.utils.math import cdiv


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Cached blocks from the start of a request: `block_ids[group][i]`, the null block where a group needs none."""

    block_ids: BlockIds
    num_blocks: int
    num_tokens: int


@dataclass(slots=True)
class _Holding:
    """The blocks of one request, by group. The first `num_published` have been published, or were its hit; those up to
    `num_to_publish` count as being computed.
    """

    request: Request
    tables: tuple[list[int], ...]
    num_published: int
    num_to_publish: int


class KVCacheManager:
    def __init__(
        self, config: KVCacheConfig, enable_prefix_caching: bool, recorder: KVEventRecorder | None = None
    ) -> None:
        self._recorder = recorder or KVEventRecorder()
        self.pool = BlockPool(config.num_blocks, self._recorder.on_removed)
        self.block_size = config.block_size
        self.num_tokens_ahead = config.num_tokens_ahead
        self.num_hit_tokens = 0
        self.num_queried_tokens = 0
        self._enable_prefix_caching = enable_prefix_caching
        self._groups = [AttentionGroup(group.spec, config.block_size) for group in config.groups]
        self._has_windows = any(group.spec.sliding_window for group in config.groups)
        self._no_blocks: BlockIds = ((),) * len(config.groups)
        self._holdings: dict[str, _Holding] = {}
        # By hash, how many requests that run will publish the block.
        self._being_computed: Counter[bytes] = Counter()

    @property
    def usage(self) -> float:
        """Returns the share of blocks that cannot be allocated, 0 to 1."""
        return 1.0 - self.pool.num_available / self.pool.num_usable if self.pool.num_usable else 0.0

    def find_prefix(self, request: Request) -> PrefixHit:
        """Returns the longest prefix of the request whose KV every group still has. Changes nothing.

        The last known token is never part of it: its logits are needed, so it has to be computed.
        """
        length = (request.num_tokens - 1) // self.block_size
        if not self._enable_prefix_caching or not request.uses_prefix_cache:
            length = 0
        hashes = request.block_hashes
        while length > 0:
            before = length
            for number, group in enumerate(self._groups):
                length = group.longest_hit(lambda i, n=number: self.pool.find((n, hashes[i])) is not None, length)
            if length == before:
                break
        num_tokens = length * self.block_size
        block_ids: list[tuple[int, ...]] = []
        for number, group in enumerate(self._groups):
            first = group.first_needed_block(num_tokens)
            found = [self.pool.find((number, hashes[i])) for i in range(first, length)]
            block_ids.append((NULL_BLOCK,) * min(first, length) + tuple(i for i in found if i is not None))
        return PrefixHit(tuple(block_ids), length, num_tokens)

    def is_being_computed(self, request: Request, hit: PrefixHit) -> bool:
        """Returns whether a running request will soon publish the block after this hit, so that waiting saves work."""
        if not self._enable_prefix_caching or not request.uses_prefix_cache:
            return False
        within_prompt = hit.num_blocks < (request.num_tokens - 1) // self.block_size
        return within_prompt and self._being_computed[request.block_hashes[hit.num_blocks]] > 0

    def admit(self, request: Request, hit: PrefixHit, num_tokens: int, num_external: int = 0) -> BlockIds | None:
        """Assigns a request its hit and blocks for `num_tokens` tokens in total; None when there are too few blocks.

        The `num_external` tokens after the hit will be loaded: a group gets no blocks for those that it does not need,
        and only the part of the hit that is still needed after them. A request that gets no more tokens than these only
        loads, and computes nothing: other requests must not wait for its blocks, because a load may be lost.
        """
        num_present = hit.num_tokens + num_external
        needed = [group.first_needed_block(num_present) for group in self._groups]
        starts = [min(max(hit.num_blocks, first), num_present // self.block_size) for first in needed]
        num_new = sum(cdiv(num_tokens, self.block_size) - start for start in starts)
        hits = [
            [NULL_BLOCK] * min(first, hit.num_blocks) + list(ids[first:])
            for first, ids in zip(needed, hit.block_ids, strict=True)
        ]
        hit_ids = [i for ids in hits for i in ids if i != NULL_BLOCK]
        if num_new + self.pool.num_to_take(hit_ids) > self.pool.num_available:
            return None
        # The hits of all groups are acquired before any allocation, or one group would evict another's hit.
        self.pool.acquire(hit_ids)
        skipped = [[NULL_BLOCK] * (start - hit.num_blocks) for start in starts]
        tables = tuple([*ids, *gap] for ids, gap in zip(hits, skipped, strict=True))
        computes = self._enable_prefix_caching and num_tokens > num_present
        num_to_publish = len(request.block_hashes) if computes else hit.num_blocks
        self._holdings[request.request_id] = _Holding(request, tables, hit.num_blocks, num_to_publish)
        self._being_computed.update(request.block_hashes[hit.num_blocks : num_to_publish])
        self._extend(tables, num_tokens)
        return self.block_ids(request)

    def count_hit(self, request: Request, hit: PrefixHit) -> None:
        """Records in the statistics that a request enters the runner with this hit."""
        if self._enable_prefix_caching:
            self.num_hit_tokens += hit.num_tokens
            self.num_queried_tokens += request.num_tokens

    def grow(self, request: Request, num_tokens: int) -> BlockIds | None:
        """Allocates blocks for `num_tokens` tokens in total; returns the new ones, None when there are too few."""
        tables = self._holdings[request.request_id].tables
        if self._has_windows:
            self._release_behind_window(request, tables)
        num_new = self._num_new_blocks(tables, num_tokens)
        if num_new <= 0:
            return self._no_blocks
        if num_new * len(self._groups) > self.pool.num_available:
            return None
        return self._extend(tables, num_tokens)

    def could_grow_after_steps_in_flight(self, request: Request, num_tokens: int) -> bool:
        """Returns whether `grow` would succeed once the blocks that wait for steps in flight are available."""
        num_new = max(0, self._num_new_blocks(self._holdings[request.request_id].tables, num_tokens))
        return num_new * len(self._groups) <= self.pool.num_available + self.pool.num_fenced

    def publish(self, request: Request) -> tuple[int, int]:
        """Adds full blocks whose KV is in place to the prefix cache, based on processed (exact) counts.

        Returns the range [first, end) of these blocks.
        """
        first = self._holdings[request.request_id].num_published
        end = request.num_processed_tokens // self.block_size
        if end > first:
            # Tokens computed after a request's end have no hash.
            end = min(end, len(request.block_hashes))
        if end <= first or not self._enable_prefix_caching:
            return first, first
        self._publish(request, first, end, frozenset())
        return first, end

    def publish_loaded(self, request: Request, first: int, end: int, bad: Set[tuple[int, int]]) -> int:
        """Adds the loaded blocks [first, end) to the prefix cache, except the bad ones, (group, index).

        Returns how many tokens at their head are complete in all groups.
        """
        self._publish(request, first, end, bad)
        bad_indices = [index for _, index in bad if index >= first]
        return (min([end, *bad_indices]) - first) * self.block_size

    def _publish(self, request: Request, first: int, end: int, bad: Set[tuple[int, int]]) -> None:
        hashes, holding = request.block_hashes, self._holdings[request.request_id]
        self._end_computing(holding, end)
        for number, table in enumerate(holding.tables):
            right = (i for i in range(first, end) if table[i] != NULL_BLOCK and (number, i) not in bad)
            stored = [i for i in right if self.pool.publish(table[i], (number, hashes[i]))]
            self._recorder.on_stored(request, number, stored)
        holding.num_published = end

    def pin(self, transfer_id: TransferId, block_ids: BlockIds, first: int, end: int | None, writes: bool) -> None:
        """Pins blocks [first, end) of a request's table (None: to the last) for a transfer, until `unpin`."""
        ids = [i for table in block_ids for i in table[first:end] if i != NULL_BLOCK]
        self.pool.pin(transfer_id, ids, writes)

    def unpin(self, transfer_id: TransferId) -> None:
        """Removes the pins of a transfer that has ended."""
        self.pool.unpin(transfer_id)

    def block_ids(self, request: Request) -> BlockIds:
        """Returns the request's block table in every group."""
        return tuple(tuple(table) for table in self._holdings[request.request_id].tables)

    def block_table(self, request: Request) -> BlockTable:
        """Returns the same as `block_ids`, without a copy."""
        return self._holdings[request.request_id].tables

    def release(self, request: Request, fence: int) -> None:
        """Takes all blocks from a request; they stay untouched until step `fence` has been processed."""
        holding = self._holdings.pop(request.request_id)
        self._end_computing(holding, holding.num_to_publish)
        for table in holding.tables:
            self.pool.release(table, fence)

    def take_events(self) -> tuple[KVEvent, ...]:
        """Returns the blocks stored and removed since the last call, in order; empty without a recorder."""
        return self._recorder.take()

    def reset_prefix_cache(self) -> bool:
        """Removes all cached prefixes; returns False, and does nothing, while any request holds blocks."""
        return self.pool.clear_cache()

    def _num_new_blocks(self, tables: tuple[list[int], ...], num_tokens: int) -> int:
        """Returns how many blocks each group lacks for `num_tokens` tokens; negative if it has more than enough."""
        return cdiv(num_tokens, self.block_size) - len(tables[0]) if tables else 0

    def _extend(self, tables: Iterable[list[int]], num_tokens: int) -> BlockIds:
        new_ids: list[tuple[int, ...]] = []
        for table in tables:
            new = self.pool.allocate(max(0, cdiv(num_tokens, self.block_size) - len(table)))
            table.extend(new)
            new_ids.append(tuple(new))
        return tuple(new_ids)

    def _release_behind_window(self, request: Request, tables: tuple[list[int], ...]) -> None:
        # Uses the processed count: a step in flight still reads the window of its own, earlier position.
        for group, table in zip(self._groups, tables, strict=True):
            index = group.first_needed_block(request.num_processed_tokens) - 1
            gone: list[int] = []
            while index >= 0 and table[index] != NULL_BLOCK:
                gone.append(table[index])
                table[index] = NULL_BLOCK
                index -= 1
            if gone:
                self.pool.release(gone[::-1])

    def _end_computing(self, holding: _Holding, end: int) -> None:
        """Called when the blocks up to `end` are no longer being computed by this request."""
        # A hash that became known after the admission is not counted.
        end = min(end, holding.num_to_publish)
        for block_hash in holding.request.block_hashes[holding.num_published : end]:
            self._being_computed[block_hash] -= 1
            if not self._being_computed[block_hash]:
                del self._being_computed[block_hash]

    def check_integrity(self) -> None:
        """Recomputes the pool's counts and the hashes being computed from the blocks of all requests."""
        holdings = self._holdings.values()
        self.pool.check_integrity(table for each in holdings for table in each.tables)
        computed: Counter[bytes] = Counter()
        for each in holdings:
            request = each.request
            assert len({len(table) for table in each.tables}) <= 1, f"{request.request_id}: groups differ in length"
            # A request that waits for its KV computes nothing, and may never get it.
            if request.status is not RequestStatus.WAITING_FOR_REMOTE_KV:
                computed.update(request.block_hashes[each.num_published : each.num_to_publish])
        counts = (len(self._being_computed), len(computed))
        assert dict(self._being_computed) == dict(computed), f"hashes being computed: counted and found {counts}"

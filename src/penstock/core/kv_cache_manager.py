"""Manages the KV blocks of requests in all groups: prefix cache lookup, allocation, publication and release.

A request's block table has one entry per block from the start of its prompt, in every group; entries that its group
no longer needs (before a sliding window) are the null block. A model that stores no KV has no groups: its requests
have no tables and need no blocks.

A block of recurrent layers holds the state after its last computed token. Only checkpoints, states after whole blocks
that later requests are likely to begin with, are published.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

from penstock.core.block_pool import BlockPool
from penstock.core.kv_cache_groups import Checkpoints, make_groups
from penstock.core.kv_events import KVEventRecorder
from penstock.core.request import Request, RequestStatus
from penstock.messages.kv_cache_spec import NULL_BLOCK, KVCacheConfig
from penstock.messages.kv_events import KVEvent
from penstock.messages.kv_transfer import TransferId
from penstock.messages.scheduler_output import BlockIds, BlockTable
from penstock.utils.math import cdiv


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Cached blocks from the start of a request: `block_ids[group][i]`, the null block where a group needs none.

    All groups but the recurrent ones have the first `num_shared_blocks`.
    """

    block_ids: BlockIds
    num_blocks: int
    num_tokens: int
    num_shared_blocks: int = 0


@dataclass(slots=True)
class _Holding:
    """The blocks of one request, by group. The first `num_published` have been published, or were its hit; those up to
    `num_to_publish` count as being computed.

    `published` has the same blocks without the unpublished ones of recurrent layers. The first `num_computed` are
    complete, the last of them by a step. Before block `num_released[group]` a group has released what it had.
    """

    request: Request
    checkpoints: Checkpoints
    tables: tuple[list[int], ...]
    published: tuple[list[int], ...]
    num_published: int
    num_to_publish: int
    num_released: list[int]
    num_computed: int = 0

    def hashes(self, first: int, end: int, has_states: bool) -> Iterable[bytes]:
        """Returns the hashes of the blocks [first, end) after which another request can begin."""
        hashes = self.request.block_hashes[first:end]
        if not has_states:
            return hashes
        return [each for index, each in enumerate(hashes, first) if index in self.checkpoints]


class KVCacheManager:
    def __init__(
        self, config: KVCacheConfig, enable_prefix_caching: bool, recorder: KVEventRecorder | None = None
    ) -> None:
        self._recorder = recorder or KVEventRecorder()
        self.pool = BlockPool(config.num_blocks, self._recorder.on_removed, config.num_states)
        self.block_size = config.block_size
        # Without a prefix cache no block is looked for or published: no request fills one of this size.
        self.hashed_block_size = config.block_size if enable_prefix_caching else sys.maxsize
        self.num_tokens_ahead = config.num_tokens_ahead
        self.num_hit_tokens = 0
        self.num_queried_tokens = 0
        self._enable_prefix_caching = enable_prefix_caching
        self._groups = make_groups(config)
        self._has_windows = any(group.spec.sliding_window for group in config.groups)
        self._has_states = config.has_states
        self._checkpoint_blocks = config.checkpoint_interval // config.block_size
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
        shared = length = self._longest_hit(request, length, with_states=False)
        if self._has_states:
            length = self._longest_hit(request, length, with_states=True)
        num_tokens = length * self.block_size
        block_ids: list[tuple[int, ...]] = []
        for number, group in enumerate(self._groups):
            first = group.first_needed_block(num_tokens)
            found = [self.pool.find((number, hashes[i])) for i in range(first, length)]
            block_ids.append((NULL_BLOCK,) * min(first, length) + tuple(i for i in found if i is not None))
        return PrefixHit(tuple(block_ids), length, num_tokens, shared)

    def _longest_hit(self, request: Request, length: int, with_states: bool) -> int:
        hashes = request.block_hashes
        groups = [each for each in enumerate(self._groups) if with_states or not each[1].spec.is_recurrent]
        while length > 0:
            before = length
            for number, group in groups:
                length = group.longest_hit(lambda i, n=number: self.pool.find((n, hashes[i])) is not None, length)
            if length == before:
                break
        return length

    def is_being_computed(self, request: Request, hit: PrefixHit) -> bool:
        """Returns whether a running request will soon publish the block after this hit, so that waiting saves work."""
        if not self._enable_prefix_caching or not request.uses_prefix_cache:
            return False
        end = (request.num_tokens - 1) // self.block_size
        if not self._has_states:
            end = min(end, hit.num_blocks + 1)
        return any(self._being_computed[each] for each in request.block_hashes[hit.num_blocks : end])

    def admit(self, request: Request, hit: PrefixHit, num_tokens: int, num_external: int = 0) -> BlockIds | None:
        """Assigns a request its hit and blocks for `num_tokens` tokens in total; None when there are too few blocks.

        The `num_external` tokens after the hit will be loaded: a group gets no blocks for those that it does not need,
        and only the part of the hit that is still needed after them. A request that gets no more tokens than these only
        loads, and computes nothing: other requests must not wait for its blocks, because a load may be lost.
        """
        num_present = hit.num_tokens + num_external
        needed = [group.first_needed_block(num_present) for group in self._groups]
        starts = [min(max(hit.num_blocks, first), num_present // self.block_size) for first in needed]
        checkpoints = self._checkpoints(request, hit, num_present)
        new = self._new_blocks(starts, num_tokens, checkpoints)
        hits = [
            [NULL_BLOCK] * min(first, hit.num_blocks) + list(ids[first:])
            for first, ids in zip(needed, hit.block_ids, strict=True)
        ]
        hit_ids = [i for ids in hits for i in ids if i != NULL_BLOCK]
        if not self.pool.has_room(*self._count(new), taken=hit_ids):
            return None
        # The hits of all groups are acquired before any allocation, or one group would evict another's hit.
        self.pool.acquire(hit_ids)
        skipped = [[NULL_BLOCK] * (start - hit.num_blocks) for start in starts]
        tables = tuple([*ids, *gap] for ids, gap in zip(hits, skipped, strict=True))
        computes = self._enable_prefix_caching and num_tokens > num_present
        num_to_publish = len(request.block_hashes) if computes else hit.num_blocks
        self._holdings[request.request_id] = holding = _Holding(
            request=request,
            checkpoints=checkpoints,
            tables=tables,
            published=tuple(
                list(table) if group.spec.is_recurrent else table
                for group, table in zip(self._groups, tables, strict=True)
            ),
            num_published=hit.num_blocks,
            num_to_publish=num_to_publish,
            num_released=[0] * len(tables),
        )
        self._being_computed.update(holding.hashes(hit.num_blocks, num_to_publish, self._has_states))
        self._extend(tables, new, num_tokens)
        return self.block_ids(request)

    def _checkpoints(self, request: Request, hit: PrefixHit, num_present: int) -> Checkpoints:
        """Returns the request's checkpoints: among others the last that an equal prompt can begin with, where its
        prompt differs from those that other requests have computed, and the one that it begins with itself: a step that
        loads it needs a block for it.
        """
        ends = {(request.num_tokens - 1) // self.block_size, hit.num_shared_blocks, num_present // self.block_size}
        return Checkpoints(self._checkpoint_blocks, frozenset(end - 1 for end in ends))

    def count_hit(self, request: Request, hit: PrefixHit) -> None:
        """Records in the statistics that a request enters the runner with this hit, if it does for the first time."""
        if self._enable_prefix_caching and request.admission == 0:
            self.num_hit_tokens += hit.num_tokens
            self.num_queried_tokens += request.num_tokens

    def grow(self, request: Request, num_tokens: int) -> BlockIds | None:
        """Allocates blocks for `num_tokens` tokens in total; returns the new ones, None when there are too few."""
        holding = self._holdings[request.request_id]
        if self._has_windows:
            self._release_behind_window(holding)
        if not holding.tables or len(holding.tables[0]) >= cdiv(num_tokens, self.block_size):
            return self._no_blocks
        new = self._new_blocks(map(len, holding.tables), num_tokens, holding.checkpoints)
        if not self.pool.has_room(*self._count(new)):
            return None
        return self._extend(holding.tables, new, num_tokens)

    def could_grow_after_steps_in_flight(self, request: Request, num_tokens: int) -> bool:
        """Returns whether `grow` would succeed once the blocks that wait for steps in flight are available."""
        holding = self._holdings[request.request_id]
        new = self._new_blocks(map(len, holding.tables), num_tokens, holding.checkpoints)
        return self.pool.has_room(*self._count(new), with_fenced=True)

    def publish(self, request: Request) -> tuple[int, int]:
        """Adds full blocks whose KV is in place to the prefix cache, based on processed (exact) counts.

        Returns the range [first, end) of these blocks.
        """
        holding = self._holdings[request.request_id]
        first = holding.num_published
        end = self._num_stored_tokens(request) // self.block_size
        if end > first:
            # Tokens computed after a request's end have no hash.
            end = min(end, len(request.block_hashes))
        if end <= first or not self._enable_prefix_caching:
            return first, first
        chosen = [
            [index for index in range(first, end) if group.publishes(index, holding.checkpoints)]
            for group in self._groups
        ]
        self._publish(holding, end, chosen)
        holding.num_computed = end
        return first, end

    def publish_last_state(self, request: Request) -> tuple[int, int]:
        """Publishes the state after the last whole block: the next request of a conversation begins with it. Nothing
        may be computed afterwards.

        Returns the range [first, end) of that block, which is empty if the state was published earlier.
        """
        holding = self._holdings[request.request_id]
        last = holding.num_computed - 1
        is_new = False
        for number, group in enumerate(self._groups):
            if not (group.spec.is_recurrent and self._enable_prefix_caching) or last < 0:
                continue
            block_id, key = holding.tables[number][last], (number, request.block_hashes[last])
            if block_id != NULL_BLOCK and not self.pool.is_published(block_id) and self.pool.publish(block_id, key):
                self._recorder.on_stored(request, number, [last])
                holding.published[number][last] = block_id
                is_new = True
        return last, last + is_new

    def _num_stored_tokens(self, request: Request) -> int:
        """Returns the tokens that every group has stored: a state is that before the drafts of the last step."""
        return request.num_processed_tokens - (request.num_last_accepted if self._has_states else 0)

    def publish_loaded(self, request: Request, first: int, end: int, bad: Set[tuple[int, int]]) -> int:
        """Adds the loaded blocks [first, end) to the prefix cache, except the bad ones, (group, index).

        Returns how many tokens at their head are complete in all groups.
        """
        right = [[i for i in range(first, end) if (group, i) not in bad] for group in range(len(self._groups))]
        self._publish(self._holdings[request.request_id], end, right)
        bad_indices = [index for _, index in bad if index >= first]
        return (min([end, *bad_indices]) - first) * self.block_size

    def _publish(self, holding: _Holding, end: int, chosen: Sequence[Sequence[int]]) -> None:
        """Adds the chosen blocks of each group, all before `end`, to the prefix cache."""
        request = holding.request
        self._end_computing(holding, end)
        for number, table in enumerate(holding.tables):
            present = [i for i in chosen[number] if table[i] != NULL_BLOCK]
            stored = [i for i in present if self.pool.publish(table[i], (number, request.block_hashes[i]))]
            self._recorder.on_stored(request, number, stored)
            published = holding.published[number]
            if published is not table:
                published += [NULL_BLOCK] * (end - len(published))
                for index in present:
                    published[index] = table[index]
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

    def blocks_for_others(self, request: Request) -> BlockIds:
        """Returns the same without the states from which no other engine continues the prompt: all but the one at its
        last whole block.
        """
        at_end = self._num_whole_blocks(request) - 1
        return tuple(
            tuple(i if index == at_end else NULL_BLOCK for index, i in enumerate(ids))
            if group.spec.is_recurrent
            else ids
            for group, ids in zip(self._groups, self.block_ids(request), strict=True)
        )

    def _num_whole_blocks(self, request: Request) -> int:
        """Returns the number of blocks after which another engine continues the prompt."""
        return (request.num_prompt_tokens - 1) // self.block_size

    def published_blocks(self, request: Request) -> BlockTable:
        """Returns the same without the unpublished blocks of recurrent layers, and without a copy."""
        return self._holdings[request.request_id].published

    def release(self, request: Request, fence: int) -> None:
        """Takes all blocks from a request; they stay untouched until step `fence` has been processed."""
        self.publish_last_state(request)
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

    def _new_blocks(self, starts: Iterable[int], num_tokens: int, checkpoints: Checkpoints) -> list[Sequence[int]]:
        """Returns the indices of the blocks that each group needs from `starts` on, for `num_tokens` in total."""
        end = cdiv(num_tokens, self.block_size)
        return [
            group.blocks_to_allocate(start, end, num_tokens, checkpoints)
            for group, start in zip(self._groups, starts, strict=True)
        ]

    def _count(self, new: Sequence[Sequence[int]]) -> tuple[int, int]:
        """Returns how many of these are blocks of tokens, and of states."""
        of_states = sum(len(each) for group, each in zip(self._groups, new, strict=True) if group.spec.is_recurrent)
        return sum(map(len, new)) - of_states, of_states

    def _extend(self, tables: Iterable[list[int]], new: Iterable[Sequence[int]], num_tokens: int) -> BlockIds:
        end = cdiv(num_tokens, self.block_size)
        new_ids: list[tuple[int, ...]] = []
        for group, table, indices in zip(self._groups, tables, new, strict=True):
            allocated = self.pool.allocate(len(indices), group.spec.is_recurrent)
            start = len(table)
            if len(indices) < end - start:
                by_index = dict(zip(indices, allocated, strict=True))
                allocated = [by_index.get(index, NULL_BLOCK) for index in range(start, end)]
            table.extend(allocated)
            new_ids.append(tuple(allocated))
        return tuple(new_ids)

    def _release_behind_window(self, holding: _Holding) -> None:
        # Uses the processed count: a step in flight still reads the window of its own, earlier position.
        request = holding.request
        num_tokens = self._num_stored_tokens(request)
        # Another engine may begin at the prompt's last whole block: until the first token, what it needs stays. The
        # state there stays longer, if one will.
        whole = self._num_whole_blocks(request)
        needed = num_tokens if request.num_output_tokens else min(num_tokens, whole * self.block_size)
        for number, (group, table) in enumerate(zip(self._groups, holding.tables, strict=True)):
            end = group.first_needed_block(needed)
            if group.spec.is_recurrent:
                # The state after the last whole block is published if the request ends.
                end = min(end, num_tokens // self.block_size - 1)
            gone = range(holding.num_released[number], end)
            if gone:
                keeps = group.spec.is_recurrent and request.is_continued_elsewhere
                kept = whole - 1 if keeps else None
                self.pool.release([table[index] for index in gone if index != kept])
                # A connector must not find them either: another request's content would be taken for this one's.
                for ids in (table, holding.published[number]):
                    left = enumerate(ids[gone.start : gone.stop], gone.start)
                    ids[gone.start : gone.stop] = [each if index == kept else NULL_BLOCK for index, each in left]
                holding.num_released[number] = end

    def _end_computing(self, holding: _Holding, end: int) -> None:
        """Called when the blocks up to `end` are no longer being computed by this request."""
        # A hash that became known after the admission is not counted.
        end = min(end, holding.num_to_publish)
        for block_hash in holding.hashes(holding.num_published, end, self._has_states):
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
                computed.update(each.hashes(each.num_published, each.num_to_publish, self._has_states))
        counts = (len(self._being_computed), len(computed))
        assert dict(self._being_computed) == dict(computed), f"hashes being computed: counted and found {counts}"

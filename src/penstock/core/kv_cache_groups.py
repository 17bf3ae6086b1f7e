"""Which blocks of the prefix each kind of attention needs: one small class per kind.

A group works on block *indices* along the request (0 is its first block), never on block ids.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from penstock.messages.kv_cache_spec import KVCacheSpec


class AttentionGroup(Protocol):
    def longest_hit(self, is_cached: Callable[[int], bool], num_blocks: int) -> int:
        """Returns the largest length, at most `num_blocks`, at which the cache holds all blocks that a query needs."""
        ...

    def first_needed_block(self, num_computed_tokens: int) -> int:
        """Returns the first block that the query at position `num_computed_tokens` still reads."""
        ...


@dataclass(frozen=True, slots=True)
class FullAttentionGroup:
    """Every query reads everything before it."""

    def longest_hit(self, is_cached: Callable[[int], bool], num_blocks: int) -> int:
        length = 0
        while length < num_blocks and is_cached(length):
            length += 1
        return length

    def first_needed_block(self, num_computed_tokens: int) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class SlidingWindowGroup:
    """A query at position p reads positions p - sliding_window + 1 to p."""

    spec: KVCacheSpec
    block_size: int

    def longest_hit(self, is_cached: Callable[[int], bool], num_blocks: int) -> int:
        length, index = num_blocks, num_blocks - 1
        # Walks from the tail; `length` is the candidate, and [index + 1, length) are cached.
        while length > 0 and index >= self.first_needed_block(length * self.block_size):
            if not is_cached(index):
                length = index
            index -= 1
        return length

    def first_needed_block(self, num_computed_tokens: int) -> int:
        return self.spec.first_needed_block(num_computed_tokens, self.block_size)


def make_group(spec: KVCacheSpec, block_size: int) -> AttentionGroup:
    if spec.sliding_window:
        return SlidingWindowGroup(spec, block_size)
    return FullAttentionGroup()

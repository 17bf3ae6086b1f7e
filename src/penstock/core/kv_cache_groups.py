"""Which blocks of the prefix a group of layers needs.

A group works on block *indices* along the request (0 is its first block), never on block ids.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.messages.kv_cache_spec import KVCacheSpec


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """A query at position p reads everything before it, or positions p - sliding_window + 1 to p."""

    spec: KVCacheSpec
    block_size: int

    def longest_hit(self, is_cached: Callable[[int], bool], num_blocks: int) -> int:
        """Returns the largest length, at most `num_blocks`, at which the cache holds all blocks that a query needs."""
        if not self.spec.sliding_window:
            return next((index for index in range(num_blocks) if not is_cached(index)), num_blocks)
        length, index = num_blocks, num_blocks - 1
        # Walks from the tail; `length` is the candidate, and [index + 1, length) are cached.
        while length > 0 and index >= self.first_needed_block(length * self.block_size):
            if not is_cached(index):
                length = index
            index -= 1
        return length

    def first_needed_block(self, num_computed_tokens: int) -> int:
        """Returns the first block that the query at position `num_computed_tokens` still reads."""
        return self.spec.first_needed_block(num_computed_tokens, self.block_size)

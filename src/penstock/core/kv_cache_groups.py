"""Which blocks of a request a group of layers needs, gets and keeps.

A group works on block *indices* along the request (0 is its first block), never on block ids.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

from penstock.messages.kv_cache_spec import KVCacheConfig, KVCacheSpec


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

    def blocks_to_allocate(self, first: int, end: int, num_tokens: int, checkpoints: Container[int]) -> Sequence[int]:
        """Returns which of the blocks [first, end) a step needs after which a request has `num_tokens` tokens."""
        return range(first, end)

    def publishes(self, index: int, checkpoints: Container[int]) -> bool:
        """Returns whether a block is of use to other requests as soon as it is complete."""
        return True


@dataclass(frozen=True, slots=True)
class RecurrentGroup(AttentionGroup):
    """The next token reads the state after the last one. Of the blocks that a step fills, it needs the last ones, which
    hold the state that the next step reads, and checkpoints.
    """

    num_uncertain_tokens: int = 0

    def blocks_to_allocate(self, first: int, end: int, num_tokens: int, checkpoints: Container[int]) -> Sequence[int]:
        last = self.first_needed_block(max(0, num_tokens - self.num_uncertain_tokens))
        return [index for index in range(first, end) if index >= last or index in checkpoints]

    def publishes(self, index: int, checkpoints: Container[int]) -> bool:
        return index in checkpoints


def make_groups(config: KVCacheConfig) -> list[AttentionGroup]:
    """Returns the groups of a cache, in their order."""
    return [
        RecurrentGroup(group.spec, config.block_size, config.num_uncertain_tokens)
        if group.spec.is_recurrent
        else AttentionGroup(group.spec, config.block_size)
        for group in config.groups
    ]


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """The whole blocks of a request after which its states are kept: every `interval` blocks (0: none of them), and
    some `others`.
    """

    interval: int
    others: frozenset[int]

    def __contains__(self, index: object) -> bool:
        assert isinstance(index, int), index
        return index in self.others or bool(self.interval and (index + 1) % self.interval == 0)

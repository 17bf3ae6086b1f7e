"""What a simulated rank's device holds of its requests, and what it computes of them in a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

from penstock.simulation.oracle import VOCAB_SIZE, Answer, OracleLayer, OracleMemory


@dataclass(slots=True, eq=False)
class Row:
    """What a rank's device holds of a request."""

    request_id: str
    answer: Answer
    tokens: list[int]  # what is known, then the drafts
    num_computed: int  # exact
    table: list[list[int]]
    num_drafts: int = 0

    def take(self, sampled: Sequence[int]) -> None:
        """The accepted drafts, and the token behind them."""
        first = len(self.tokens) - self.num_drafts
        self.num_computed = first + len(sampled) - 1
        self.tokens[first:] = sampled
        self.num_drafts = 0

    def hold(self, drafts: Sequence[int]) -> None:
        """What the next step may verify."""
        self.tokens += drafts
        self.num_drafts = len(drafts)


StageResult = list[tuple[tuple[int, ...], list[int]]]
"""What earlier stages are told of a step: of every request that samples the tokens, and the drafts behind them."""


@dataclass(slots=True, eq=False)
class Item:
    """A request's part of a step on one rank, as its host launches it; the device knows where it really starts."""

    memory: OracleMemory
    row: Row
    table: list[tuple[int, ...]]
    num_tokens: int
    num_computed_upper_bound: int
    is_sampling: bool
    num_drafts: int  # to verify
    start: int = 0

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    def begin(self) -> None:
        row, name = self.row, self.row.request_id
        self.start = row.num_computed
        known = len(row.tokens) - row.num_drafts
        assert self.num_drafts <= row.num_drafts, f"{name}: scheduled a draft that does not exist"
        assert self.end <= known + self.num_drafts, f"{name}: scheduled a token that does not exist"
        assert not self.num_drafts or self.end == known + self.num_drafts, f"{name}: drafts are not behind the last"
        assert self.is_sampling == (self.end >= known), f"{name}: samples elsewhere than behind its last token"
        if not self.is_sampling:
            row.num_computed = self.end

    def write(self, layer: OracleLayer, start: int, tokens: Sequence[int]) -> None:
        # A gap of the drafter is some token to the model.
        self.memory.write(layer, self.table[layer.group], start, [max(0, token) for token in tokens])


def checksum(items: Sequence[Item], layer: OracleLayer, position: int, before: int) -> int:
    """Of what a query at `position` sees behind it in all heads of a stage; continues the checksum `before`.

    Ranks that have the same heads must see the same in them.
    """
    start, heads = before, range(0)
    for item in items:
        is_shared = item.memory.heads == heads
        start, heads = start if is_shared else before, item.memory.heads
        seen = item.memory.checksum(layer, item.table[layer.group], position, start)
        before = seen if not is_shared or seen == before else crc32(b"ranks disagree", seen)
    return before


def accept(drafts: Sequence[int], checksums: Sequence[int]) -> tuple[int, ...]:
    """The accepted drafts and the token behind them; nothing where nothing is sampled."""
    sampled: list[int] = []
    for index, checksum in enumerate(checksums):
        sampled.append(checksum % VOCAB_SIZE)
        if index == len(drafts) or drafts[index] != sampled[-1]:
            break
    return tuple(sampled)

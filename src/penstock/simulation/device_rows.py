"""The state of requests on a simulated rank's device, and its computation in a step."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from zlib import crc32

from penstock.simulation.oracle import VOCAB_SIZE, Answer, OracleLayer, OracleMemory


@dataclass(slots=True, eq=False)
class Row:
    """The state of a request on a rank's device."""

    request_id: str
    answer: Answer
    tokens: list[int]  # known tokens, then the drafts
    num_computed: int  # exact
    table: list[list[int]]
    seed: int = 0  # of the adapter in its slot
    num_drafts: int = 0
    num_in_states: int = 0  # tokens that the states of recurrent layers contain

    def __post_init__(self) -> None:
        self.num_in_states = self.num_computed

    def take(self, sampled: Sequence[int]) -> None:
        """Appends the accepted drafts and the token after them."""
        first = len(self.tokens) - self.num_drafts
        self.num_computed = first + len(sampled) - 1
        self.tokens[first:] = sampled
        self.num_drafts = 0

    def hold(self, drafts: Sequence[int]) -> None:
        """Sets the drafts that the next step may verify."""
        self.tokens += drafts
        self.num_drafts = len(drafts)


StageResult = list[tuple[tuple[int, ...], list[int]]]
"""What earlier stages receive for a step: for every sampling request, the tokens and the drafts after them."""


@dataclass(slots=True, eq=False)
class Item:
    """A request's part of a step on one rank, as launched by the host; the device knows the actual start."""

    memory: OracleMemory
    row: Row
    table: list[tuple[int, ...]]
    num_tokens: int
    num_computed_upper_bound: int
    is_sampling: bool
    num_drafts: int  # to verify
    start: int = 0
    state_start: int = 0
    digests: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])  # of a recurrent layer

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    def begin(self) -> None:
        row, name = self.row, self.row.request_id
        self.start = row.num_computed
        known = len(row.tokens) - row.num_drafts
        assert self.num_drafts <= row.num_drafts, f"{name}: scheduled a draft that does not exist"
        assert self.end <= known + self.num_drafts, f"{name}: scheduled a token that does not exist"
        assert not self.num_drafts or self.end == known + self.num_drafts, (
            f"{name}: drafts are not after its last token"
        )
        assert self.is_sampling == (self.end >= known), f"{name}: samples at a position other than its last token"
        if not self.is_sampling:
            row.num_computed = self.end
        self.state_start, row.num_in_states = row.num_in_states, self.end - self.num_drafts

    def write(self, layer: OracleLayer, start: int, tokens: Sequence[int]) -> None:
        # A missing draft is an arbitrary token to the model.
        known, seed = [max(0, token) for token in tokens], 0 if layer.is_draft else self.row.seed
        if layer.is_recurrent:
            # The accepted drafts of the last step come first.
            before = self.row.tokens[self.state_start : start]
            table = self.table[layer.group]
            self.digests = self.memory.advance(layer, table, self.state_start, before + known, self.num_drafts, seed)
        else:
            self.memory.write(layer, self.table[layer.group], start, known, seed)

    def checksum(self, layer: OracleLayer, position: int, before: int) -> int:
        """Returns the checksum of everything that a query at `position` reads on this rank; continues `before`."""
        if not layer.is_recurrent:
            return self.memory.checksum(layer, self.table[layer.group], position, before)
        for head in self.memory.heads:
            before = crc32(self.digests[head, position - 1].to_bytes(4, sys.byteorder), before)
        return before


def checksum(items: Sequence[Item], layer: OracleLayer, position: int, before: int) -> int:
    """Returns the checksum of everything that a query at `position` reads in all heads of a stage, continuing the
    checksum `before`. Ranks with the same heads must have the same content in them.
    """
    start, heads = before, range(0)
    for item in items:
        is_shared = item.memory.heads == heads
        start, heads = start if is_shared else before, item.memory.heads
        seen = item.checksum(layer, position, start)
        before = seen if not is_shared or seen == before else crc32(b"ranks disagree", seen)
    return before


def accept(drafts: Sequence[int], checksums: Sequence[int]) -> tuple[int, ...]:
    """Returns the accepted drafts and the token after them; nothing if nothing is sampled."""
    sampled: list[int] = []
    for index, checksum in enumerate(checksums):
        sampled.append(checksum % VOCAB_SIZE)
        if index == len(drafts) or drafts[index] != sampled[-1]:
            break
    return tuple(sampled)

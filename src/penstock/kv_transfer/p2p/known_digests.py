"""The digests of one request's KV that the workers have computed, or are computing, on the sending side.

They are computed in pieces while the request's blocks are completed, for the way in which another engine will probably
read them, so that a reader need not wait for a step.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.kv_transfer.p2p.messages import ShardDigests
from penstock.kv_transfer.topology.planner import LayerSlice
from penstock.messages.kv_transfer import ShardId, TransferId


@dataclass(frozen=True, slots=True)
class Reading:
    """How an engine reads from this one: which of its ranks read what from which rank here.

    A digest covers at most `unit` tokens. `parts` has, by rank of this engine, the ranks that read from it, and what.
    Engines with equal readings get equal digests; equal readings are the same object.
    """

    unit: int
    parts: tuple[tuple[ShardId, tuple[tuple[ShardId, tuple[LayerSlice, ...]], ...]], ...] = ()

    def num_digests(self, num_tokens: int, num_groups: int) -> int:
        """Returns how many digests a grant of consecutive tokens has at most."""
        return (num_tokens // self.unit + 2) * num_groups * sum(len(readers) for _, readers in self.parts)


@dataclass(slots=True)
class _Piece:
    """Tokens up to `end`; `digests` is None while the job is in progress."""

    end: int
    job_id: TransferId
    digests: tuple[ShardDigests, ...] | None = None


class KnownDigests:
    """Pieces of a request's tokens for one reading. They do not overlap."""

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self._pieces: dict[int, _Piece] = {}

    @property
    def jobs(self) -> list[TransferId]:
        """Returns the jobs in progress."""
        return [piece.job_id for piece in self._pieces.values() if piece.digests is None]

    def can_serve(self, reading: Reading, first: int, end: int) -> bool:
        """Returns whether pieces can be joined for tokens [first, end): the reading is the same, and both ends are
        multiples of its unit."""
        return reading is self.reading and not first % reading.unit and not end % reading.unit

    def missing(self, first: int, end: int) -> list[tuple[int, int]]:
        """Returns the ranges within [first, end) that no piece covers."""
        gaps: list[tuple[int, int]] = []
        for start, piece in sorted(self._pieces.items()):
            if first < min(start, end):
                gaps.append((first, min(start, end)))
            first = max(first, piece.end)
        if first < end:
            gaps.append((first, end))
        return gaps

    def begin(self, job_id: TransferId, first: int, end: int) -> None:
        """Adds a piece, which must be missing; its digests follow with `finish`."""
        assert self.missing(first, end) == [(first, end)], (first, end)
        self._pieces[first] = _Piece(end, job_id)

    def finish(self, job_id: TransferId, digests: tuple[ShardDigests, ...] | None) -> None:
        """Sets a piece's digests. Without them, the piece is missing again."""
        for start, piece in list(self._pieces.items()):
            if piece.job_id == job_id and digests is None:
                del self._pieces[start]
            elif piece.job_id == job_id:
                piece.digests = digests

    def of(self, first: int, end: int) -> tuple[ShardDigests, ...] | None:
        """Returns the digests of tokens [first, end), which are not missing; None while a job is in progress."""
        unit, parts = self.reading.unit, list[tuple[ShardDigests, ...]]()
        for start, piece in sorted(self._pieces.items()):
            if start >= end or piece.end <= first:
                continue
            if piece.digests is None:
                return None
            skipped, stop = max(0, first - start) // unit, None if piece.end <= end else (end - start) // unit
            parts.append(tuple(_cut(each, skipped, stop) for each in piece.digests))
        return tuple(_join(each) for each in zip(*parts, strict=True))


def _cut(digests: ShardDigests, first: int, end: int | None) -> ShardDigests:
    return ShardDigests(digests.producer, digests.consumer, tuple(row[first:end] for row in digests.digests))


def _join(parts: tuple[ShardDigests, ...]) -> ShardDigests:
    """Joins the digests of consecutive tokens, all between the same two ranks."""
    first = parts[0]
    assert len({(each.producer, each.consumer) for each in parts}) == 1, parts
    rows = zip(*(each.digests for each in parts), strict=True)
    return ShardDigests(
        first.producer, first.consumer, tuple(tuple(one for row in each for one in row) for each in rows)
    )

"""Computes which part of a model each rank holds, in the same way on every rank and in the engine core.

A rank is a `ShardId`: (stage of the pipeline, place in the stage's tensor parallel group). Stages hold contiguous
ranges of layers; the ranks of a group hold contiguous ranges of every linear layer's features, and of the heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.messages.kv_transfer import ShardId
from penstock.utils.math import interval


def shards(num_stages: int, group_size: int) -> list[ShardId]:
    """Returns all ranks in order: stage after stage."""
    return [(stage, index) for stage in range(num_stages) for index in range(group_size)]


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's share, `index` of `count`, of what its group divides."""

    index: int = 0
    count: int = 1

    def part(self, size: int) -> range:
        """Returns its part of range(size), which the shares divide into contiguous parts as equal as possible."""
        return range(*interval(size, self.index, self.count))

    def sizes(self, size: int) -> list[int]:
        """Returns the sizes of the parts of all shares."""
        return [len(share.part(size)) for share in self.all]

    @property
    def all(self) -> list[Share]:
        """The shares of the whole group."""
        return [Share(index, self.count) for index in range(self.count)]


@dataclass(frozen=True, slots=True)
class HeadShare:
    """A rank's heads among those of the model. Each of its KV heads has the same number of its query heads."""

    queries: range
    kv: range


def head_share(num_heads: int, num_kv_heads: int, share: Share) -> HeadShare:
    """Returns whole groups, KV heads with the query heads that share them (arXiv:2305.13245).

    If there are more ranks than KV heads, several ranks hold the same KV head and divide its query heads. In the order
    of the ranks, their query heads are those of the model in order.
    """
    assert num_heads % num_kv_heads == 0, f"{num_heads} query heads share {num_kv_heads} KV heads"
    assert share.count <= num_heads, f"{share.count} ranks for {num_heads} query heads"
    group = num_heads // num_kv_heads
    if share.count <= num_kv_heads:
        kv = share.part(num_kv_heads)
        return HeadShare(range(kv.start * group, kv.stop * group), kv)
    for head in range(num_kv_heads):
        ranks = Share(head, num_kv_heads).part(share.count)
        if share.index in ranks:
            own = Share(share.index - ranks.start, len(ranks)).part(group)
            return HeadShare(range(head * group + own.start, head * group + own.stop), range(head, head + 1))
    raise AssertionError(share)


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of the pipeline: a contiguous range of the model's layers."""

    layers: range
    is_first: bool = True
    is_last: bool = True


def stages(num_layers: int, num_stages: int, layer_counts: Sequence[int] = ()) -> list[Stage]:
    """Returns the stages in order, with `layer_counts` layers each; without these as equal as possible.

    If layers cannot be divided equally, the middle stages have one more: the first one also computes the embedding, and
    the last one the output head.
    """
    counts = list(layer_counts) or _even_counts(num_layers, num_stages)
    assert len(counts) == num_stages and sum(counts) == num_layers, f"{num_layers} layers as {counts}"
    ends = [sum(counts[: number + 1]) for number in range(num_stages)]
    return [
        Stage(range(end - count, end), number == 0, number == num_stages - 1)
        for number, (count, end) in enumerate(zip(counts, ends, strict=True))
    ]


def _even_counts(num_layers: int, num_stages: int) -> list[int]:
    least, rest = divmod(num_layers, num_stages)
    # From the last stage but one towards the first, and finally the last stage.
    order = [*range(num_stages - 2, -1, -1), num_stages - 1]
    return [least + (number in order[:rest]) for number in range(num_stages)]

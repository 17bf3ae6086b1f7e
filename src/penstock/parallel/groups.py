"""Communication between the ranks of an engine: gathers and sums within a stage, channels between stages.

A rank is a shard `(pp_rank, tp_rank)`, a process or a thread. The ranks of one stage form a `TensorGroup`: they make
the same calls in the same order. A `TensorChannel` connects two ranks in one direction.
`penstock.parallel.shared_memory` implements both for one machine, `penstock.parallel.distributed` by torch.distributed.

Every call that waits does so with the GIL released. When another rank of the engine has ended, every call that waits
raises `RanksLostError`, and so does every later one. Then only `close` may be called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Of one call of `gather_rows`, which makes several gathers of more.
_GATHERED_BYTES = 16 << 20


class TensorGroup(Protocol):
    """The ranks of one stage, `count` of them; this is rank `index`. One thread at a time may use it."""

    @property
    def index(self) -> int: ...

    @property
    def count(self) -> int: ...

    def gather_columns(self, part: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """part [T, sizes[index]] bfloat16, float16 or float32 -> [T, sum(sizes)], every rank's part in order of ranks.

        T and `sizes` are the same on all ranks; both may contain zeros. The result has the same bits on all ranks. It
        is valid until the next call but one of `gather_columns`, and it may be memory that all ranks share: read only.
        """
        ...

    def sum_parts(self, part: torch.Tensor) -> torch.Tensor:
        """part [T, N] bfloat16, float16 or float32 -> [T, N] in its dtype: the sum of every rank's part.

        T and N are the same on all ranks; both may be zero. The result has the same bits on all ranks and belongs to
        the caller; `part` may be overwritten. A sum that one rank computes may have other last bits. CPU tensors are
        added in the order of the ranks in float32, and rounded once. NCCL adds GPU tensors in an order of its own, and
        may round after every addition. It counts as a call of `gather_columns`.
        """
        ...

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        ...


class TensorChannel(Protocol):
    """One direction between two ranks: one sends, the other receives, in order. One thread at a time on each side."""

    def send(self, *tensors: torch.Tensor) -> None:
        """Sends one message. Waits only while the receiver is behind by as many bytes as the channel buffers.

        The tensors may be changed on return. They may have any shape, be non-contiguous, or empty.
        """
        ...

    def receive(self) -> tuple[torch.Tensor, ...]:
        """Waits for the next message: as many tensors as were sent, with their dtypes, shapes and bits.

        They are in new memory, which belongs to the caller.
        """
        ...

    def poll(self) -> bool:
        """Returns whether the next message has begun to arrive, so that `receive` need not wait for its sender."""
        ...


class NullGroup:
    """A stage of one rank."""

    index = 0
    count = 1

    def gather_columns(self, part: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        assert list(sizes) == [part.shape[1]], f"one rank has all columns: {sizes} of {tuple(part.shape)}"
        return part

    def sum_parts(self, part: torch.Tensor) -> torch.Tensor:
        return part

    def barrier(self) -> None:
        pass


ALONE = NullGroup()


def sum_by_gather(group: TensorGroup, part: torch.Tensor) -> torch.Tensor:
    """Implements `TensorGroup.sum_parts` for CPU tensors."""
    width = part.shape[1]
    first, *others = group.gather_columns(part, [width] * group.count).split(width, dim=1)
    total = first.float()
    for other in others:
        total = total + other
    return total.to(part.dtype)


def gather_rows(group: TensorGroup, part: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """part [counts[index], W] -> [sum(counts), W], every rank's rows in order of ranks.

    W and `counts` are the same on all ranks; counts may be zero. The result is valid as that of `gather_columns`.
    """
    width = part.shape[1]
    most = max(1, _GATHERED_BYTES // (width * part.element_size() * group.count))

    def gather(first: int, sizes: list[int]) -> torch.Tensor:
        own = part[first : first + sizes[group.index]].reshape(1, -1)
        return group.gather_columns(own, [size * width for size in sizes]).view(-1, width)

    if max(counts) <= most:
        return gather(0, list(counts))
    starts = [sum(counts[:rank]) for rank in range(group.count)]
    out = part.new_empty((sum(counts), width))
    for first in range(0, max(counts), most):
        sizes = [min(max(count - first, 0), most) for count in counts]
        for start, rows in zip(starts, gather(first, sizes).split(sizes), strict=True):
            out[start + first : start + first + len(rows)] = rows
    return out


@dataclass(frozen=True, slots=True)
class RankLinks:
    """One rank's connections to the others."""

    group: TensorGroup  # a NullGroup in a stage of one rank
    upstream: TensorChannel | None  # from (stage - 1, tp rank); None on the first stage
    downstream: TensorChannel | None  # to (stage + 1, tp rank); None on the last stage
    results_out: tuple[TensorChannel, ...]  # on the last stage: one to (stage, tp rank) for every earlier stage
    results_in: TensorChannel | None  # on earlier stages: from (last stage, tp rank)
    close: Callable[[], None]  # ranks that wait for this one raise RanksLostError; may be called twice
    shared_experts: TensorGroup | None = None  # the stage's ranks of all engines that share experts, if several do

    @property
    def experts(self) -> TensorGroup:
        """The ranks that divide whole experts: engine after engine, each in the order of its ranks."""
        return self.shared_experts or self.group

    @property
    def has_others(self) -> bool:
        """Whether the engine has other ranks."""
        return self.experts.count > 1 or self.upstream is not None or self.downstream is not None


NO_LINKS = RankLinks(ALONE, None, None, (), None, lambda: None)

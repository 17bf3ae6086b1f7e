"""How the ranks of an engine exchange tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


class TensorGroup(Protocol):
    index: int
    count: int

    def gather_columns(self, part: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor: ...

    def barrier(self) -> None: ...


class NullGroup:
    index = 0
    count = 1

    def gather_columns(self, part: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        return part

    def barrier(self) -> None: ...


ALONE = NullGroup()


class TensorChannel(Protocol):
    def send(self, *tensors: torch.Tensor) -> None: ...

    def receive(self) -> tuple[torch.Tensor, ...]: ...

    def poll(self) -> bool: ...


@dataclass(frozen=True)
class RankLinks:
    group: TensorGroup
    upstream: TensorChannel | None
    downstream: TensorChannel | None
    results_out: tuple[TensorChannel, ...]
    results_in: TensorChannel | None
    close: Callable[[], None]

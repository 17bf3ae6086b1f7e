"""Tables in the CPU's own memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class HostTableWriter:
    """Writes tables directly (`TableWriter`)."""

    def write(self, table: torch.Tensor, row: int, start: int, values: Sequence[int] | Sequence[float]) -> None:
        assert 0 <= start <= start + len(values) <= table.shape[1], (start, len(values), table.shape)
        table[row, start : start + len(values)] = torch.as_tensor(values, dtype=table.dtype)

    def apply(self) -> None: ...

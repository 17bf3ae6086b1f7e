"""The sampling parameters of one step's rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from penstock.messages.requests import RowRequest
from penstock.runner.buffers import to_device
from penstock.runner.sampling.noise import Purpose, uniform

SMALLEST_TEMPERATURE = 1e-6  # minimum of a row that is not greedy


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The rows that sample in this step, in the order of the logits."""

    requests: list[RowRequest]  # [num_sampling]
    positions_np: np.ndarray  # [num_sampling] int64: the sampled token's position in its request
    rows: torch.Tensor  # [num_sampling] int64: state rows
    positions: torch.Tensor  # [num_sampling] int64: positions_np, exact, on the device
    token_ids: torch.Tensor  # [max_num_reqs, width] int32: all tokens by state row; known below `positions`
    bitmasks: dict[int, np.ndarray]  # row -> [ceil(vocab_size / 32)] int32: the tokens that its grammar allows
    needs: int = -1  # the features that any of the rows may use, as bits (`features`); all by default

    def where(self, condition: Callable[[RowRequest], object]) -> list[int]:
        """Returns the indices of the requests that meet a condition."""
        return [i for i, request in enumerate(self.requests) if condition(request)]

    def num_output_tokens(self, index: int) -> int:
        return int(self.positions_np[index]) - self.requests[index].num_prompt_tokens

    def noise(self, indices: Sequence[int] | np.ndarray, purpose: Purpose, ahead: int = 0) -> torch.Tensor:
        """Returns [len(indices)] float64 in [0, 1) on the device: the rows' random numbers, `ahead` positions later."""
        seeds = [self.requests[i].seed for i in indices]
        return to_device(uniform(seeds, self.positions_np[indices] + ahead, purpose), self.rows.device)

    def temperatures(self, indices: Iterable[int]) -> torch.Tensor:
        """Returns [len(indices), 1] float32 on the device, with a positive minimum."""
        return self.column(max(self.requests[i].sampling_params.temperature, SMALLEST_TEMPERATURE) for i in indices)

    def column(self, values: Iterable[float]) -> torch.Tensor:
        """Returns [len(values), 1] float32 on the device."""
        return to_device(np.fromiter(values, np.float32), self.rows.device)[:, None]

    def indices(self, values: Iterable[int]) -> torch.Tensor:
        """Returns [len(values)] int64 on the device."""
        return to_device(np.fromiter(values, np.int64), self.rows.device)

"""The sampling parameters of every state row, and the view of them that one step needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from penstock.messages.requests import EngineRequest
from penstock.runner.buffers import to_device
from penstock.runner.sampling.noise import Purpose, uniform


class SamplingStates:
    """Requests by state row."""

    def __init__(self, max_num_reqs: int) -> None:
        self._requests: list[EngineRequest | None] = [None] * max_num_reqs
        self._has_prompt_logprobs = np.zeros(max_num_reqs, dtype=bool)

    def add(self, row: int, request: EngineRequest) -> None:
        self._requests[row] = request
        self._has_prompt_logprobs[row] = request.sampling_params.prompt_logprobs is not None

    def with_prompt_logprobs(self, rows: np.ndarray) -> np.ndarray:
        """Which of these rows' requests want the log probabilities of their prompts, as indices into `rows`."""
        return np.nonzero(self._has_prompt_logprobs[rows])[0]

    def remove(self, rows: Iterable[int]) -> None:
        for row in rows:
            self._requests[row] = None

    def at(self, rows: np.ndarray) -> list[EngineRequest]:
        found = [self._requests[row] for row in rows]
        requests = [request for request in found if request is not None]
        assert len(requests) == len(found), rows
        return requests


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The rows that sample in this step, in the order of the logits."""

    requests: list[EngineRequest]  # [num_sampling]
    positions_np: np.ndarray  # [num_sampling] int64: where the sampled token will stand in its request
    rows: torch.Tensor  # [num_sampling] int64: state rows
    positions: torch.Tensor  # [num_sampling] int64: positions_np, exact, on the device
    token_ids: torch.Tensor  # [max_num_reqs, width] int32: all tokens by state row; known below `positions`
    bitmasks: dict[int, np.ndarray]  # row -> [ceil(vocab_size / 32)] int32: the tokens that its grammar allows

    def where(self, condition: Callable[[EngineRequest], object]) -> list[int]:
        """The indices of those requests that a feature concerns."""
        return [i for i, request in enumerate(self.requests) if condition(request)]

    def num_output_tokens(self, index: int) -> int:
        return int(self.positions_np[index]) - len(self.requests[index].prompt_token_ids)

    def noise(self, indices: Sequence[int] | np.ndarray, purpose: Purpose, ahead: int = 0) -> torch.Tensor:
        """[len(indices)] float64 in [0, 1) on the device: those rows' random numbers, `ahead` positions further on."""
        seeds = [self.requests[i].seed for i in indices]
        return to_device(uniform(seeds, self.positions_np[indices] + ahead, purpose), self.rows.device)

    def temperatures(self, indices: Iterable[int]) -> torch.Tensor:
        """[len(indices), 1] float32 on the device, kept from being zero."""
        return self.column(max(self.requests[i].sampling_params.temperature, 1e-6) for i in indices)

    def column(self, values: Iterable[float]) -> torch.Tensor:
        """[len(values), 1] float32 on the device."""
        return to_device(np.fromiter(values, np.float32), self.rows.device)[:, None]

    def indices(self, values: Iterable[int]) -> torch.Tensor:
        """[len(values)] int64 on the device."""
        return to_device(np.fromiter(values, np.int64), self.rows.device)

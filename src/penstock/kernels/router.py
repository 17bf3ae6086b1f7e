"""The rule by which a mixture of experts chooses the experts of a token, and their weights.

Among equal scores the expert with the lowest number is chosen, and among equal groups the first one (transformers
takes any of them: it uses `torch.topk`); experts are in order of descending score. Everything is float32, and a row
depends on its own logits alone: sums have one order.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from penstock.config.experts import SIGMOID, SOFTMAX, TOP_K_SOFTMAX, TWO_BEST, ExpertsConfig
from penstock.kernels.dispatch import triton_module, uses_triton
from penstock.kernels.native import NativeLibrary, library, num_threads
from penstock.kernels.sigmoid import sigmoid_reference

_SCORE_CODES = {SOFTMAX: 0, SIGMOID: 1, TOP_K_SOFTMAX: 2}


class _Descriptor(ctypes.Structure):
    """`Router` in native/router.cpp."""

    _fields_ = (
        ("correction", ctypes.c_void_p),
        ("expert_scales", ctypes.c_void_p),
        ("num_experts", ctypes.c_int64),
        ("top_k", ctypes.c_int64),
        ("scores", ctypes.c_int64),
        ("num_groups", ctypes.c_int64),
        ("top_groups", ctypes.c_int64),
        ("sums_two_best", ctypes.c_int64),
        ("renormalizes", ctypes.c_int64),
        ("least_sum", ctypes.c_float),
        ("scaling", ctypes.c_float),
    )


class Router:
    """logits [T, num_experts] float32 -> expert ids [T, top_k] int64 and weights [T, top_k] float32."""

    def __init__(
        self,
        config: ExpertsConfig,
        correction: torch.Tensor | None = None,
        library: Callable[[], NativeLibrary | None] = library,
        expert_scales: torch.Tensor | None = None,
    ) -> None:
        """`correction`, [num_experts] float32, is added to the scores for the choice alone; weights of an expert are
        finally multiplied by its number in `expert_scales`, alike. `library` is as for `PackedLinear`.
        """
        self._config = config
        self._correction = correction
        self._expert_scales = expert_scales
        native = library()
        self._run = native.function("route", "ppppnn") if native is not None else None
        self._descriptor = _Descriptor(
            None if correction is None else correction.data_ptr(),
            None if expert_scales is None else expert_scales.data_ptr(),
            config.num_experts,
            config.top_k,
            _SCORE_CODES[config.scores],
            config.num_groups,
            config.top_groups,
            config.group_score == TWO_BEST,
            config.renormalizes,
            least_sum(config),
            config.scaling,
        )
        self._address = ctypes.addressof(self._descriptor)

    def __call__(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert logits.dtype == torch.float32 and logits.is_contiguous(), f"{logits.dtype} {logits.stride()}"
        assert logits.shape[1:] == (self._config.num_experts,), f"{logits.shape} for {self._config}"
        if uses_triton(logits):
            assert self._expert_scales is None, "scales of experts are computed on a CPU only"
            return triton_module("router").route(logits, self._config, self._correction, least_sum(self._config))
        if self._run is None:
            return route_reference(logits, self._config, self._correction, self._expert_scales)
        rows, count = logits.shape[0], self._config.top_k
        ids, weights = torch.empty((rows, count), dtype=torch.int64), logits.new_empty((rows, count))
        self._run(self._address, logits.data_ptr(), ids.data_ptr(), weights.data_ptr(), rows, num_threads())
        return ids, weights


def route_reference(
    logits: torch.Tensor,
    config: ExpertsConfig,
    correction: torch.Tensor | None = None,
    expert_scales: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = _scores(logits, config.scores)
    preference = scores if correction is None else scores + correction
    if config.num_groups > 1:
        preference = _keep_best_groups(preference, config)
    ids = top_k(preference, config.top_k)
    weights = scores.gather(1, ids)
    if config.scores == TOP_K_SOFTMAX:
        weights = weights.softmax(-1)
    if config.renormalizes:
        weights = weights / (_sum(weights) + least_sum(config))
    weights = weights * config.scaling
    return ids, weights if expert_scales is None else weights * expert_scales[ids]


def least_sum(config: ExpertsConfig) -> float:
    """Returns what is added to the sum of a token's weights before they are divided by it."""
    return config.least_sum if config.scores == SIGMOID else 0.0


def top_k(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Returns the ids [T, count] of the largest scores of each row, in descending order; equal ones in ascending order
    of ids. (`torch.topk` chooses any of equal ones.)
    """
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count].contiguous()


def _scores(logits: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == SOFTMAX:
        return logits.softmax(-1)
    return sigmoid_reference(logits) if kind == SIGMOID else logits


def _keep_best_groups(preference: torch.Tensor, config: ExpertsConfig) -> torch.Tensor:
    """Returns the scores with minus infinity in all but the best groups."""
    grouped = preference.view(len(preference), config.num_groups, -1)
    best = grouped.sort(dim=-1, descending=True).values
    score = best[..., 0] + best[..., 1] if config.group_score == TWO_BEST else best[..., 0]
    is_kept = torch.zeros_like(score, dtype=torch.bool).scatter_(1, top_k(score, config.top_groups), True)
    return grouped.masked_fill(~is_kept[..., None], -torch.inf).view_as(preference)


def _sum(weights: torch.Tensor) -> torch.Tensor:
    """[T, k] -> [T, 1], added in order."""
    total = weights[:, :1]
    for column in range(1, weights.shape[1]):
        total = total + weights[:, column : column + 1]
    return total

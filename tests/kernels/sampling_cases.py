"""Rows with sampling parameters, for the definitions in `penstock.runner.sampling` and for the kernels, and
parameter types of the kernels for the compiler."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch

from penstock.kernels.triton.sampling.draw import sample
from penstock.kernels.triton.sampling.tiles import SamplingTables, Workspace
from penstock.messages.requests import EngineRequest
from penstock.messages.sampling_params import SamplingParams
from penstock.runner.cpu import sampler
from penstock.runner.sampling.batch import SamplingBatch
from penstock.runner.sampling.noise import Purpose
from tests.kernels.gpu_compiler import KernelCost, compile_for_gpu

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_REQS = 12

POINTERS = {
    "drafts_ptr": "*i64",
    "accept_ptr": "*fp64",
    "resample_ptr": "*fp64",
    "out_ptr": "*i64",
    "rows_ptr": "*i64",
    "positions_ptr": "*i64",
    "seed_ptr": "*i64",
    "top_k_ptr": "*i32:16",
    "tile_best_ptr": "*i32:16",
    "cut_count_ptr": "*i32:16",
    "num_candidates_ptr": "*i32:16",
    "token_ids_ptr": "*i64",
    "verdicts_ptr": "*i8",
} | dict.fromkeys(
    (
        "target_ptr",
        "draft_ptr",
        "temperature_ptr",
        "top_p_ptr",
        "log_min_p_ptr",
        "threshold_ptr",
        "tile_max_ptr",
        "tile_sum_ptr",
        "cut_sum_ptr",
        "candidates_ptr",
    ),
    "*fp32:16",
)
CONSTEXPRS = {"vocab": 151_936, "stride": 151_936, "tile": 4096, "num_tiles": 38, "all_tiles": 64, "num_cuts": 8}
CONSTEXPRS |= {"capacity": 8192, "small": 1024, "purpose": 0, "truncates": True}


def compile_sampling(
    module: str, kernel: str, signature: dict[str, str], constexprs: dict[str, Any], num_warps: int
) -> KernelCost:
    """Compiles a kernel with those of the parameters that it has."""
    path = f"penstock.kernels.triton.sampling.{module}"
    names = inspect.signature(getattr(importlib.import_module(path), kernel).fn).parameters
    own = [{name: value for name, value in table.items() if name in names} for table in (signature, constexprs)]
    return compile_for_gpu(path, kernel, *own, num_warps=num_warps)


class Case:
    """Sampling parameters of some rows: a batch for the reference, and tables of state rows for the kernels."""

    def __init__(self, params: Sequence[dict[str, Any]]) -> None:
        self.rows = torch.randperm(MAX_REQS)[: len(params)]
        self.positions = torch.randint(5, 5000, (len(params),))
        known = SamplingParams(max_tokens=None)
        every = [SamplingParams(max_tokens=None, **each) for each in params]
        seeds = [7919 * (row + 1) for row in self.rows.tolist()]
        requests = [
            EngineRequest(
                request_id=str(index), prompt_token_ids=(1,), sampling_params=each, max_tokens=9, seed=seeds[index]
            )
            for index, each in enumerate(every)
        ]
        tokens = torch.zeros((MAX_REQS, 8), dtype=torch.int32)
        self.batch = SamplingBatch(requests, self.positions.cpu().numpy(), self.rows, self.positions, tokens, {})
        by_row = dict(zip(self.rows.tolist(), every, strict=True))
        padded = [by_row.get(row, known) for row in range(MAX_REQS)]
        self.tables = SamplingTables(
            temperature=torch.tensor([each.temperature for each in padded]),
            top_k=torch.tensor([each.top_k for each in padded], dtype=torch.int32),
            top_p=torch.tensor([each.top_p for each in padded]),
            log_min_p=torch.tensor([math.log(each.min_p) if each.min_p else -math.inf for each in padded]),
            seed=torch.tensor([7919 * (row + 1) for row in range(MAX_REQS)]),
        )
        self.truncates = any(each.top_k or each.top_p < 1 or each.min_p for each in every)

    def sample(self, logits: torch.Tensor, num_padding: int = 0) -> tuple[torch.Tensor, torch.Tensor, Workspace]:
        """Samples with a workspace that was full of NaN; returns token_ids, verdicts and the workspace."""
        count = len(logits)
        workspace = Workspace.allocate(count, logits.shape[1], logits.device)
        for tensor in (workspace.tile_max, workspace.tile_sum, workspace.threshold, workspace.cut_sum):
            tensor.fill_(math.nan)
        rows = self.rows[:count].clone()
        rows[count - num_padding :] = -1
        token_ids, verdicts = torch.full((count,), -9), torch.full((count,), 9, dtype=torch.int8)
        sample(
            logits,
            rows,
            self.positions[:count],
            self.tables,
            workspace,
            int(Purpose.SAMPLE),
            self.truncates,
            token_ids,
            verdicts,
        )
        return token_ids, verdicts, workspace

    def alone(self, index: int) -> Case:
        """Returns a case with only this row."""
        case = Case([])
        case.tables, case.truncates = self.tables, self.truncates
        case.rows, case.positions = self.rows[index : index + 1], self.positions[index : index + 1]
        return case

    def kept(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns [n, vocab_size] logits as truncated by the reference."""
        scaled = logits.to(torch.float32, copy=True)
        sampler.scale_and_truncate(scaled, self.batch)
        return scaled > -math.inf

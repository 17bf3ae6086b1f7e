"""Drafts drawn and verified by Triton (`penstock.runner.speculation.verifier` defines the verifiers).

No launch depends on the CPU's knowledge of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from penstock.kernels.triton.sampling.draw import sample
from penstock.kernels.triton.sampling.rejection import KeptDrafts, Residuals, accept_or_resample, keep_drafts
from penstock.kernels.triton.sampling.tiles import SamplingTables, Workspace
from penstock.kernels.triton.sampling.verify import toss, verify
from penstock.runner.gpu.sampling.adjuster import Bitmasks
from penstock.runner.sampling.noise import Purpose
from penstock.runner.speculation.draft import Pick
from penstock.runner.speculation.speculator import StepResult
from penstock.runner.speculation.verifier import SampledStep


@dataclass(frozen=True, slots=True)
class GpuSampledStep(SampledStep):
    """Includes the logits that the tokens were drawn from."""

    logits: torch.Tensor  # [num_logits, vocab_size], adjusted
    truncates: bool  # as in `draw.sample`
    bitmasks: Bitmasks


class ExactVerifier:
    """`drafts` [max_num_reqs, max_num_drafts] int64, -1 a gap."""

    def __init__(self, drafts: torch.Tensor) -> None:
        self._drafts = drafts

    def verify(self, step: GpuSampledStep) -> None:
        tensors, counts = step.batch.tensors, (step.num_accepted, step.num_real_drafts)
        verify(step.token_ids, self._drafts, tensors.idx_mapping, tensors.windows, *counts)


class RejectionVerifier:
    """`workspace` is the sampler's."""

    def __init__(self, drafts: torch.Tensor, kept: KeptDrafts, tables: SamplingTables, workspace: Workspace) -> None:
        self._exact = ExactVerifier(drafts)
        self._drafts = drafts
        self._kept = kept
        self._tables = tables
        self._workspace = workspace
        self._residuals = Residuals.allocate(kept)

    def verify(self, step: GpuSampledStep) -> None:
        tensors, purposes = step.batch.tensors, (int(Purpose.ACCEPT), int(Purpose.RESAMPLE))
        drawn = (self._drafts, self._kept, self._tables, self._workspace, step.truncates, purposes)
        out = (tensors.idx_mapping, tensors.windows, self._residuals, step.token_ids)
        accept_or_resample(step.logits, tensors.logits_positions, *drawn, *out)
        self._exact.verify(step)


class SyntheticVerifier:
    """`seed` is the table of the rows' seeds."""

    def __init__(self, drafts: torch.Tensor, rates: Sequence[float], seed: torch.Tensor) -> None:
        self._drafts = drafts
        self._rates = torch.tensor(rates, dtype=torch.float64, device=drafts.device)
        self._seed = seed

    def verify(self, step: GpuSampledStep) -> None:
        tensors, bitmasks = step.batch.tensors, step.bitmasks
        drawn = (self._drafts, self._seed, self._rates, int(Purpose.ACCEPT), bitmasks.mask_of_row, bitmasks.masks)
        out = (tensors.idx_mapping, tensors.windows, step.num_accepted, step.num_real_drafts)
        toss(step.token_ids, tensors.logits_positions, *drawn, *out)


class DrawingPicker:
    """`SamplingPicker`: the table of temperatures says whether a row is greedy.

    `workspace` may be the step sampler's, which no longer uses it when drafts are picked.
    """

    is_capturable = True

    def __init__(self, tables: SamplingTables, workspace: Workspace, kept: KeptDrafts) -> None:
        self._tables = tables
        self._workspace = workspace
        self._kept = kept

    def of_step(self, step: StepResult) -> Pick:
        tables, workspace, rows = self._tables, self._workspace, step.rows

        def pick(logits: torch.Tensor, place: int) -> torch.Tensor:
            drafts = torch.empty_like(rows)
            verdicts = torch.empty_like(rows, dtype=torch.int8)
            positions = step.num_computed_exact + (1 + place)
            sample(logits, rows, positions, tables, workspace, int(Purpose.DRAFT), False, drafts, verdicts)
            keep_drafts(logits, rows, place, tables.temperature, workspace, self._kept)
            return drafts

        return pick

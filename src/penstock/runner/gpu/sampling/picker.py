"""Drafts drawn on the device (`Picker`): the launches here do not depend on the CPU's knowledge of the step."""

from __future__ import annotations

import torch

from penstock.kernels.triton.sampling.draw import sample
from penstock.kernels.triton.sampling.rejection import KeptDrafts, keep_drafts
from penstock.kernels.triton.sampling.tiles import SamplingTables, Workspace
from penstock.runner.sampling.noise import Purpose
from penstock.runner.speculation.pick import Pick
from penstock.runner.speculation.speculator import StepResult


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

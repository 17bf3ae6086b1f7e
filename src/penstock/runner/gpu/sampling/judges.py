"""Which drafts were right, on the device: what `penstock.runner.speculation` defines by its verifiers.

A `Judge` is called after a token has been sampled for every row of the logits. Lifecycle: one is chosen and built with
the runner. Threading: the runner's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from penstock.kernels.triton.sampling.rejection import KeptDrafts, Residuals, accept_or_resample
from penstock.kernels.triton.sampling.tiles import SamplingTables, Workspace
from penstock.kernels.triton.sampling.verify import toss, verify
from penstock.runner.gpu.sampling.adjuster import Bitmasks
from penstock.runner.input_batch import InputBatch
from penstock.runner.sampling.noise import Purpose


@dataclass(frozen=True, slots=True)
class Sampled:
    """A step whose tokens have been sampled as if there were no drafts."""

    batch: InputBatch
    logits: torch.Tensor  # [num_logits, vocab_size], adjusted: what was drawn from
    truncates: bool  # as in `draw.sample`
    bitmasks: Bitmasks
    token_ids: torch.Tensor  # [num_logits] int64
    num_accepted: torch.Tensor  # [num_reqs] int64
    num_real_drafts: torch.Tensor  # [num_reqs] int64: verified drafts before the first gap


class Judge(Protocol):
    def judge(self, sampled: Sampled) -> None:
        """Writes both counts of `sampled`, and its tokens where a draft or what takes its place was not sampled."""
        ...


class ExactJudge:
    """`ExactVerifier`. `drafts` [max_num_reqs, max_num_drafts] int64, -1 a gap."""

    def __init__(self, drafts: torch.Tensor) -> None:
        self._drafts = drafts

    def judge(self, sampled: Sampled) -> None:
        step, counts = sampled.batch.tensors, (sampled.num_accepted, sampled.num_real_drafts)
        verify(sampled.token_ids, self._drafts, step.idx_mapping, step.windows, *counts)


class RejectionJudge:
    """`RejectionVerifier`. `workspace` is that of the sampling."""

    def __init__(self, drafts: torch.Tensor, kept: KeptDrafts, tables: SamplingTables, workspace: Workspace) -> None:
        self._exact = ExactJudge(drafts)
        self._drafts = drafts
        self._kept = kept
        self._tables = tables
        self._workspace = workspace
        self._residuals = Residuals.allocate(kept)

    def judge(self, sampled: Sampled) -> None:
        step = sampled.batch.tensors
        accept_or_resample(
            sampled.logits,
            step.logits_positions,
            self._drafts,
            self._kept,
            self._tables,
            self._workspace,
            sampled.truncates,
            (int(Purpose.ACCEPT), int(Purpose.RESAMPLE)),
            step.idx_mapping,
            step.windows,
            self._residuals,
            sampled.token_ids,
        )
        self._exact.judge(sampled)


class SyntheticJudge:
    """`SyntheticVerifier`. `seed` is the table of the rows' seeds."""

    def __init__(self, drafts: torch.Tensor, rates: Sequence[float], seed: torch.Tensor) -> None:
        self._drafts = drafts
        self._rates = torch.tensor(rates, dtype=torch.float64, device=drafts.device)
        self._seed = seed

    def judge(self, sampled: Sampled) -> None:
        step, bitmasks = sampled.batch.tensors, sampled.bitmasks
        toss(
            sampled.token_ids,
            step.logits_positions,
            self._drafts,
            self._seed,
            self._rates,
            int(Purpose.ACCEPT),
            bitmasks.mask_of_row,
            bitmasks.masks,
            step.idx_mapping,
            step.windows,
            sampled.num_accepted,
            sampled.num_real_drafts,
        )

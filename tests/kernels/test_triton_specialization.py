"""No step compiles: one variant of each kernel serves every number of rows and every slice of a buffer."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from penstock.kernels.triton.ngram import propose_ngrams
from penstock.kernels.triton.prepare_inputs import (
    SamplingInputs,
    StepInputs,
    finish_step,
    prepare_inputs,
    prepare_sampling,
    prepare_states,
)
from penstock.kernels.triton.rms_norm import add_rms_norm, rms_norm
from penstock.kernels.triton.rope_and_store_kv import rope_and_store_kv
from penstock.kernels.triton.sampling.adjust import (
    PENALTY_COLUMNS,
    RULE_COLUMNS,
    AdjustTables,
    adjust_logits,
    count_tokens,
)
from penstock.kernels.triton.sampling.draw import sample
from penstock.kernels.triton.sampling.logprobs import RECORD, LogprobsWorkspace, score_tokens
from penstock.kernels.triton.sampling.rejection import KeptDrafts, Residuals, accept_or_resample, keep_drafts
from penstock.kernels.triton.sampling.tiles import SamplingTables, Workspace
from penstock.kernels.triton.sampling.verify import toss, verify
from penstock.kernels.triton.silu_and_mul import silu_and_mul
from penstock.kernels.triton.staged_writes import scatter_staged
from tests.kernels.launch_recorder import variants_of

MAX_REQS, VOCAB, MAX_BLOCKS, LONGEST, NUM_DRAFTS = 64, 9000, 700, 9999, 5


def test_one_variant_serves_every_step() -> None:
    first, *later = variants_of("tests.kernels.test_triton_specialization", "steps")
    assert len(first) >= 28
    assert set(first) >= {"_prepare_inputs", "_finish_step", "_scatter_staged", "_select", "_pick_token", "_verify"}
    assert later == [[]] * len(later)


def steps() -> Iterator[None]:
    """Yields after each of several steps of different sizes at different places in their buffers."""
    buffers = _Buffers()
    for num_tokens, num_reqs, offset in ((16, 2, 0), (1, 1, 1), (17, 9, 2), (32, 16, 0), (13, 13, 3)):
        _forward(buffers, num_tokens, num_reqs, offset)
        _sample(buffers, num_reqs, offset)
        yield


class _Buffers:
    def __init__(self) -> None:
        def floats(value: float) -> torch.Tensor:
            return torch.full((MAX_REQS,), value)

        self.wide = [torch.zeros(100, dtype=torch.int64) for _ in range(6)]
        self.narrow = [torch.zeros(100, dtype=torch.int32) for _ in range(2)]
        self.tables = SamplingTables(floats(1.0), floats(0.0).int(), floats(1.0), floats(0.0), floats(0.0).long())
        self.adjust = AdjustTables(
            torch.zeros((MAX_REQS, RULE_COLUMNS), dtype=torch.int64), torch.zeros((MAX_REQS, PENALTY_COLUMNS))
        )
        self.num_top = torch.zeros((MAX_REQS, 1), dtype=torch.int32)
        self.drafts = torch.zeros((MAX_REQS, NUM_DRAFTS), dtype=torch.int64)
        self.kept = KeptDrafts.around(torch.zeros((MAX_REQS, NUM_DRAFTS, VOCAB)))
        self.workspace = Workspace.allocate(MAX_REQS, VOCAB, torch.device("cpu"))
        self.token_ids = torch.zeros((MAX_REQS, LONGEST), dtype=torch.int32)
        self.num_computed = torch.zeros((MAX_REQS, 1), dtype=torch.int64)
        self.blocks = torch.zeros((1, MAX_REQS, MAX_BLOCKS), dtype=torch.int32)
        self.gathered = torch.zeros_like(self.blocks)
        self.slots = torch.zeros((1, 100), dtype=torch.int64)
        self.cache = torch.zeros((8, 2, 2, 16, 128), dtype=torch.bfloat16)


def _forward(buffers: _Buffers, num_tokens: int, num_reqs: int, offset: int) -> None:
    tokens, reqs = slice(offset, offset + num_tokens), slice(offset, offset + num_reqs)
    starts = buffers.narrow[1][offset : offset + num_reqs + 1]
    positions, slots = buffers.wide[1][tokens], buffers.slots[:, tokens]
    out = StepInputs(
        buffers.wide[0][tokens],
        positions,
        buffers.wide[2][tokens],
        buffers.narrow[0][reqs],
        buffers.gathered[:, reqs],
        slots,
    )
    rows = buffers.wide[3][reqs]
    prepare_inputs(rows, starts, buffers.num_computed, buffers.token_ids, buffers.blocks, 16, out)
    logits_rows = SamplingInputs(*(buffer[reqs] for buffer in (buffers.wide[0], buffers.wide[2], buffers.wide[4])))
    prepare_sampling(rows, starts, starts, out.seq_lens, logits_rows)
    prepare_states(rows, starts, starts, buffers.num_computed, buffers.num_computed, out.seq_lens, out.seq_lens)
    finish_step(
        buffers.wide[4], starts, buffers.wide[5][reqs], rows, out.seq_lens, buffers.num_computed, buffers.token_ids
    )
    scatter_staged(torch.zeros((num_tokens, 2), dtype=torch.int64))
    x, weight = torch.zeros((num_tokens, 1024), dtype=torch.bfloat16), torch.ones(1024, dtype=torch.bfloat16)
    rms_norm(x, weight, 1e-6)
    add_rms_norm(x, torch.zeros_like(x), weight, 1e-6)
    silu_and_mul(x)
    rope_and_store_kv(x, 4, 2, torch.zeros(9, 128), positions, buffers.cache, slots[0], weight[:128], weight[:128])


def _sample(buffers: _Buffers, num_reqs: int, offset: int) -> None:
    reqs = slice(offset, offset + num_reqs)
    rows, positions, token_ids = (buffer[reqs] for buffer in buffers.wide[:3])
    tables, workspace = buffers.tables, buffers.workspace
    verdicts = torch.zeros(100, dtype=torch.int8)[reqs]
    records = torch.zeros((100, RECORD), dtype=torch.int32)[reqs]
    scratch = LogprobsWorkspace.allocate(num_reqs, VOCAB, torch.device("cpu"))
    logits = torch.zeros((num_reqs, VOCAB))
    counts, bitmasks = torch.zeros((100, VOCAB), dtype=torch.int32), torch.zeros((num_reqs, 300), dtype=torch.int32)
    count_tokens(rows, positions, buffers.token_ids, LONGEST, buffers.adjust, counts)
    for each in (logits, logits.bfloat16()):
        for mask_of_row in (buffers.narrow[0][:0], buffers.narrow[0][reqs]):
            adjust_logits(
                each, rows, positions, buffers.token_ids, buffers.adjust, counts, mask_of_row, bitmasks, logits
            )
        for truncates in (False, True):
            sample(each, rows, positions, tables, workspace, 0, truncates, token_ids, verdicts)
        score_tokens(each, rows, buffers.num_top, token_ids, scratch, True, records)
    _verify(buffers, logits, bitmasks, offset)


def _verify(buffers: _Buffers, logits: torch.Tensor, bitmasks: torch.Tensor, offset: int) -> None:
    reqs = slice(offset, offset + len(logits))
    rows, positions, token_ids = (buffer[reqs] for buffer in buffers.wide[:3])
    tables, workspace, kept = buffers.tables, buffers.workspace, buffers.kept
    starts = buffers.narrow[0][offset : offset + len(logits) + 1]
    counts = (buffers.wide[4][reqs], buffers.wide[5][reqs])
    for place in range(NUM_DRAFTS):
        keep_drafts(logits, rows, place, tables.temperature, workspace, kept)
    accept_or_resample(
        logits, positions, buffers.drafts, kept, tables, workspace, True, (2, 3), rows, starts,
        Residuals.allocate(kept), token_ids,
    )  # fmt: skip
    rates = torch.zeros(NUM_DRAFTS, dtype=torch.float64)
    toss(
        token_ids, positions, buffers.drafts, tables.seed, rates, 2, buffers.narrow[0][reqs], bitmasks, rows, starts,
        *counts,
    )  # fmt: skip
    verify(buffers.wide[3], buffers.drafts, rows, starts, *counts)
    propose_ngrams(buffers.token_ids, rows, positions, 2, 5, torch.zeros((len(rows), 4), dtype=torch.int64))

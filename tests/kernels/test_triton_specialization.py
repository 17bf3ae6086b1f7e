"""No step compiles: one variant of each kernel serves every number of rows and every slice of a buffer."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from penstock.kernels.triton.prepare_inputs import (
    SamplingInputs,
    StepInputs,
    finish_step,
    prepare_inputs,
    prepare_sampling,
)
from penstock.kernels.triton.rms_norm import add_rms_norm, rms_norm
from penstock.kernels.triton.rope_and_store_kv import rope_and_store_kv
from penstock.kernels.triton.sampling.draw import sample
from penstock.kernels.triton.sampling.logprobs import chosen_logprobs
from penstock.kernels.triton.sampling.noise import uniform
from penstock.kernels.triton.sampling.penalties import PenaltyTables, apply_bitmask, apply_penalties
from penstock.kernels.triton.sampling.tiles import SamplingTables, Workspace
from penstock.kernels.triton.sampling.verify import accept_or_resample, verify
from penstock.kernels.triton.silu_and_mul import silu_and_mul
from penstock.kernels.triton.staged_writes import scatter_staged
from tests.kernels.launch_recorder import variants_of

MAX_REQS, VOCAB, MAX_BLOCKS, LONGEST = 64, 9000, 700, 9999


def test_one_variant_serves_every_step() -> None:
    first, *later = variants_of("tests.kernels.test_triton_specialization", "steps")
    assert len(first) >= 18
    assert set(first) >= {"_prepare_inputs", "_finish_step", "_scatter_staged", "_select", "_pick_token", "_verify"}
    assert later == [[]] * len(later)


def steps() -> Iterator[None]:
    """Yields after each of some steps whose sizes and places in their buffers have nothing in common."""
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
        self.penalties = PenaltyTables(floats(1.0), floats(0.0), floats(0.0), floats(0.0).long())
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
    is_valid = torch.zeros(100, dtype=torch.bool)[reqs]
    logits = torch.zeros((num_reqs, VOCAB))
    for each in (logits, logits.bfloat16()):
        for truncates in (False, True):
            sample(each, rows, positions, buffers.tables, buffers.workspace, 0, truncates, token_ids, is_valid)
        chosen_logprobs(each, token_ids)
    apply_penalties(logits, rows, positions, buffers.token_ids, buffers.penalties)
    apply_bitmask(logits, rows, torch.zeros((num_reqs, 300), dtype=torch.int32))
    uniforms = [uniform(buffers.tables.seed, rows, positions, 2) for _ in range(2)]
    accept_or_resample(logits, logits, token_ids, *uniforms)
    drafts = torch.zeros((MAX_REQS, 5), dtype=torch.int64)
    starts = buffers.narrow[0][offset : offset + num_reqs + 1]
    verify(buffers.wide[3], drafts, rows, starts, buffers.wide[4][reqs], buffers.wide[5][reqs])

"""Compares drawing, keeping and verifying drafts in Triton, also with synthetic acceptance, with
`penstock.runner.cpu.drafts`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from penstock.kernels.triton.sampling.draw import sample
from penstock.kernels.triton.sampling.rejection import KeptDrafts, Residuals, accept_or_resample, keep_drafts
from penstock.kernels.triton.sampling.tiles import Workspace
from penstock.kernels.triton.sampling.verify import toss
from penstock.runner.cpu import sampler
from penstock.runner.cpu.drafts import SyntheticVerifier
from penstock.runner.cpu.drafts import accept_or_resample as accept_or_resample_reference
from penstock.runner.sampling.batch import SamplingBatch
from penstock.runner.sampling.noise import Purpose, uniform
from tests.kernels.sampling_cases import CONSTEXPRS, MAX_REQS, POINTERS, Case, compile_sampling
from tests.verified_steps import verified_step

NUM_DRAFTS = 3
PURPOSES = (int(Purpose.ACCEPT), int(Purpose.RESAMPLE))

# The interpreter's numpy warns of infinity minus infinity, which a mask then drops, and of NaN; a GPU does not.
pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value encountered"),
    pytest.mark.filterwarnings("ignore:All-NaN slice encountered"),
]


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    """Puts tensors, and thereby the kernels, on the GPU if there is one."""
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        yield


class Windows:
    """Requests in windows of several lengths, the last one padding, whose drafts were drawn on the device."""

    def __init__(self, params: Sequence[dict[str, Any]], draft_logits: torch.Tensor) -> None:
        """`draft_logits` [len(params), NUM_DRAFTS, vocab_size]."""
        self.case = Case(params)
        count, vocab_size = len(params), draft_logits.shape[2]
        self.first = self.case.positions
        self.drafts = torch.zeros((MAX_REQS, NUM_DRAFTS), dtype=torch.int64)
        self.kept = KeptDrafts.around(
            torch.full((MAX_REQS, NUM_DRAFTS, vocab_size), math.nan, dtype=draft_logits.dtype)
        )
        self.workspace = Workspace.allocate(MAX_REQS * (NUM_DRAFTS + 1), vocab_size, draft_logits.device)
        tables = self.case.tables
        for place in range(NUM_DRAFTS):
            logits, found = draft_logits[:, place].contiguous(), torch.full((count,), -9)
            verdicts, purpose = torch.zeros(count, dtype=torch.int8), int(Purpose.DRAFT)
            where = (self.case.rows, self.first + place)
            sample(logits, *where, tables, self.workspace, purpose, False, found, verdicts)
            keep_drafts(logits, self.case.rows, place, tables.temperature, self.workspace, self.kept)
            self.drafts[self.case.rows, place] = found
        self.num_drafts = np.array([(3, 1, 0, 2)[index % 4] for index in range(count)])
        widths = torch.tensor(self.num_drafts + 1)
        self.request = torch.repeat_interleave(torch.arange(count), widths)
        starts = widths.cumsum(0) - widths
        self.place = torch.arange(len(self.request)) - starts[self.request]
        self.positions = self.first[self.request] + self.place
        self.logits_rows = self.case.rows[self.request]
        self.rows = torch.cat((self.case.rows, torch.tensor([-1])))
        self.starts = torch.cat((torch.tensor([0]), widths.cumsum(0), widths.sum()[None])).int()

    @property
    def batch(self) -> SamplingBatch:
        requests = [self.case.batch.requests[i] for i in self.request.tolist()]
        tokens = self.case.batch.token_ids
        return SamplingBatch(requests, self.positions.cpu().numpy(), self.logits_rows, self.positions, tokens, {})

    def verify(self, target: torch.Tensor) -> torch.Tensor:
        """Returns [num_logits] int64 tokens; those of rows without a draft are the sampled ones."""
        token_ids, tables = torch.full((len(target),), -9), self.case.tables
        verdicts, truncates = torch.zeros(len(target), dtype=torch.int8), self.case.truncates
        where = (self.logits_rows, self.positions)
        sample(target, *where, tables, self.workspace, int(Purpose.SAMPLE), truncates, token_ids, verdicts)
        residuals = Residuals.allocate(self.kept)
        for tensor in (residuals.sums, residuals.whole):
            tensor.fill_(math.nan)
        accept_or_resample(
            target,
            self.positions,
            self.drafts,
            self.kept,
            tables,
            self.workspace,
            truncates,
            PURPOSES,
            self.rows,
            self.starts,
            residuals,
            token_ids,
        )
        return token_ids

    def verify_by_torch(self, target: torch.Tensor, draft_logits: torch.Tensor) -> torch.Tensor:
        batch = self.batch
        tokens = sampler.sample(target, batch).token_ids
        probs = torch.zeros(target.shape)
        found = sampler.distributions(target, batch)
        probs[found.random_rows] = found.probs
        is_drafted = self.place < torch.tensor(self.num_drafts)[self.request]
        for index in torch.nonzero(is_drafted)[:, 0].tolist():
            request, place = int(self.request[index]), int(self.place[index])
            if batch.requests[index].sampling_params.is_greedy:
                continue
            q = (draft_logits[request, place].float() / batch.temperatures([index])[0]).softmax(-1)
            noise = [batch.noise([index], purpose) for purpose in (Purpose.ACCEPT, Purpose.RESAMPLE)]
            draft = self.drafts[self.logits_rows[index], place][None]
            tokens[index] = accept_or_resample_reference(probs[index][None], q[None], draft, *noise)[0]
        return tokens


PARAMS = ({"temperature": 1.0}, {"temperature": 0.0}, {"temperature": 0.6}, {"temperature": 1.7})
TRUNCATED = ({"temperature": 1.0, "top_k": 4}, {"temperature": 0.0}, {"temperature": 0.6, "top_p": 0.8, "min_p": 0.01})


@pytest.mark.spread(1)
@pytest.mark.parametrize("params", [PARAMS, TRUNCATED], ids=["plain", "truncated"])
@pytest.mark.parametrize(("vocab_size", "dtype"), [(5, torch.float32), (9001, torch.bfloat16)])
def test_tokens_equal_those_of_the_reference(
    params: Sequence[dict[str, Any]], vocab_size: int, dtype: torch.dtype
) -> None:
    num_taken = num_replaced = 0
    for _ in range(2 if vocab_size == 5 else 1):
        drafter = (2 * torch.randn(MAX_REQS, NUM_DRAFTS, vocab_size)).to(dtype)
        windows = Windows([params[index % len(params)] for index in range(MAX_REQS)], drafter)
        near = drafter[windows.request, windows.place.clamp(max=NUM_DRAFTS - 1)].float()
        target = near + 0.7 * torch.randn(len(windows.request), vocab_size)
        found = windows.verify(target)
        assert found.tolist() == windows.verify_by_torch(target, drafter).tolist()
        drafts = windows.drafts[windows.logits_rows, windows.place.clamp(max=NUM_DRAFTS - 1)]
        is_drafted = windows.place < torch.tensor(windows.num_drafts)[windows.request]
        num_taken += int((is_drafted & (found == drafts)).sum())
        num_replaced += int((is_drafted & (found != drafts)).sum())
    assert num_taken > 2
    assert num_replaced > 0


def test_drafts_are_drawn_with_their_own_noise() -> None:
    logits = 2 * torch.randn(MAX_REQS, NUM_DRAFTS, 9001)
    windows = Windows([PARAMS[index % 4] for index in range(MAX_REQS)], logits)
    for index, request in enumerate(windows.case.batch.requests):
        row = windows.case.rows[index]
        for place in range(NUM_DRAFTS):
            if request.sampling_params.is_greedy:
                expected = int(logits[index, place].argmax())
                assert windows.kept.logits[row, place].isnan().all(), "logits of greedy rows are not kept"
            else:
                position = np.array([int(windows.first[index]) + place])
                noise = torch.tensor(uniform([request.seed], position, Purpose.DRAFT))
                probs = (logits[index, place] / windows.case.batch.temperatures([index])[0]).softmax(-1)
                expected = int(sampler.draw(probs[None], noise)[0])
                assert torch.equal(windows.kept.logits[row, place], logits[index, place])
            assert int(windows.drafts[row, place]) == expected


@pytest.mark.long
def test_drafts_of_the_target_itself_are_always_accepted() -> None:
    for _ in range(2):
        drafter = torch.randn(MAX_REQS, NUM_DRAFTS, 5000)
        windows = Windows([{"temperature": 0.3 + index % 3} for index in range(MAX_REQS)], drafter)
        place = windows.place.clamp(max=NUM_DRAFTS - 1)
        found = windows.verify(drafter[windows.request, place])
        is_drafted = windows.place < torch.tensor(windows.num_drafts)[windows.request]
        assert torch.equal(found[is_drafted], windows.drafts[windows.logits_rows, place][is_drafted])


@pytest.mark.long
def test_nan_logits_and_gaps() -> None:
    drafter = torch.randn(MAX_REQS, NUM_DRAFTS, 300)
    windows = Windows([{"temperature": 1.0}] * MAX_REQS, drafter)
    target = torch.randn(len(windows.request), 300)
    windows.kept.tile_max.fill_(math.nan)
    windows.kept.logits.fill_(math.nan)
    # No draft with logits of NaN is accepted, and the replacement is drawn from the target alone.
    found = windows.verify(target)
    assert found.tolist() == windows.verify_by_torch(target, torch.full_like(drafter, math.nan)).tolist()
    # A target of NaN gives some token of the vocabulary.
    found = windows.verify(torch.full_like(target, math.nan))
    assert ((found >= 0) & (found < 300)).all()
    # A gap gets the sampled token.
    windows.drafts.fill_(-1)
    assert torch.equal(windows.verify(target), sampler.sample(target, windows.batch).token_ids)


@pytest.mark.spread(1)
@pytest.mark.parametrize("rates", [(0.8, 0.5, 0.3), (0.0, 1.0, 1.0), (1.0, 1.0, 1.0)])
def test_synthetic_acceptance(rates: tuple[float, ...]) -> None:
    vocab_size = 70
    windows = Windows([{"temperature": 1.0}] * MAX_REQS, torch.randn(MAX_REQS, NUM_DRAFTS, vocab_size))
    windows.drafts[windows.case.rows[0], 1] = -1
    count = len(windows.request)
    masks = np.random.default_rng(0).integers(-(2**31), 2**31, (3, 3)).astype(np.int32)
    batch, logits = windows.batch, torch.randn(count, vocab_size)
    for bitmasks in ({}, {0: masks[0], 2: masks[1], 5: masks[2]}):
        batch = SamplingBatch(
            batch.requests, batch.positions_np, batch.rows, batch.positions, batch.token_ids, bitmasks
        )
        verifier = SyntheticVerifier(windows.drafts, rates)
        expected = verified_step(verifier, logits, batch, windows.case.rows, windows.num_drafts)
        token_ids = sampler.sample(logits, batch).token_ids
        mask_of_row = torch.full((count if bitmasks else 0,), -1, dtype=torch.int32)
        for number, index in enumerate(bitmasks):
            mask_of_row[index] = number
        counts = torch.full((2, len(windows.rows)), -9)
        toss(
            token_ids,
            windows.positions,
            windows.drafts,
            windows.case.tables.seed,
            torch.tensor(rates, dtype=torch.float64),
            int(Purpose.ACCEPT),
            mask_of_row,
            torch.tensor(masks),
            windows.rows,
            windows.starts,
            *counts,
        )
        assert token_ids.tolist() == expected.token_ids.tolist()
        assert counts[0].tolist() == [*expected.num_accepted.tolist(), 0]
        assert counts[1].tolist() == [*expected.num_real_drafts.tolist(), 0]


@pytest.mark.long
@pytest.mark.parametrize(("kernel", "num_warps"), [("_keep_drafts", 4), ("_sum_residuals", 8), ("_replace", 8)])
def test_nothing_spills(kernel: str, num_warps: int) -> None:
    signature = POINTERS | {
        "logits_ptr": "*fp32:16",
        "kept_ptr": "*bf16:16",
        "starts_ptr": "*i32",
        "drafts_ptr": "*i64:16",
        "kept_max_ptr": "*fp32:16",
        "kept_sum_ptr": "*fp32:16",
        "residual_ptr": "*fp64:16",
        "whole_ptr": "*fp64:16",
        "place": "i32",
    }
    if kernel == "_keep_drafts":
        signature["logits_ptr"] = "*bf16:16"
    constexprs = CONSTEXPRS | {"max_num_drafts": 3, "accept_purpose": 2, "resample_purpose": 3}
    cost = compile_sampling("rejection", kernel, signature, constexprs, num_warps)
    assert cost.spilled_bytes == 0
    assert cost.registers <= 200
    assert cost.shared_bytes <= 48 * 1024
    assert "ld.global.v4" in cost.ptx, "16 bytes at a time"

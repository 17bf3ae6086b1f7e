"""Compares sampling in Triton with the definitions in `penstock.runner.sampling`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels.triton.sampling.noise import uniform_of
from penstock.kernels.triton.sampling.tiles import Workspace
from penstock.kernels.triton.sampling.verify import verify
from penstock.runner.cpu import sampler
from penstock.runner.cpu.drafts import count_accepted
from penstock.runner.sampling.noise import Purpose, uniform
from tests.kernels.sampling_cases import CONSTEXPRS, DTYPES, MAX_REQS, POINTERS, Case, compile_sampling

# The interpreter's numpy warns of infinity minus infinity, which a mask then drops; a GPU does not.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered")


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    """Puts tensors, and thereby the kernels, on the GPU if there is one."""
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        yield


@triton.jit
def _uniform(seeds_ptr, positions_ptr, out_ptr, purpose: tl.constexpr):
    place = tl.program_id(0)
    tl.store(out_ptr + place, uniform_of(tl.load(seeds_ptr + place), tl.load(positions_ptr + place), purpose))


@settings(max_examples=60)
@given(
    seeds=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=300),
    purpose=st.sampled_from(list(Purpose)),
    data=st.data(),
)
def test_noise_equals_that_of_the_cpu(seeds: list[int], purpose: Purpose, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, 2**40))
    positions = torch.arange(first, first + len(seeds))
    found = torch.empty(len(seeds), dtype=torch.float64)
    _uniform[(len(seeds),)](torch.tensor(seeds), positions, found, int(purpose))
    assert np.array_equal(found.cpu().numpy(), uniform(seeds, positions.cpu().numpy(), purpose))


@pytest.mark.spread(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [7, 4096, 9001])
def test_greedy_and_random_rows_get_the_tokens_of_the_reference(dtype: torch.dtype, vocab_size: int) -> None:
    case = Case([{"temperature": (0.0, 0.3, 1.0, 2.5)[index % 4]} for index in range(8)])
    logits = (3 * torch.randn(8, vocab_size)).to(dtype)
    token_ids, verdicts, _ = case.sample(logits)
    expected = sampler.sample(logits, case.batch)
    assert token_ids.tolist() == expected.token_ids.tolist()
    assert not verdicts.any()
    for index in range(8):
        assert case.alone(index).sample(logits[index : index + 1])[0] == token_ids[index]


def test_greedy_takes_the_first_of_equal_logits() -> None:
    case = Case([{"temperature": 0.0}])
    logits = torch.zeros(1, 9001)
    for places in ([8000, 8999], [5000, 8000], [4095, 4096], [3, 4000]):
        logits[0, places] = 5.0
        assert case.sample(logits)[0].tolist() == [places[0]]


def test_rows_that_cannot_be_drawn_are_reported() -> None:
    case = Case(
        [{"temperature": float(k > 0 or t), "top_k": k} for t, k in ((0, 0), (1, 0), (1, 5), (0, 0), (1, 5), (1, 0))]
    )
    logits = torch.randn(6, 5000)
    logits[0, 4500] = logits[1, 17] = logits[2, 4999] = math.nan
    logits[3] = logits[4] = -math.inf
    logits[5, 4998] = math.inf
    token_ids, verdicts, workspace = case.sample(logits)
    assert verdicts.tolist() == [1, 1, 1, 2, 2, 1]
    assert ((token_ids >= 0) & (token_ids < 5000)).all()
    assert (workspace.threshold == -math.inf).all()


def test_padding_gets_token_0() -> None:
    case = Case([{"temperature": 1.0, "top_p": 0.5}] * 4)
    token_ids, verdicts, _ = case.sample(torch.full((4, 300), math.nan), num_padding=4)
    assert token_ids.tolist() == [0] * 4
    assert not verdicts.any()


def test_forbidden_tokens_are_never_drawn() -> None:
    case = Case([{"temperature": 5.0}] * 10)
    logits = torch.full((10, 9001), -math.inf)
    logits[:, [5, 6000, 9000]] = torch.tensor([-4e30, -1e30, -1e30])
    token_ids, verdicts, _ = case.sample(logits)
    assert set(token_ids.tolist()) == {6000, 9000}
    assert not verdicts.any()


TRUNCATIONS: tuple[dict[str, Any], ...] = (
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": 50, "temperature": 0.1},
    {"top_p": 0.9},
    {"top_p": 0.3, "temperature": 0.6},
    {"min_p": 0.05},
    {"top_k": 40, "top_p": 0.8},
    {"top_k": 40, "min_p": 0.2},
    {"top_p": 0.95, "min_p": 0.01},
    {"top_k": 30, "top_p": 0.7, "min_p": 0.02, "temperature": 1.7},
    {"top_k": 10**6, "top_p": 0.99},
    {},
)


def check_truncation(logits: torch.Tensor, params: Sequence[dict[str, Any]]) -> Workspace:
    return check_case(Case(params), logits)


def check_case(case: Case, logits: torch.Tensor) -> Workspace:
    token_ids, verdicts, workspace = case.sample(logits)
    scaled = logits.float() / case.batch.temperatures(range(len(logits)))
    kept = (scaled >= workspace.threshold[:, None]) & (scaled > -math.inf)
    is_random = torch.tensor([not each.sampling_params.is_greedy for each in case.batch.requests])
    assert torch.equal(kept[is_random], case.kept(logits)[is_random])
    assert not verdicts.any()
    expected = sampler.sample(logits, case.batch)
    assert token_ids.tolist() == expected.token_ids.tolist()
    return workspace


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("dtype", "vocab_size", "spread"),
    [(torch.float16, 100, 2.0), (torch.bfloat16, 9001, 3.0), (torch.float32, 9001, 0.5)],
)
def test_truncation_agrees_with_the_reference(dtype: torch.dtype, vocab_size: int, spread: float) -> None:
    check_truncation((spread * torch.randn(len(TRUNCATIONS), vocab_size)).to(dtype), TRUNCATIONS)


@pytest.mark.long
def test_truncation_of_random_rows() -> None:
    random = Random(0)
    for _ in range(6):
        params = [
            {
                "temperature": random.choice((0.0, 0.05, 0.7, 1.0, 3.0)),
                "top_k": random.choice((0, 1, 7, 60, 900)),
                "top_p": random.choice((1.0, 0.013, 0.37, 0.913, 0.9999)),
                "min_p": random.choice((0.0, 0.0, 0.031, 0.7)),
            }
            for _ in range(random.randint(1, 6))
        ]
        logits = random.choice((0.3, 3.0, 30.0)) * torch.randn(len(params), random.randint(1, 900))
        # Quarters make ties; some tokens are forbidden, but never all.
        logits = torch.where(torch.rand_like(logits) < random.choice((0.0, 0.9)), -math.inf, (4 * logits).round() / 4)
        logits[:, random.randrange(logits.shape[1])] = 1.0
        check_truncation(logits, params)


@pytest.mark.long
def test_flat_rows_exceed_the_capacity_and_are_still_exact() -> None:
    params = ({"top_p": 0.9}, {"top_k": 9000}, {"top_k": 8500, "top_p": 0.97}, {"top_p": 0.999, "min_p": 0.9})
    logits = torch.arange(9001).repeat(4, 1) * 1e-5
    workspace = check_truncation(logits[:, torch.randperm(9001)], params)
    assert (workspace.num_candidates < 0).all()


@pytest.mark.long
def test_candidates_of_many_tiles_are_packed_in_order() -> None:
    logits = torch.randn(2, 20_000)
    case = Case(({"top_k": 3}, {"top_k": 1500, "top_p": 0.9}))
    workspace = check_case(case, logits)
    small, large = workspace.num_candidates.tolist()
    assert 3 <= small <= 1024 < large <= 8192, "both code paths are used"
    for index, count in enumerate((small, large)):
        found = workspace.candidates[index, :count]
        assert torch.equal(found, logits[index][logits[index] >= found.min()])
        token_ids, _, own = case.alone(index).sample(logits[index : index + 1])
        assert own.threshold == workspace.threshold[index]
        assert torch.equal(own.tile_sum[0], workspace.tile_sum[index])
        assert token_ids == case.sample(logits)[0][index]


def test_equal_logits_are_kept_together() -> None:
    logits = torch.zeros(3, 5000)
    logits[:, :10] = 4.0
    logits[:, 10:400] = 3.0
    logits[:, 4000:] = -math.inf
    workspace = check_truncation(logits, ({"top_k": 11}, {"top_p": 0.04}, {"top_k": 4500}))
    assert workspace.threshold.tolist() == [3.0, 4.0, -math.inf]


def test_the_vocabulary_of_a_real_model() -> None:
    params = ({"temperature": 0.0}, {"temperature": 0.8}, {"top_k": 20, "top_p": 0.95, "temperature": 0.6})
    check_truncation((3 * torch.randn(3, 151_936)).bfloat16(), params)


@settings(max_examples=60)
@given(
    windows=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=MAX_REQS),
    padding=st.integers(0, 2),
    random=st.randoms(use_true_random=False),
)
def test_verify_accepts_drafts_up_to_the_first_wrong_one(
    windows: list[tuple[int, int]], padding: int, random: Random
) -> None:
    max_num_drafts = 5
    rows = torch.tensor(random.sample(range(MAX_REQS), len(windows)))
    drafts = torch.full((MAX_REQS, max_num_drafts), 3)
    num_drafts = np.array([count for count, _ in windows])
    starts = torch.tensor([0, *(num_drafts + 1)]).cumsum(0).int()
    sampled = torch.randint(0, 3, (int(starts[-1]),))
    for index, (count, right) in enumerate(windows):
        row, start = rows[index], starts[index]
        drafts[row, : min(right, count)] = sampled[start : start + min(right, count)]
        if random.random() < 0.3:
            drafts[row, random.randrange(max_num_drafts)] = -1
    expected = count_accepted(sampled, drafts, rows, num_drafts)
    padded = torch.cat((rows, torch.full((padding,), -1)))
    found = torch.full((2, len(padded)), -9)
    verify(sampled, drafts, padded, torch.cat((starts, starts[-1:].expand(padding))), *found)
    assert found[0].tolist() == expected[0].tolist() + [0] * padding
    assert found[1].tolist() == expected[1].tolist() + [0] * padding


@pytest.mark.long
@pytest.mark.parametrize(
    ("kernel", "dtype", "num_warps"),
    [
        ("draw:_reduce_tiles", "bf16", 4),
        ("draw:_pick_token", "fp32", 8),
        ("truncation:_measure_cuts", "bf16", 4),
        ("truncation:_collect", "fp32", 4),
        ("truncation:_select", "bf16", 8),
    ],
)
def test_nothing_spills(kernel: str, dtype: str, num_warps: int) -> None:
    module, name = kernel.split(":")
    cost = compile_sampling(module, name, POINTERS | {"logits_ptr": f"*{dtype}:16"}, CONSTEXPRS, num_warps)
    assert cost.spilled_bytes == 0
    assert cost.registers <= 168
    assert cost.shared_bytes <= 48 * 1024
    assert "ld.global.v4" in cost.ptx, "16 bytes at a time"

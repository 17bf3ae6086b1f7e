"""Sampling in Triton against the definitions in `penstock.runner.sampling`."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels.triton.sampling import noise as device_noise
from penstock.kernels.triton.sampling.draw import sample
from penstock.kernels.triton.sampling.logprobs import chosen_logprobs
from penstock.kernels.triton.sampling.penalties import PenaltyTables, apply_bitmask, apply_penalties
from penstock.kernels.triton.sampling.tiles import SamplingTables, Workspace
from penstock.kernels.triton.sampling.verify import accept_or_resample, verify
from penstock.messages.requests import EngineRequest
from penstock.messages.sampling_params import SamplingParams
from penstock.runner.sampling import sampler
from penstock.runner.sampling.bitmask import apply_bitmask as apply_bitmask_reference
from penstock.runner.sampling.logprobs import token_logprobs
from penstock.runner.sampling.noise import Purpose, uniform
from penstock.runner.sampling.penalties import apply_penalties as apply_penalties_reference
from penstock.runner.sampling.states import SamplingBatch
from penstock.runner.speculation.rejection import accept_or_resample as accept_or_resample_reference
from penstock.runner.speculation.verify import verify as verify_reference
from tests.kernels.gpu_compiler import KernelCost, compile_for_gpu

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_REQS = 12

# The interpreter's numpy speaks of infinity minus infinity, which a mask then drops; a GPU does not.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered")


def compile_sampling(
    module: str, kernel: str, signature: dict[str, str], constexprs: dict[str, Any], num_warps: int
) -> KernelCost:
    """Compiles a kernel with as many of the parameters as it has."""
    path = f"penstock.kernels.triton.sampling.{module}"
    names = inspect.signature(getattr(importlib.import_module(path), kernel).fn).parameters
    own = [{name: value for name, value in table.items() if name in names} for table in (signature, constexprs)]
    return compile_for_gpu(path, kernel, *own, num_warps=num_warps)


class Case:
    """Some rows' parameters, for the reference in a batch and for the kernels in tables of state rows."""

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
        """token_ids, is_valid and the workspace of a workspace full of NaN."""
        count = len(logits)
        workspace = Workspace.allocate(count, logits.shape[1], logits.device)
        for tensor in (workspace.tile_max, workspace.tile_sum, workspace.threshold, workspace.cut_sum):
            tensor.fill_(math.nan)
        rows = self.rows[:count].clone()
        rows[count - num_padding :] = -1
        token_ids, is_valid = torch.full((count,), -9), torch.zeros(count, dtype=torch.bool)
        sample(
            logits,
            rows,
            self.positions[:count],
            self.tables,
            workspace,
            int(Purpose.SAMPLE),
            self.truncates,
            token_ids,
            is_valid,
        )
        return token_ids, is_valid, workspace

    def alone(self, index: int) -> Case:
        """One of the rows in a batch of its own."""
        case = Case([])
        case.tables, case.truncates = self.tables, self.truncates
        case.rows, case.positions = self.rows[index : index + 1], self.positions[index : index + 1]
        return case

    def kept(self, logits: torch.Tensor) -> torch.Tensor:
        """What the reference leaves of [n, vocab_size] logits."""
        scaled = logits.float() / self.batch.temperatures(range(len(logits)))
        for truncation in sampler.TRUNCATIONS:
            truncation(scaled, self.batch)
        return scaled > -math.inf


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    """Tensors lie on the GPU where there is one, and the kernels run there."""
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        yield


@settings(max_examples=60, deadline=None)
@given(
    seeds=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=300),
    purpose=st.sampled_from(list(Purpose)),
    data=st.data(),
)
def test_noise_is_that_of_the_cpu(seeds: list[int], purpose: Purpose, data: st.DataObject) -> None:
    rows = torch.randperm(len(seeds))
    first = data.draw(st.integers(0, 2**40))
    positions = torch.arange(first, first + len(seeds))
    expected = uniform([seeds[row] for row in rows], positions.cpu().numpy(), purpose)
    table = torch.tensor(seeds)
    assert np.array_equal(device_noise.uniform(table, rows, positions, int(purpose)).cpu().numpy(), expected)
    rows[0] = -1
    assert device_noise.uniform(table, rows, positions, int(purpose))[0] == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [7, 4096, 9001])
def test_greedy_and_random_rows_get_the_tokens_of_the_reference(dtype: torch.dtype, vocab_size: int) -> None:
    case = Case([{"temperature": (0.0, 0.3, 1.0, 2.5)[index % 4]} for index in range(8)])
    logits = (3 * torch.randn(8, vocab_size)).to(dtype)
    token_ids, is_valid, _ = case.sample(logits)
    expected = sampler.sample(logits, case.batch)
    assert token_ids.tolist() == expected.token_ids.tolist()
    assert is_valid.all()
    for index in range(8):
        assert case.alone(index).sample(logits[index : index + 1])[0] == token_ids[index]


def test_the_first_of_equal_logits_is_greedy() -> None:
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
    token_ids, is_valid, workspace = case.sample(logits)
    assert not is_valid.any()
    assert ((token_ids >= 0) & (token_ids < 5000)).all()
    assert (workspace.threshold == -math.inf).all()


def test_padding_gets_token_0() -> None:
    case = Case([{"temperature": 1.0, "top_p": 0.5}] * 4)
    token_ids, is_valid, _ = case.sample(torch.full((4, 300), math.nan), num_padding=4)
    assert token_ids.tolist() == [0] * 4
    assert is_valid.all()


def test_forbidden_tokens_are_never_drawn() -> None:
    case = Case([{"temperature": 5.0}] * 10)
    logits = torch.full((10, 9001), -math.inf)
    logits[:, [5, 6000, 9000]] = torch.tensor([-4e30, -1e30, -1e30])
    token_ids, is_valid, _ = case.sample(logits)
    assert set(token_ids.tolist()) == {6000, 9000}
    assert is_valid.all()


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
    token_ids, is_valid, workspace = case.sample(logits)
    scaled = logits.float() / case.batch.temperatures(range(len(logits)))
    kept = (scaled >= workspace.threshold[:, None]) & (scaled > -math.inf)
    is_random = torch.tensor([not each.sampling_params.is_greedy for each in case.batch.requests])
    assert torch.equal(kept[is_random], case.kept(logits)[is_random])
    assert is_valid.all()
    expected = sampler.sample(logits, case.batch)
    assert token_ids.tolist() == expected.token_ids.tolist()
    return workspace


@pytest.mark.parametrize(
    ("dtype", "vocab_size", "spread"),
    [(torch.float16, 100, 2.0), (torch.bfloat16, 9001, 3.0), (torch.float32, 9001, 0.5)],
)
def test_truncation_keeps_what_the_reference_keeps(dtype: torch.dtype, vocab_size: int, spread: float) -> None:
    check_truncation((spread * torch.randn(len(TRUNCATIONS), vocab_size)).to(dtype), TRUNCATIONS)


def test_truncation_of_all_sorts_of_rows() -> None:
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
        # Quarters make ties; some tokens are forbidden, but for one.
        logits = torch.where(torch.rand_like(logits) < random.choice((0.0, 0.9)), -math.inf, (4 * logits).round() / 4)
        logits[:, random.randrange(logits.shape[1])] = 1.0
        check_truncation(logits, params)


def test_flat_rows_do_not_fit_and_are_exact_all_the_same() -> None:
    params = ({"top_p": 0.9}, {"top_k": 9000}, {"top_k": 8500, "top_p": 0.97}, {"top_p": 0.999, "min_p": 0.9})
    logits = torch.arange(9001).repeat(4, 1) * 1e-5
    workspace = check_truncation(logits[:, torch.randperm(9001)], params)
    assert (workspace.num_candidates < 0).all()


def test_candidates_of_many_tiles_are_packed_in_order() -> None:
    logits = torch.randn(2, 20_000)
    case = Case(({"top_k": 3}, {"top_k": 1500, "top_p": 0.9}))
    workspace = check_case(case, logits)
    small, large = workspace.num_candidates.tolist()
    assert 3 <= small <= 1024 < large <= 8192, "both ways are taken"
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


def test_a_vocabulary_of_a_real_model() -> None:
    params = ({"temperature": 0.0}, {"temperature": 0.8}, {"top_k": 20, "top_p": 0.95, "temperature": 0.6})
    check_truncation((3 * torch.randn(3, 151_936)).bfloat16(), params)


def penalty_case(num_rows: int, params: Sequence[dict[str, Any]], longest: int, vocab_size: int) -> Case:
    case = Case([params[index % len(params)] for index in range(num_rows)])
    tokens = torch.randint(0, vocab_size, (MAX_REQS, longest), dtype=torch.int32)
    tokens[:, ::3] = 5
    case.positions = torch.randint(1, longest, (num_rows,))
    prompts = [tuple(range(int(case.positions[index]) // 2 + 1)) for index in range(num_rows)]
    requests = [
        replace(each, prompt_token_ids=prompt) for each, prompt in zip(case.batch.requests, prompts, strict=True)
    ]
    case.batch = replace(
        case.batch,
        requests=requests,
        positions=case.positions,
        positions_np=case.positions.cpu().numpy(),
        token_ids=tokens,
    )
    return case


def test_penalties() -> None:
    vocab_size = 3000
    every = (
        {"repetition_penalty": 1.3},
        {},
        {"presence_penalty": 0.7},
        {"frequency_penalty": -0.2},
        {"repetition_penalty": 0.8, "presence_penalty": -1.0, "frequency_penalty": 0.3},
    )
    case = penalty_case(9, every, 2500, vocab_size)
    params = dict(zip(case.rows.tolist(), (each.sampling_params for each in case.batch.requests), strict=True))
    known = [params.get(row, SamplingParams(max_tokens=None)) for row in range(MAX_REQS)]
    prompt_len = torch.zeros(MAX_REQS, dtype=torch.int64)
    prompt_len[case.rows] = torch.tensor([len(each.prompt_token_ids) for each in case.batch.requests])
    tables = PenaltyTables(
        repetition=torch.tensor([each.repetition_penalty for each in known]),
        presence=torch.tensor([each.presence_penalty for each in known]),
        frequency=torch.tensor([each.frequency_penalty for each in known]),
        prompt_len=prompt_len,
    )
    logits = torch.randn(10, vocab_size)
    expected = logits.clone()
    apply_penalties_reference(expected[:9], case.batch)
    rows, positions = torch.cat((case.rows, torch.tensor([-1]))), torch.cat((case.positions, torch.tensor([99])))
    apply_penalties(logits, rows, positions, case.batch.token_ids, tables)
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("vocab_size", [100, 5001])
def test_bitmasks(vocab_size: int) -> None:
    words = -(-vocab_size // 32)
    masks = np.random.default_rng(0).integers(-(2**31), 2**31, (3, words)).astype(np.int32)
    case = Case([{}] * 4)
    batch = replace(case.batch, bitmasks={2: masks[0], 0: masks[1]})
    logits = torch.randn(4, vocab_size)
    expected = logits.clone()
    apply_bitmask_reference(expected, batch)
    apply_bitmask(logits, torch.tensor([2, 0, -1]), torch.tensor(masks))
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [9, 9001])
def test_logprobs(dtype: torch.dtype, vocab_size: int) -> None:
    logits = (3 * torch.randn(6, vocab_size)).to(dtype)
    logits[1, 3] = -math.inf
    chosen = torch.tensor([0, 3, 1, vocab_size - 1, 2, int(logits[5].argmax())])
    found = chosen_logprobs(logits, chosen)
    expected = token_logprobs(logits, chosen, [0] * 6)
    assert found.ranks.tolist() == [each.rank for each in expected]
    torch.testing.assert_close(found.logprobs, torch.tensor([each.logprobs[0] for each in expected]))
    torch.testing.assert_close(found.logsumexp, logits.float().logsumexp(-1))
    assert torch.equal(chosen_logprobs(logits[4:5], chosen[4:5]).logprobs, found.logprobs[4:5])
    logits[0, vocab_size // 2] = math.nan
    assert chosen_logprobs(logits, chosen).logprobs.isnan().tolist() == [True, *[False] * 5]


@settings(max_examples=60, deadline=None)
@given(
    windows=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=MAX_REQS),
    padding=st.integers(0, 2),
    random=st.randoms(use_true_random=False),
)
def test_verify_accepts_the_run_of_right_drafts(windows: list[tuple[int, int]], padding: int, random: Random) -> None:
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
    expected = verify_reference(sampled, drafts, rows, num_drafts)
    padded = torch.cat((rows, torch.full((padding,), -1)))
    found = torch.full((2, len(padded)), -9)
    verify(sampled, drafts, padded, torch.cat((starts, starts[-1:].expand(padding))), *found)
    assert found[0].tolist() == expected.num_accepted.tolist() + [0] * padding
    assert found[1].tolist() == expected.num_real_drafts.tolist() + [0] * padding


@pytest.mark.parametrize("vocab_size", [5, 9001])
def test_accept_or_resample(vocab_size: int) -> None:
    count = 24
    target, draft = ((2 * torch.randn(count, vocab_size)).softmax(-1) for _ in range(2))
    drafts = draft.multinomial(1)[:, 0]
    accept, resample = torch.rand((2, count), dtype=torch.float64)
    draft[0] = target[0]
    draft[1] = math.nan
    draft[2, drafts[2]] = 0.0
    draft[3], accept[3] = target[3], 0.999
    resample[4], resample[5] = 0.0, 1 - 2.0**-53
    target[5, vocab_size - 3 :] = 0.0
    expected = accept_or_resample_reference(target, draft, drafts, accept, resample)
    found = accept_or_resample(target, draft, drafts, accept, resample)
    assert found.tolist() == expected.tolist()
    assert (found != drafts).any()
    assert (found == drafts).any()
    assert accept_or_resample(target[7:8], draft[7:8], drafts[7:8], accept[7:8], resample[7:8]) == found[7]


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
    "is_valid_ptr": "*i1",
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


@pytest.mark.parametrize(
    ("kernel", "dtype", "num_warps"),
    [
        ("draw:_reduce_tiles", "bf16", 4),
        ("draw:_pick_token", "fp32", 8),
        ("truncation:_measure_cuts", "bf16", 4),
        ("truncation:_collect", "fp32", 4),
        ("truncation:_select", "bf16", 8),
        ("verify:_accept_or_resample", "fp32", 8),
    ],
)
def test_nothing_spills(kernel: str, dtype: str, num_warps: int) -> None:
    module, name = kernel.split(":")
    cost = compile_sampling(module, name, POINTERS | {"logits_ptr": f"*{dtype}:16"}, CONSTEXPRS, num_warps)
    assert cost.spilled_bytes == 0
    assert cost.registers <= 168
    assert cost.shared_bytes <= 48 * 1024
    assert "ld.global.v4" in cost.ptx, "16 bytes at a time"


def test_penalties_do_not_spill() -> None:
    pointers = dict.fromkeys(("logits_ptr", "repetition_ptr", "presence_ptr", "frequency_ptr"), "*fp32:16")
    pointers |= dict.fromkeys(("rows_ptr", "positions_ptr", "prompt_len_ptr"), "*i64")
    pointers |= {"token_ids_ptr": "*i32", "token_stride": "i32"}
    cost = compile_sampling(
        "penalties", "_apply_penalties", pointers, CONSTEXPRS | {"tile": 1024, "tokens_tile": 512}, 4
    )
    assert cost.spilled_bytes == 0
    assert cost.registers <= 128

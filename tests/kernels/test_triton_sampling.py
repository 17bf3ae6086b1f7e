"""Sampling in Triton against the definitions in `penstock.runner.sampling`."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels.triton.sampling import noise as device_noise
from penstock.kernels.triton.sampling.draw import sample
from penstock.kernels.triton.sampling.tiles import SamplingTables, Workspace
from penstock.messages.requests import EngineRequest
from penstock.messages.sampling_params import SamplingParams
from penstock.runner.sampling import sampler
from penstock.runner.sampling.noise import Purpose, uniform
from penstock.runner.sampling.states import SamplingBatch
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
        self.batch = SamplingBatch(requests, self.positions.numpy(), self.rows, self.positions, tokens, {})
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

    def kept(self, logits: torch.Tensor) -> torch.Tensor:
        """What the reference leaves of [n, vocab_size] logits."""
        scaled = logits.float() / self.batch.temperatures(range(len(logits)))
        for truncation in sampler.TRUNCATIONS:
            truncation(scaled, self.batch)
        return scaled > -math.inf


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


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
    expected = uniform([seeds[row] for row in rows], positions.numpy(), purpose)
    table = torch.tensor(seeds)
    assert np.array_equal(device_noise.uniform(table, rows, positions, int(purpose)).numpy(), expected)
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
        alone = Case([])
        alone.tables, alone.truncates = case.tables, False
        alone.rows, alone.positions = case.rows[index : index + 1], case.positions[index : index + 1]
        assert alone.sample(logits[index : index + 1])[0] == token_ids[index]


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
    case = Case(params)
    token_ids, is_valid, workspace = case.sample(logits)
    scaled = logits.float() / case.batch.temperatures(range(len(logits)))
    kept = scaled >= workspace.threshold[:, None]
    assert torch.equal(kept & (scaled > -math.inf), case.kept(logits))
    assert is_valid.all()
    expected = sampler.sample(logits, case.batch)
    assert token_ids.tolist() == expected.token_ids.tolist()
    return workspace


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocab_size", "spread"), [(100, 2.0), (9001, 3.0), (9001, 0.5)])
def test_truncation_keeps_what_the_reference_keeps(dtype: torch.dtype, vocab_size: int, spread: float) -> None:
    check_truncation((spread * torch.randn(len(TRUNCATIONS), vocab_size)).to(dtype), TRUNCATIONS)


def test_flat_rows_do_not_fit_and_are_exact_all_the_same() -> None:
    params = ({"top_p": 0.9}, {"top_k": 9000}, {"top_k": 8500, "top_p": 0.97}, {"top_p": 0.999, "min_p": 0.9})
    logits = torch.arange(9001).repeat(4, 1) * 1e-5
    workspace = check_truncation(logits[:, torch.randperm(9001)], params)
    assert (workspace.num_candidates < 0).all()


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


POINTERS = {
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
        ("draw:_reduce_tiles", "fp32", 4),
        ("draw:_sum_kept", "fp32", 4),
        ("draw:_pick_token", "fp32", 8),
        ("truncation:_measure_cuts", "fp32", 4),
        ("truncation:_collect", "fp32", 4),
        ("truncation:_select", "fp32", 8),
    ],
)
def test_nothing_spills(kernel: str, dtype: str, num_warps: int) -> None:
    module, name = kernel.split(":")
    cost = compile_sampling(module, name, POINTERS | {"logits_ptr": f"*{dtype}:16"}, CONSTEXPRS, num_warps)
    assert cost.spilled_bytes == 0
    assert cost.registers <= 168
    assert cost.shared_bytes <= 48 * 1024
    assert "ld.global.v4" in cost.ptx, "16 bytes at a time"

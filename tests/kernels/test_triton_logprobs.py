"""Compares log probabilities in Triton with `penstock.runner.sampling.logprobs`."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from penstock.kernels.triton.sampling.logprobs import RECORD, LogprobsWorkspace, score_tokens
from penstock.messages.runner_output import TokenLogprobs
from penstock.messages.sampling_params import MAX_LOGPROBS
from penstock.runner.cpu.parts import cpu_parts
from penstock.runner.gpu.sampling.outputs import read_records
from penstock.runner.gpu.sampling.outputs import score as score_on_gpu
from penstock.runner.sampling.logprobs import token_logprobs
from tests.kernels.sampling_cases import CONSTEXPRS, DTYPES, POINTERS, compile_sampling

# The interpreter's numpy warns of infinity minus infinity, which a mask then drops; a GPU does not.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered")


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    """Puts tensors, and thereby the kernels, on the GPU if there is one."""
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        yield


def score(logits: torch.Tensor, chosen: torch.Tensor, num_top: list[int]) -> torch.Tensor:
    """Returns the records of rows whose table is in reverse order, with padding and a workspace full of garbage."""
    count = len(logits)
    table = torch.tensor([[each] for each in reversed(num_top)], dtype=torch.int32)
    rows = torch.cat((torch.arange(count - 1, -1, -1), torch.tensor([-1])))
    workspace = LogprobsWorkspace.allocate(count + 1, logits.shape[1], logits.device)
    for tensor in (workspace.tile_max, workspace.tile_sum):
        tensor.fill_(math.nan)
    workspace.keys.fill_(2**62)
    records = torch.full((count + 1, RECORD), -77, dtype=torch.int32)
    padded, tokens = torch.cat((logits, logits[:1])), torch.cat((chosen, chosen[:1]))
    score_tokens(padded, rows, table, tokens, workspace, max(num_top) > 0, records)
    assert (records[-1] == -77).all()
    return records[:-1]


def check(logits: torch.Tensor, chosen: torch.Tensor, num_top: list[int]) -> list[TokenLogprobs]:
    expected = token_logprobs(logits, chosen, num_top)
    found = read_records(score(logits, chosen, num_top).cpu().numpy(), num_top)
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    assert [each.rank for each in found] == [each.rank for each in expected]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs))
    return found


def shuffled(num_rows: int, vocab_size: int, spread: float) -> torch.Tensor:
    """Returns logits without ties, whose order torch does not define."""
    values = torch.arange(vocab_size) * (spread / vocab_size)
    return torch.stack([values[torch.randperm(vocab_size)] for _ in range(num_rows)])


@pytest.mark.parametrize("vocab_size", [MAX_LOGPROBS, 9001, 100_000])
def test_the_most_likely_tokens(vocab_size: int) -> None:
    chosen = torch.randint(0, vocab_size, (4,))
    check(shuffled(4, vocab_size, 12.0), chosen, [20, 0, 1, 7])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [9, 9001])
def test_the_sampled_tokens(dtype: torch.dtype, vocab_size: int) -> None:
    logits = (3 * torch.randn(6, vocab_size)).to(dtype)
    logits[1, 3] = -math.inf
    chosen = torch.tensor([0, 3, 1, vocab_size - 1, 2, int(logits[5].argmax())])
    check(logits, chosen, [0] * 6)
    logits[0, vocab_size // 2] = math.nan
    found = read_records(score(logits, chosen, [2] * 6).cpu().numpy(), [2] * 6)
    assert [math.isnan(each.logprobs[0]) for each in found] == [True, *[False] * 5]


def test_top_tokens_in_one_tile_and_rows_of_minus_infinity() -> None:
    logits = torch.full((2, 90_000), -math.inf)
    logits[0, 50_000:50_030] = torch.arange(30.0)
    logits[1, 7] = 1.0
    records = read_records(score(logits, torch.tensor([50_029, 7]), [20, 3]).cpu().numpy(), [20, 3])
    assert records[0].token_ids == (50_029, *range(50_029, 50_009, -1))
    assert records[1].token_ids[:2] == (7, 7)
    assert records[1].logprobs[1:] == (0.0, -math.inf, -math.inf)


def test_equal_logits_are_ordered_by_token_id() -> None:
    records = read_records(score(torch.ones(1, 90_000), torch.tensor([9]), [20]).cpu().numpy(), [20])
    assert records[0].token_ids == (9, *range(20))
    assert records[0].rank == 1


def test_rows_without_logprobs_and_rows_alone() -> None:
    logits = shuffled(3, 9001, 9.0)
    records = score(logits, torch.tensor([5, 6, 7]), [3, -1, 20])
    assert (records[1] == -77).all()
    alone = score(logits[2:], torch.tensor([7]), [20])
    assert torch.equal(alone[0], records[2])


@pytest.mark.parametrize("num_top", [0, 4, 20])
def test_logprobs_of_prompts(num_top: int) -> None:
    logits, chosen = shuffled(5, 100, 8.0), torch.tensor([1, 99, 3, 50, 0])
    found, expected = (each(logits, chosen, num_top)() for each in (score_on_gpu, cpu_parts().score))
    assert [(each.token_ids, each.rank) for each in found] == [(each.token_ids, each.rank) for each in expected]


@pytest.mark.long
@pytest.mark.parametrize(("kernel", "num_warps"), [("_measure_tiles", 4), ("_collect_top", 4), ("_merge_tiles", 4)])
def test_nothing_spills(kernel: str, num_warps: int) -> None:
    signature = POINTERS | {
        "logits_ptr": "*bf16:16",
        "num_top_ptr": "*i32",
        "chosen_ptr": "*i64",
        "tile_count_ptr": "*i32:16",
        "num_keys_ptr": "*i32:16",
        "keys_ptr": "*i64:16",
        "records_ptr": "*i32",
    }
    cost = compile_sampling("logprobs", kernel, signature, CONSTEXPRS | {"slots": 32, "max_top": 20}, num_warps)
    assert cost.spilled_bytes == 0
    assert cost.registers <= 168
    assert cost.shared_bytes <= 48 * 1024

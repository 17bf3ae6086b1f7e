"""Compares the adjustment of logits in Triton with the definitions in `penstock.runner.sampling`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from penstock.kernels.triton.sampling.adjust import adjust_logits, count_tokens, pack_bits
from penstock.runner.cpu.parts import HostTableWriter
from penstock.runner.cpu.sampler import adjusted
from penstock.runner.gpu.sampling.rows import SamplingRows
from penstock.runner.sampling.features import COUNTED_TOKENS, needs_of
from tests.kernels.sampling_cases import CONSTEXPRS, DTYPES, MAX_REQS, POINTERS, Case, compile_sampling

WIDTH = 2500

PENALTIES: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.7},
    {"frequency_penalty": -0.2},
    {"repetition_penalty": 0.8, "presence_penalty": -1.0, "frequency_penalty": 0.3},
)


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    """Puts tensors, and thereby the kernels, on the GPU if there is one."""
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        yield


class AdjustCase(Case):
    """Rows with tokens, of which half are the prompt and every third is the same token."""

    def __init__(
        self, params: Sequence[dict[str, Any]], vocab_size: int, bad_words: Sequence[tuple[tuple[int, ...], ...]] = ()
    ) -> None:
        super().__init__(params)
        count = len(params)
        self.vocab_size = vocab_size
        self.token_ids = torch.randint(0, vocab_size, (MAX_REQS, WIDTH), dtype=torch.int32)
        self.token_ids[:, ::3] = min(5, vocab_size - 1)
        self.positions = torch.randint(1, WIDTH, (count,))
        positions = self.positions.tolist()
        self.batch = replace(
            self.batch,
            requests=[
                replace(
                    request,
                    prompt_token_ids=(0,) * (positions[index] // 2 + 1),
                    bad_words_token_ids=bad_words[index] if bad_words else (),
                    eos_token_ids=frozenset((0, vocab_size - 1)),
                    stop_token_ids=frozenset((3,)),
                )
                for index, request in enumerate(self.batch.requests)
            ],
            positions=self.positions,
            positions_np=self.positions.cpu().numpy(),
            token_ids=self.token_ids,
        )

    def check(self, logits: torch.Tensor, masks: dict[int, np.ndarray] | None = None) -> torch.Tensor:
        """Asserts that the adjusted logits equal the reference and padding is unchanged; returns them."""
        self.batch = replace(self.batch, bitmasks=masks or {})
        expected = adjusted(logits, self.batch)
        found = self.adjust(logits, masks or {})
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        return found

    def adjust(self, logits: torch.Tensor, masks: dict[int, np.ndarray]) -> torch.Tensor:
        count, device = len(logits), logits.device
        rows = SamplingRows(MAX_REQS, self.vocab_size, device, HostTableWriter())
        for row, request in zip(self.rows.tolist(), self.batch.requests, strict=True):
            rows.add(row, request)
        padded = torch.cat((logits, logits[:1]))
        where = (torch.cat((self.rows, torch.tensor([-1]))), torch.cat((self.positions, torch.tensor([99]))))
        counts = torch.zeros(padded.shape, dtype=torch.int32)
        if any(needs_of(request, self.vocab_size) & COUNTED_TOKENS for request in self.batch.requests):
            count_tokens(*where, self.token_ids, WIDTH, rows.adjust_tables, counts)
        mask_of_row = torch.full((count + 1 if masks else 0,), -1, dtype=torch.int32)
        for number, index in enumerate(masks):
            mask_of_row[index] = number
        words = torch.tensor(np.stack(list(masks.values()))) if masks else torch.zeros((0, 1), dtype=torch.int32)
        out = torch.full(padded.shape, 7.0)
        adjust_logits(padded, *where, self.token_ids, rows.adjust_tables, counts, mask_of_row, words, out)
        assert not counts.any(), "counts are reset when they are read"
        assert (out[-1] == 7.0).all()
        return out[:-1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_penalties(dtype: torch.dtype) -> None:
    case = AdjustCase(({}, *PENALTIES, *PENALTIES, {}), 3000)
    logits = torch.randn(10, 3000).to(dtype)
    found = case.check(logits)
    assert torch.equal(found[[0, -1]], logits[[0, -1]].float()), "rows without penalties are unchanged"


def test_a_penalty_of_one_token_counts_the_prompt_too() -> None:
    case = AdjustCase(({"repetition_penalty": 2.0}, {"presence_penalty": 2.0}), 5001)
    found = case.check(torch.ones(2, 5001))
    assert found[:, 5].tolist() == [0.5, -1.0]


def test_logit_biases_and_min_tokens() -> None:
    vocab_size = 9001
    many = {token: token / 1000 for token in range(0, vocab_size, 9)}
    params: tuple[dict[str, Any], ...] = (
        {"logit_bias": {0: 1.5, 4095: -2.0, 4096: 3.0, vocab_size - 1: -100.0}},
        {"min_tokens": 10**6},
        {"min_tokens": 1, "logit_bias": {3: 5.0, 4: 5.0}},
        {"min_tokens": 10**6, "logit_bias": {3: 5.0, 4: 5.0}, **PENALTIES[3]},
        {"logit_bias": many, "presence_penalty": 1.0},
        {},
    )
    case = AdjustCase(params, vocab_size)
    found = case.check(torch.randn(6, vocab_size))
    assert found.isinf().sum(1).tolist() == [0, 3, 0, 3, 0, 0]


def test_min_tokens_end_at_the_right_position() -> None:
    case = AdjustCase([{"min_tokens": 7}] * 3, 100)
    prompt_len = torch.tensor([len(request.prompt_token_ids) for request in case.batch.requests])
    case.positions = prompt_len + torch.tensor([0, 6, 7])
    case.batch = replace(case.batch, positions=case.positions, positions_np=case.positions.cpu().numpy())
    assert case.check(torch.randn(3, 100)).isinf().sum(1).tolist() == [3, 3, 0]


@pytest.mark.long
def test_bad_words() -> None:
    vocab_size = 6000
    case = AdjustCase([{}, {}, {"repetition_penalty": 1.5}, {}], vocab_size)
    tails = [
        tuple(case.token_ids[row, position - 3 : position].tolist())
        for row, position in zip(case.rows.tolist(), case.positions.clamp(min=3).tolist(), strict=True)
    ]
    long = tuple(range(WIDTH))
    words: list[tuple[tuple[int, ...], ...]] = [
        ((17,), (5999,), (*tails[0], 4096), (*tails[0][:2], 1, 4095), (*tails[0][1:], 8)),
        ((*long, 9),),
        (*(((*tails[2][2:], token)) for token in range(300)), (*tails[2], 5000)),
        (),
    ]
    positions = case.positions.clamp(min=3)
    positions[1] = 7  # fewer tokens than the word has
    case.positions = positions
    case.batch = replace(
        case.batch,
        positions=positions,
        positions_np=positions.cpu().numpy(),
        requests=[
            replace(each, bad_words_token_ids=word) for each, word in zip(case.batch.requests, words, strict=True)
        ],
    )
    found = case.check(torch.randn(4, vocab_size))
    assert found.isinf().sum(1).tolist() == [4, 0, 301, 0]


@pytest.mark.parametrize("vocab_size", [100, 5001])
def test_allowed_tokens_and_bitmasks(vocab_size: int) -> None:
    masks = np.random.default_rng(0).integers(-(2**31), 2**31, (3, -(-vocab_size // 32))).astype(np.int32)
    allowed = list(range(1, vocab_size, 7))
    params: tuple[dict[str, Any], ...] = (
        {},
        {"allowed_token_ids": allowed},
        {},
        {"allowed_token_ids": allowed, "logit_bias": {2: 9.0, 8: 9.0}, "min_tokens": 10**6, **PENALTIES[0]},
    )
    case = AdjustCase(params, vocab_size)
    logits = torch.randn(4, vocab_size)
    found = case.check(logits, {3: masks[0], 0: masks[1]})
    assert torch.equal(found[2], logits[2])
    assert torch.equal(case.check(logits)[0], logits[0])


def test_random_combinations_and_a_row_alone() -> None:
    random, vocab_size = Random(0), 4100
    for _ in range(4):
        count = random.randint(1, 8)
        params, words = [], []
        for _ in range(count):
            chosen: dict[str, Any] = dict(random.choice(({}, *PENALTIES)))
            if random.random() < 0.5:
                bias = {random.randrange(vocab_size): random.uniform(-100, 100) for _ in range(random.randint(1, 300))}
                chosen["logit_bias"] = bias
            if random.random() < 0.3:
                chosen["allowed_token_ids"] = random.sample(range(vocab_size), random.randint(1, 2000))
            chosen["min_tokens"] = random.choice((0, 0, 1, 10**6))
            params.append(chosen)
            words.append(tuple((random.randrange(vocab_size),) for _ in range(random.choice((0, 0, 2, 200)))))
        case = AdjustCase(params, vocab_size, words)
        logits = 5 * torch.randn(count, vocab_size)
        together = case.check(logits, {0: pack_bits(range(0, vocab_size, 2), vocab_size)})
        index = count - 1
        case.rows, case.positions = case.rows[index:], case.positions[index:]
        case.batch = replace(case.batch, requests=case.batch.requests[index:])
        masks = {0: pack_bits(range(0, vocab_size, 2), vocab_size)} if index == 0 else {}
        assert torch.equal(case.adjust(logits[index:], masks)[0], together[index])


def test_bits_are_packed_as_in_grammars() -> None:
    assert pack_bits([0, 31, 32, 40], 41).tolist() == [-(2**31) + 1, 257]


@pytest.mark.long
@pytest.mark.parametrize(("kernel", "dtype"), [("_count_tokens", "fp32"), ("_adjust_logits", "bf16")])
def test_nothing_spills(kernel: str, dtype: str) -> None:
    signature = POINTERS | {
        "logits_ptr": f"*{dtype}:16",
        "out_ptr": "*fp32:16",
        "token_ids_ptr": "*i32:16",
        "counts_ptr": "*i32:16",
        "mask_of_row_ptr": "*i32",
        "bitmasks_ptr": "*i32",
        "rules_ptr": "*i64:16",
        "penalties_ptr": "*fp32:16",
        "token_stride": "i32",
        "has_bitmasks": "i32",
        "words": "i32",
    }
    constexprs = CONSTEXPRS | {"rule_columns": 5, "penalty_columns": 3, "block": 1024, "entries": 128}
    cost = compile_sampling("adjust", kernel, signature, constexprs, 4)
    assert cost.spilled_bytes == 0
    assert cost.registers <= 168
    assert cost.shared_bytes <= 48 * 1024
    if kernel == "_count_tokens":
        assert "red.global" in cost.ptx or "atom.global" in cost.ptx
    else:
        assert "ld.global.v4" in cost.ptx, "16 bytes at a time"
        assert cost.ptx.count("bar.sync") >= 3, "a tile is changed in place between barriers"

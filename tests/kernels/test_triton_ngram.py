"""Compares prompt lookup in Triton with `penstock.runner.cpu.ngram`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

import numpy as np
import pytest
import torch

from penstock.kernels.triton.ngram import propose_ngrams
from penstock.runner.cpu.ngram import NgramSpeculator
from tests.kernels.gpu_compiler import compile_for_gpu


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    """Puts tensors, and thereby the kernels, on the GPU if there is one."""
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        yield


def check(requests: Sequence[Sequence[int]], shortest: int, longest: int, num_drafts: int) -> None:
    """Checks each request in its own row, with tokens after its last one that must not be read."""
    width = max(map(len, requests)) + num_drafts
    rows = torch.randperm(len(requests) + 2)[: len(requests)]
    token_ids = torch.randint(0, 3, (len(requests) + 2, width), dtype=torch.int32)
    for row, tokens in zip(rows.tolist(), requests, strict=True):
        token_ids[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
    padded = torch.cat((rows, torch.tensor([-1])))
    num_computed = torch.tensor([*(len(tokens) - 1 for tokens in requests), 10**6])
    drafts = torch.full((len(padded), num_drafts), -9)
    propose_ngrams(token_ids, padded, num_computed, shortest, longest, drafts)
    lookup = NgramSpeculator(shortest, longest)._lookup
    for found, tokens in zip(drafts.tolist(), requests, strict=False):
        expected = lookup(np.array(tokens), num_drafts).tolist()
        assert found == expected + [-1] * (num_drafts - len(expected)), tokens
    assert drafts[-1].tolist() == [-1] * num_drafts


def test_finds_the_same_drafts_as_the_cpu() -> None:
    random = Random(1)
    for _ in range(12):
        requests = [[random.randrange(3) for _ in range(random.randint(1, 40))] for _ in range(12)]
        shortest = random.randint(1, 3)
        check(requests, shortest, shortest + random.randint(0, 4), random.randint(1, 5))


def test_matches_far_away_and_across_blocks() -> None:
    random = Random(2)
    far = [random.randrange(10_000) for _ in range(5000)]
    for place in (0, 2040, 2046, 2047, 2048, 4000):
        check([far + far[place : place + 4], far], 2, 5, 4)
    # The longer match wins although the shorter one is later.
    check([[1, 2, 3, 9, *far, 2, 3, 8, *far[:2000], 1, 2, 3]], 2, 3, 2)


def test_nothing_spills() -> None:
    signature = {
        "token_ids_ptr": "*i32:16",
        "rows_ptr": "*i64",
        "num_computed_ptr": "*i64",
        "drafts_ptr": "*i64",
        "token_stride": "i32",
    }
    constexprs = {"num_drafts": 4, "shortest": 2, "longest": 5, "block": 2048, "drafts_tile": 4}
    cost = compile_for_gpu("penstock.kernels.triton.ngram", "_propose_ngrams", signature, constexprs, num_warps=8)
    assert cost.spilled_bytes == 0
    assert cost.registers <= 128
    assert cost.shared_bytes <= 48 * 1024

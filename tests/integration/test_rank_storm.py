"""Aborts, preemption and reused rows while results of a pipeline are in flight: no request gets a foreign token.

Requests arrive and end at random on few rows of real ranks. The tokens of each, when it ends or is aborted, are a
prefix of its output when it runs alone on one rank.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from penstock.config.engine import EngineArgs, resolve
from penstock.engine.build import build_engine
from penstock.messages.requests import EngineRequest
from penstock.messages.sampling_params import SamplingParams
from tests.grids import exhaustive

NUM_PROMPTS, MAX_TOKENS = 24, 20
ARGUMENTS: dict[str, Any] = {"max_model_len": 96, "max_num_seqs": 6, "num_gpu_blocks_override": 14}
MTP = {"method": "mtp", "num_speculative_tokens": 2}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


def request(number: int, name: str) -> EngineRequest:
    """Returns a request of one of 24 kinds, some of them greedy."""
    kind = number % NUM_PROMPTS
    rng = random.Random(kind)
    prompt = tuple(rng.randrange(300, 4000) for _ in range(2 + kind * 2)) + (311, 312, 313) * (kind % 3)
    temperature = 0.0 if kind % 2 else 0.9
    return EngineRequest(
        request_id=name,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(temperature=temperature, ignore_eos=True),
        max_tokens=MAX_TOKENS,
        seed=kind,
    )


@pytest.fixture(scope="module")
def alone() -> dict[int, list[int]]:
    """The output of each kind of request run alone on one rank."""
    core = build_engine(resolve(EngineArgs.from_kwargs(**ARGUMENTS))).core
    found: dict[int, list[int]] = {}
    for kind in range(NUM_PROMPTS):
        core.add_request(request(kind, str(kind)))
        tokens = found.setdefault(kind, [])
        while core.has_work:
            for output in core.step().outputs:
                tokens.extend(output.new_token_ids)
    core.shutdown()
    assert len({tuple(tokens) for tokens in found.values()}) == NUM_PROMPTS
    return found


def storm(alone: Mapping[int, list[int]], num_steps: int, arguments: dict[str, Any]) -> tuple[int, int, int]:
    """Runs random requests; returns the numbers of ended requests, aborted requests and preemptions."""
    rng = random.Random(str(arguments))
    core = build_engine(resolve(EngineArgs.from_kwargs(**{**ARGUMENTS, **arguments}))).core
    running: dict[str, int] = {}
    tokens: dict[str, list[int]] = {}
    num_added = num_ended = num_aborted = 0
    for _ in range(num_steps):
        while len(running) < 9 and rng.random() < 0.6:
            # Names are reused as soon as they are free.
            name = f"r{rng.choice([i for i in range(12) if f'r{i}' not in running])}"
            running[name], tokens[name] = num_added % NUM_PROMPTS, []
            core.add_request(replace(request(num_added, name), request_id=name))
            num_added += 1
        if running and rng.random() < 0.15:
            name = rng.choice(sorted(running))
            core.abort_requests([name])
            del running[name]
            num_aborted += 1
        if not core.has_work:
            continue
        for output in core.step().outputs:
            if output.request_id not in running:
                continue
            assert output.error is None, output.error
            got, expected = tokens[output.request_id], alone[running[output.request_id]]
            got.extend(output.new_token_ids)
            assert got == expected[: len(got)], f"{output.request_id} got a token of another request"
            if output.finish_reason is not None:
                assert got == expected
                del running[output.request_id]
                num_ended += 1
    core.abort_requests(list(running))
    while core.has_work or core.has_rows_to_free:
        core.step()
    core.check_integrity()
    num_preemptions = core.stats().num_preemptions
    core.shutdown()
    return num_ended, num_aborted, num_preemptions


CELLS: list[dict[str, Any]] = [
    {"pipeline_parallel_size": 2, "async_scheduling": True, "speculative_config": MTP},
    {"pipeline_parallel_size": 3, "speculative_config": NGRAM},
    {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "async_scheduling": True},
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("num_steps", "arguments"),
    [*((1000, cell) for cell in CELLS), *(exhaustive(10_000, cell) for cell in CELLS)],
    ids=str,
)
def test_no_request_gets_a_foreign_token(
    alone: dict[int, list[int]], num_steps: int, arguments: dict[str, Any]
) -> None:
    arguments = {**arguments, "distributed_executor_backend": "uniproc", "max_num_batched_tokens": 24}
    num_ended, num_aborted, num_preemptions = storm(alone, num_steps, arguments)
    assert num_ended > num_steps // 40
    assert num_aborted > num_steps // 20
    assert num_preemptions > 0

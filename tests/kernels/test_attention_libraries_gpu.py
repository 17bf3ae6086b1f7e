"""Compares the libraries of the optional attention backends, where installed, with Triton, also in graphs."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest
import torch

from penstock.attention.backend import AttentionBackend
from penstock.attention.select import make_gpu_attention
from penstock.config.engine import ExecutionConfig, SchedulerConfig
from penstock.utils.errors import ConfigError
from tests.unit import attention_fakes
from tests.unit.attention_cases import MAX_MODEL_LEN, Case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

MAX_QUERY_LEN = 4


def make(name: str) -> AttentionBackend:
    limits = SchedulerConfig(
        max_num_batched_tokens=64, max_num_seqs=64, max_model_len=MAX_MODEL_LEN, drafts=((64, MAX_QUERY_LEN - 1),)
    )
    return make_gpu_attention(torch.device("cuda"), limits, ExecutionConfig(attention_backend=name))


@pytest.fixture(params=["flash_attention", "flashinfer"], scope="module")
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    pytest.importorskip(attention_fakes.modules(request.param)[0].__name__, exc_type=ImportError)
    return make(request.param)


@pytest.fixture(scope="module")
def triton() -> AttentionBackend:
    return make("triton")


def case_of(lengths: list[int], counts: list[int], **shape: Any) -> Case:
    return Case.random(lengths, counts, device="cuda", **{"dtype": "bfloat16", "num_heads": (16, 8), **shape})


BATCHES = (
    ([1], [1]),
    ([700], [300]),
    ([17, 1000, 333, 64], [1, 1, 1, 1]),
    ([17, 1000, 333, 64], [4, 4, 4, 4]),
    ([17, 1000, 333, 64], [3, 1, 2, 4]),
    ([128, 129, 1000, 50], [128, 1, 500, 4]),
)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "shape",
    [
        {"head_size": 128},
        {"head_size": 128, "block_size": 32},
        {"head_size": 128, "window": 100},
        {"head_size": 128, "num_heads": (16, 1)},
        {"head_size": 64, "num_heads": (10, 2)},
        {"head_size": 256, "num_heads": (8, 1)},
        {"head_size": 80},
    ],
)
def test_results_agree_with_triton(
    backend: AttentionBackend, triton: AttentionBackend, batch: Any, dtype: str, shape: dict[str, Any]
) -> None:
    case = case_of(*batch, dtype=dtype, **shape)
    try:
        found = case.run(backend)
    except ConfigError as error:
        pytest.skip(str(error))
    torch.testing.assert_close(found.float(), case.run(triton).float(), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("count", [1, MAX_QUERY_LEN])
def test_a_graph_replays_with_other_batches(backend: AttentionBackend, triton: AttentionBackend, count: int) -> None:
    """Captures with one batch and replays with another, for decode also with a padded one."""
    captured = case_of([60] * 8, [count] * 8, head_size=128, seed=1)
    captured.kv_cache = torch.nn.functional.pad(captured.kv_cache, (0, 0) * 4 + (0, 400))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            attend(captured, backend)
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        out = attend(captured, backend)
        graph.capture_end()
    batches = ([5, 1000, 17, 16, 333, 64, 65, 900], [1000, 4, 9])
    for lengths in batches if count == 1 else batches[:1]:
        other = case_of(lengths, [count] * len(lengths), head_size=128, seed=len(lengths))
        other.heads = captured.heads  # with the rotation that is captured
        expected, given = other.run(triton), other.padded(8)
        captured.kv_cache[: len(other.kv_cache)] = other.kv_cache
        for into, source in ((captured.qkv, given.qkv), (captured.positions, given.positions)):
            into.copy_(source)
        for name in ("query_start_loc", "seq_lens", "block_table", "slot_mapping"):
            getattr(captured.metadata, name).copy_(getattr(given.metadata, name))
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(out[: len(expected)].float(), expected.float(), atol=2e-2, rtol=2e-2)


def attend(case: Case, backend: AttentionBackend) -> torch.Tensor:
    """Runs on a copy of `qkv`, because the backend rotates it in place."""
    return backend.attend(case.qkv.clone(), case.positions, case.heads, case.kv_cache, case.metadata)


@pytest.mark.parametrize("name", ["flash_attention", "flashinfer"])
def test_the_fakes_have_the_parameters_of_the_libraries(name: str) -> None:
    for fake in attention_fakes.modules(name):
        real = pytest.importorskip(fake.__name__, exc_type=ImportError)
        for member in (value for value in vars(fake).values() if callable(value) and hasattr(value, "__module__")):
            theirs = getattr(importlib.import_module(real.__name__), member.__name__)
            for ours, other in _functions(member, theirs):
                missing = set(inspect.signature(ours).parameters) - set(inspect.signature(other).parameters)
                assert not missing, f"{real.__name__}.{member.__name__}"


def _functions(ours: Any, theirs: Any) -> list[tuple[Any, Any]]:
    if not inspect.isclass(ours):
        return [(ours, theirs)]
    return [(getattr(ours, name), getattr(theirs, name)) for name in ("__init__", "plan", "run")]

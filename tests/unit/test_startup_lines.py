"""The lines that a command prints about its engine when it is ready."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

import msgspec
import pytest

from penstock.cli.startup import describe_engine
from penstock.messages.engine_info import EngineInfo

ONE = EngineInfo(
    dtype="bfloat16",
    device="cpu",
    device_name="",
    kernels="avx2",
    num_threads=2,
    max_model_len=2048,
    num_blocks=10,
    block_size=16,
    kv_cache_bytes=1 << 30,
    kv_cache_dtype="bfloat16",
    load_seconds=1.5,
)


@dataclass(frozen=True)
class Case:
    changes: dict[str, object]
    line: str


@pytest.mark.parametrize(
    "case",
    [
        Case({}, "  device     cpu, avx2 kernels, 2 threads"),
        Case({"wrapper": "gemma3"}, "  serves     the text part of a gemma3, without images, video and sound"),
        Case({"num_threads": 1}, "  device     cpu, avx2 kernels, 1 thread"),
        Case({"data_parallel_size": 3}, "  engines    3, each as follows"),
        Case(
            {"data_parallel_size": 3, "shares_experts": True}, "  engines    3 that share the experts, each as follows"
        ),
        Case({"tensor_parallel_size": 2}, "  device     cpu, avx2 kernels, 2 threads each"),
        Case(
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 3},
            "  ranks      6: tensor parallel 2, pipeline parallel 3",
        ),
        Case(
            {"device": "cuda", "device_name": "H200", "kernels": "triton"}, "  device     cuda (H200), triton kernels"
        ),
        Case(
            {"weights": "q4_k, q6_k", "num_weights": 1 << 30, "weight_bytes": 9 << 26},
            "  weights    q4_k, q6_k, 4.5 bits each, 0.56 GiB",
        ),
        Case({}, "  KV cache   1.00 GiB of bfloat16, 160 tokens in 10 blocks"),
        Case({"num_blocks": 0, "kv_cache_bytes": 0}, "  KV cache   none: the model stores nothing"),
    ],
)
def test_the_startup_lines(case: Case) -> None:
    lines = describe_engine("demo", msgspec.structs.replace(ONE, **case.changes)).splitlines()
    assert case.line in lines
    assert any("ranks" in line for line in lines) == (len(case.changes) > 0 and "tensor_parallel_size" in case.changes)


def test_the_engine_core_of_a_server_starts_before_fastapi_is_imported() -> None:
    """That takes a second, as long as the core needs to import torch."""
    command = "import sys, penstock.server.run; sys.exit(bool({'fastapi', 'pydantic'} & sys.modules.keys()))"
    subprocess.run([sys.executable, "-c", command], check=True, timeout=60)

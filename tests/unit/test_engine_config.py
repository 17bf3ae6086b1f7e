"""What a configuration gets from its device: only numbers that the arguments leave open."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.config.engine import EngineArgs, resolve


@pytest.mark.parametrize(
    ("given", "on_cpu", "on_gpu"),
    [
        ({}, (2048, 1), (8192, 2)),
        ({"pipeline_parallel_size": 3}, (2048, 3), (8192, 4)),
        ({"async_scheduling": True}, (2048, 2), (8192, 2)),
        ({"async_scheduling": False}, (2048, 1), (8192, 1)),
        ({"max_num_batched_tokens": 64, "pipeline_parallel_size": 2, "async_scheduling": True}, (64, 3), (64, 3)),
    ],
)
def test_the_device_decides_what_the_arguments_leave_open(
    given: dict[str, Any], on_cpu: tuple[int, int], on_gpu: tuple[int, int]
) -> None:
    config = resolve(EngineArgs(**given))
    for device, wanted in (("cpu", on_cpu), ("cuda", on_gpu)):
        found = config.on_device(device)
        assert (found.scheduler.max_num_batched_tokens, found.scheduler.max_num_in_flight) == wanted
        assert found.device == device
        assert found.on_device(device) == found


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, "uniproc"),
        ({"tensor_parallel_size": 2}, "mp"),
        ({"distributed_executor_backend": "mp"}, "mp"),
        ({"tensor_parallel_size": 2, "distributed_executor_backend": "uniproc"}, "uniproc"),
    ],
)
def test_several_ranks_are_processes_by_default(given: dict[str, Any], wanted: str) -> None:
    assert resolve(EngineArgs(**given)).parallel.backend == wanted

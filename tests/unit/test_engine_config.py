"""What a configuration gets from its device: only numbers that the arguments leave open."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.config.engine import EngineArgs, resolve
from penstock.utils.errors import ConfigError


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


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"seed": 2**64}, f"seed must be between {-(2**63)} and {2**63 - 1}, got {2**64}"),
        ({"max_num_seqs": 10**20}, "max_num_seqs must be between 1 and 65536, got 1000"),
        ({"num_threads": 10**20}, "num_threads must be between 1 and 4096, got 1000"),
        ({"data_parallel_size": 10**11}, "data_parallel_size must be between 1 and 1024, got 1000"),
        (
            {"pipeline_layers": "1", "pipeline_parallel_size": 10**11},
            "pipeline_parallel_size must be between 1 and",
        ),
        ({"pipeline_layers": "1" * 5000}, "pipeline_layers must be the number of layers of each of the 1 stages"),
        ({"seed": True}, "seed must be int, got True"),
        ({"gpu_memory_utilization": False}, "gpu_memory_utilization must be float, got False"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_numbers_out_of_bounds(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(EngineArgs.from_kwargs(**given))
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("~nobody-of-this-name/model", "there is no folder '~nobody-of-this-name/model'"),
        ("./" + "x" * 5000, "there is no folder './xxx"),
        ("model\0", "there is no folder 'model\\x00'"),
        ("model\0.gguf", "model\0.gguf cannot be read"),
    ],
    ids=["user", "length", "zero", "zero in a file"],
)
def test_a_model_at_an_impossible_path_is_refused_by_name(model: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(EngineArgs(model=model))
    assert str(caught.value).startswith(message)

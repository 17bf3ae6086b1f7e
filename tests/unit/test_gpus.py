"""The assignment of GPUs to ranks, and the errors if there are too few; no test needs a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.config.engine import EngineArgs, resolve
from penstock.config.gpus import gpus_of_ranks
from penstock.config.parallel import ParallelConfig
from penstock.config.replicas import core_plans
from penstock.executor import factory
from penstock.executor.remote import start_worker
from penstock.utils.errors import ConfigError, EngineDeadError
from penstock.utils.machine import count_gpus
from penstock.worker.messages import LoadWorker


@pytest.mark.parametrize(
    ("device", "visible", "count", "wanted"),
    [
        ("cuda", None, 4, ["0", "1", "2", "3"]),
        ("auto", None, 8, ["0", "1", "2", "3"]),
        ("cuda", "7,2,GPU-8f1c,3,0", 5, ["7", "2", "GPU-8f1c", "3"]),
        ("auto", None, 0, []),
        ("auto", "", 0, []),
        ("cpu", None, 8, []),
    ],
)
def test_each_rank_has_a_gpu_of_its_own(device: str, visible: str | None, count: int, wanted: list[str]) -> None:
    assert gpus_of_ranks(device, ParallelConfig(tp=2, pp=2, backend="mp"), visible, lambda: count) == wanted


@pytest.mark.parametrize(
    ("device", "visible", "count", "found"),
    [
        ("cuda", None, 0, "CUDA finds 0:"),
        ("cuda", None, 1, "CUDA finds 1:"),
        ("auto", None, 1, "CUDA finds 1:"),
        ("auto", "5", 1, "CUDA finds 1 in CUDA_VISIBLE_DEVICES=5:"),
        ("cuda", "", 0, "CUDA finds 0 in CUDA_VISIBLE_DEVICES=:"),
        # Lists a GPU that does not exist.
        ("cuda", "0,9", 1, "CUDA finds 1 in CUDA_VISIBLE_DEVICES=0,9:"),
    ],
)
def test_too_few_gpus_are_refused(device: str, visible: str | None, count: int, found: str) -> None:
    with pytest.raises(ConfigError, match=f"2 ranks need 2 GPUs, and {found} lower .* or set device=cpu"):
        gpus_of_ranks(device, ParallelConfig(tp=2, backend="mp"), visible, lambda: count)


def test_several_ranks_on_gpus_need_processes() -> None:
    with pytest.raises(ConfigError, match=r"2 ranks on GPUs need a process each.*uniproc.*choose mp or ray"):
        gpus_of_ranks("cuda", ParallelConfig(tp=2, backend="uniproc"), None, lambda: 2)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[LoadWorker, dict[str, str]]]:
    """Returns the ranks that the factory starts on a host with four GPUs, with the additions to their environment."""
    found: list[tuple[LoadWorker, dict[str, str]]] = []

    class NoWorker:
        def watch(self, on_death: object) -> None: ...

    def start(load: LoadWorker, environment: dict[str, str]) -> Any:
        found.append((load, environment))
        return NoWorker()

    monkeypatch.setattr(factory, "start_worker", start)
    monkeypatch.setattr(factory, "count_gpus", lambda: 4)
    return found


@pytest.mark.parametrize("device", ["cuda", "auto"])
def test_each_rank_starts_with_one_gpu(
    device: str, started: list[tuple[LoadWorker, dict[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1,2,0")
    factory.make_executor(resolve(EngineArgs(tensor_parallel_size=2, pipeline_parallel_size=2, device=device)))
    assert [(load.shard, own) for load, own in started] == [
        ((0, 0), {"CUDA_VISIBLE_DEVICES": "3"}),
        ((0, 1), {"CUDA_VISIBLE_DEVICES": "1"}),
        ((1, 0), {"CUDA_VISIBLE_DEVICES": "2"}),
        ((1, 1), {"CUDA_VISIBLE_DEVICES": "0"}),
    ]
    (rendezvous,) = {load.rendezvous for load, _ in started}
    assert rendezvous.memory is None
    assert rendezvous.address is not None
    assert rendezvous.address.startswith("127.0.0.1:")


def test_the_ranks_of_each_replica_divide_its_own_gpus(
    started: list[tuple[LoadWorker, dict[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = core_plans(resolve(EngineArgs(data_parallel_size=2, tensor_parallel_size=2, device="cuda")), "6,4,2,0")
    for plan in plans:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", plan.environment["CUDA_VISIBLE_DEVICES"])
        factory.make_executor(plan.config)
    assert [own["CUDA_VISIBLE_DEVICES"] for _, own in started] == ["6", "4", "2", "0"]


def test_no_rank_is_started_if_gpus_are_missing(started: list[tuple[LoadWorker, dict[str, str]]]) -> None:
    with pytest.raises(ConfigError, match="8 ranks need 8 GPUs"):
        factory.make_executor(resolve(EngineArgs(tensor_parallel_size=4, pipeline_parallel_size=2, device="cuda")))
    assert not started


REPORTS_ITS_GPUS = """
import os, socket, sys
from penstock.utils.child_process import Failed
from penstock.worker.messages import CODEC
connection = socket.socket(fileno=int(sys.argv[1]))
connection.sendall(CODEC.encode(Failed(os.environ["CUDA_VISIBLE_DEVICES"] + os.environ["PATH"])))
"""


def test_a_worker_inherits_the_environment_but_sees_only_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    monkeypatch.setenv("PATH", "/the/path")
    worker = start_worker(
        LoadWorker(resolve(EngineArgs()), (0, 0)), ("-c", REPORTS_ITS_GPUS), {"CUDA_VISIBLE_DEVICES": "2"}
    )
    with pytest.raises(EngineDeadError, match="2/the/path"):
        worker.load().result()
    worker.shutdown()


def test_without_a_driver_there_are_no_gpus() -> None:
    assert count_gpus("libcuda-that-does-not-exist.so.1") == 0

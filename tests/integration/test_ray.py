"""Ranks as actors of a local Ray cluster: the same tokens, and deaths that are reported at once and leave nothing."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from penstock import LLM, ConfigError, EngineDeadError, SamplingParams
from tests.integration.raw_http import eventually
from tests.integration.server_probes import is_gone
from tests.integration.timing import check_seconds, kill_soon, retried_when_slow

ray = pytest.importorskip("ray", reason="Ray is an optional dependency: pip install penstock[ray]")

from penstock.executor import ray as ray_executor  # noqa: E402

SMALL: dict[str, Any] = {"max_model_len": 256, "num_gpu_blocks_override": 64, "num_threads": 1}
PROMPTS = [f"Once upon a time there was a fox {number}" for number in range(6)]
PARAMS = [
    SamplingParams(temperature=0.8 if number % 2 else 0.0, seed=number, max_tokens=16, ignore_eos=True, logprobs=1)
    for number in range(6)
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Starts one cluster for all tests, because it takes longer to start than an engine."""
    ray_executor._connect(4)
    yield
    ray.shutdown()


def answers(llm: LLM) -> list[Any]:
    return [output.outputs[0] for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


@pytest.fixture(scope="module")
def one_rank_answers() -> list[Any]:
    llm = LLM(distributed_executor_backend="uniproc", **SMALL)
    found = answers(llm)
    llm.shutdown()
    return found


def actor_pids(llm: LLM) -> list[int]:
    workers: Any = llm._core._executor._workers
    return [worker._process.pid for worker in workers]


def nothing_is_reserved() -> bool:
    groups = ray.util.placement_group_table().values()
    return all(group["state"] == "REMOVED" for group in groups)


@pytest.mark.long
@pytest.mark.parametrize(("pp", "tp", "is_here"), [(1, 2, True), (1, 2, False), (2, 1, True), (2, 1, False)])
def test_the_tokens_are_those_of_one_rank(
    cluster: None, one_rank_answers: list[Any], monkeypatch: pytest.MonkeyPatch, pp: int, tp: int, is_here: bool
) -> None:
    """Uses shared memory, and gloo as between hosts."""
    if not is_here:
        monkeypatch.setattr(ray_executor, "_are_all_here", lambda places: len(places) == 1)
    llm = LLM(distributed_executor_backend="ray", tensor_parallel_size=tp, pipeline_parallel_size=pp, **SMALL)
    assert answers(llm) == one_rank_answers
    pids = actor_pids(llm)
    llm.shutdown()
    eventually(lambda: all(is_gone(pid) for pid in pids), 10)
    assert nothing_is_reserved()


@pytest.mark.spread(1)
@pytest.mark.alone
@pytest.mark.parametrize("is_here", [True, False], ids=["shared memory", "gloo"])
@retried_when_slow
def test_a_killed_actor_is_reported_within_a_second(
    cluster: None, monkeypatch: pytest.MonkeyPatch, is_here: bool
) -> None:
    if not is_here:
        monkeypatch.setattr(ray_executor, "_are_all_here", lambda places: len(places) == 1)
    llm = LLM(distributed_executor_backend="ray", tensor_parallel_size=2, **SMALL)
    pids = actor_pids(llm)
    since_killed = kill_soon(pids[1])
    endless = SamplingParams(max_tokens=200, ignore_eos=True)
    with pytest.raises(EngineDeadError, match=rf"worker \(0, 1\) \(process {pids[1]} on .*\) died: .*unexpectedly"):
        llm.generate(["Once upon a time"] * 32, endless, use_tqdm=False)
    seconds = since_killed()
    llm.shutdown()
    eventually(lambda: all(is_gone(pid) for pid in pids), 10)
    assert nothing_is_reserved()
    check_seconds(seconds, 1.0)


@pytest.mark.long
def test_a_refused_configuration_leaves_nothing_reserved(cluster: None) -> None:
    with pytest.raises(ConfigError, match="lower kv_cache_memory to"):
        LLM(distributed_executor_backend="ray", max_model_len=64, kv_cache_memory=1 << 62, num_threads=1)
    assert nothing_is_reserved()


def test_a_cluster_without_enough_resources_is_refused(cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_executor, "_PLACEMENT_SECONDS", 0.5)
    with pytest.raises(ConfigError, match=r"no room for 2 ranks with \{'CPU': 1000\} each"):
        LLM(distributed_executor_backend="ray", tensor_parallel_size=2, **{**SMALL, "num_threads": 1000})
    assert nothing_is_reserved()


def test_without_ray_the_error_names_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "penstock.executor.ray")
    with pytest.raises(ConfigError, match=r"pip install penstock\[ray\]"):
        LLM(distributed_executor_backend="ray", **SMALL)


def test_a_connection_without_the_key_is_refused(cluster: None) -> None:
    """Unauthenticated clients connect first; only the actor, which has the key, is accepted."""

    class Actor:
        """Connects with a wrong key, as a wrong rank, and then as the rank."""

        class run:  # noqa: N801
            @staticmethod
            def remote(host: str, port: int, key: bytes, shard: tuple[int, int]) -> None:
                threading.Thread(target=connect, args=(host, port, key, shard)).start()

    def connect(host: str, port: int, key: bytes, shard: tuple[int, int]) -> None:
        for each, which in ((b"wrong", shard), (key, (9, 9)), (key, shard)):
            connection = socket.create_connection((host, port))
            side = ray_executor.Authentication(each, is_client=True, purpose=ray_executor._purpose(which))
            try:
                ray_executor._authenticate(connection, side)
            except (ray_executor.PeerError, OSError):
                connection.close()
            else:
                connection.sendall(b"rank")
                connection.close()

    place = ray_executor.Place("", "", "127.0.0.1", 0, 0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connection, _ = ray_executor._start_rank(listener, (0, 1), Actor, place)
        with connection:
            assert connection.recv(16) == b"rank"


def test_the_loss_of_a_host_ends_its_connection_within_a_minute() -> None:
    """By default the system would notice it after two hours."""
    key = b"k" * 32
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as theirs,
        listener.accept()[0] as ours,
    ):
        sides = [(ours, ray_executor.Authentication(key, is_client=False, purpose=b"rank"))]
        sides.append((theirs, ray_executor.Authentication(key, is_client=True, purpose=b"rank")))
        threads = [threading.Thread(target=ray_executor._authenticate, args=side) for side in sides]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        for connection in (ours, theirs):
            idle, interval, count = (
                connection.getsockopt(socket.IPPROTO_TCP, option)
                for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            )
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert idle + interval * count <= 60

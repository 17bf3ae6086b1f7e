"""The worker in a separate process: the same tokens, and a death that is reported at once and leaves nothing."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, ConfigError, EngineDeadError, SamplingParams, StructuredOutputsParams
from penstock.config.engine import EngineArgs, resolve
from penstock.executor.executor import Executor
from penstock.executor.remote import start_worker
from penstock.messages.runner_output import ModelRunnerOutput
from penstock.messages.scheduler_output import SchedulerOutput
from penstock.worker.messages import LoadWorker
from tests.integration.raw_http import Stream, call, eventually
from tests.integration.server_probes import COMPLETIONS, endless, ends_with_error, is_gone, wait_for
from tests.integration.server_process import serve
from tests.integration.timing import check_seconds, retried_when_slow

MTP = {"method": "mtp", "num_speculative_tokens": 2}
OFFLOADING = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"load_policy": "always"}}
EVERYTHING: dict[str, Any] = {
    "max_model_len": 256,
    "num_gpu_blocks_override": 20,
    "max_num_batched_tokens": 48,
    "async_scheduling": True,
    "speculative_config": MTP,
    "kv_transfer_config": OFFLOADING,
}


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()]


def run(backend: str, **engine_args: Any) -> tuple[list[list[int]], LLM]:
    """Runs twelve requests twice, greedy, seeded, penalised or with a grammar, the second time with kept KV."""
    llm = LLM(distributed_executor_backend=backend, **engine_args)
    prompts = [f"Once upon a time there was a fox {number % 5} " * (1 + number % 4) for number in range(12)]
    grammar = StructuredOutputsParams(regex=r"[a-z]{3}-\d{2}")
    params = [
        SamplingParams(
            temperature=0.0 if number % 3 == 0 else 0.8,
            seed=number,
            max_tokens=20,
            ignore_eos=number % 4 != 3,
            logprobs=2 if number % 6 == 1 else None,
            repetition_penalty=1.1 if number % 5 == 0 else 1.0,
            structured_outputs=grammar if number % 4 == 3 else None,
        )
        for number in range(12)
    ]
    found: list[list[int]] = []
    for _ in range(2):
        outputs = llm.generate(prompts, params, use_tqdm=False)
        found += [output.outputs[0].token_ids for output in outputs]
        llm.check_integrity()
        llm.reset_prefix_cache()
    llm.shutdown()
    return found, llm


@pytest.mark.spread(1)
@pytest.mark.parametrize("engine_args", [{"max_model_len": 256}, EVERYTHING], ids=["plain", "everything"])
def test_the_tokens_are_those_of_one_process(engine_args: dict[str, Any]) -> None:
    here, _ = run("uniproc", **engine_args)
    there, llm = run("mp", **engine_args)
    assert there == here
    if engine_args is EVERYTHING:
        stats = llm.stats()
        assert stats.num_preemptions > 0
        assert stats.remote_kv.num_tokens > 0
        assert stats.speculation.num_accepted_tokens > 0


def test_an_invalid_configuration_is_refused_with_its_own_message() -> None:
    with pytest.raises(ConfigError, match="lower kv_cache_memory to"):
        LLM(max_model_len=64, kv_cache_memory=1 << 62, distributed_executor_backend="mp")


def test_no_process_is_left_behind() -> None:
    before = set(children(os.getpid()))
    llm = LLM(max_model_len=64, distributed_executor_backend="mp")
    (worker,) = set(children(os.getpid())) - before
    llm.shutdown()
    assert is_gone(worker)
    with pytest.raises(EngineDeadError):
        llm.generate("x", use_tqdm=False)
    llm.shutdown()


@pytest.fixture
def executor() -> Iterator[Executor]:
    made = Executor([start_worker(LoadWorker(resolve(EngineArgs(max_model_len=64)), (0, 0)))])
    made.load()
    yield made
    made.shutdown()


def test_exceptions_include_the_workers_traceback(executor: Executor) -> None:
    """The worker was never initialized, so it does not accept a step."""
    executor.execute_model(SchedulerOutput(step=1))
    with pytest.raises(EngineDeadError, match=r"worker \(0, 0\): WireError: a worker expects") as raised:
        executor.sample_tokens(None).result()
    (note,) = raised.value.__notes__
    assert "worker_process.py" in note
    with pytest.raises(EngineDeadError, match="WireError"):
        executor.check()


@pytest.mark.alone
@pytest.mark.parametrize("waits", [False, True], ids=["idle", "waiting"])
def test_a_killed_worker_is_noticed_within_a_second(executor: Executor, waits: bool) -> None:
    died = threading.Event()
    executor.watch(died.set)
    pid = executor._workers[0]._process._process.pid
    killed = time.monotonic()
    timer = threading.Timer(0.1, os.kill, (pid, signal.SIGKILL))
    timer.start()
    wait: Callable[[], object] = died.wait
    if waits:
        with pytest.raises(EngineDeadError, match="signal 9"):
            executor._workers[0]._receive()
    assert wait()
    with pytest.raises(EngineDeadError, match="signal 9"):
        executor.check()
    assert time.monotonic() - killed < 1.1


@pytest.mark.alone
@retried_when_slow
def test_every_client_of_a_killed_worker_receives_its_error_within_a_second() -> None:
    offload = '{"kv_connector": "OffloadingConnector"}'
    with (
        serve("--distributed-executor-backend", "mp", "--kv-transfer-config", offload) as server,
        ThreadPoolExecutor(32) as pool,
        ExitStack() as stack,
    ):
        streams = [stack.enter_context(closing(Stream(server.url, COMPLETIONS, endless()))) for _ in range(32)]
        assert [stream.begin() for stream in streams] == [200] * 32
        wait_for(server, 32)
        core = server.core_pid
        (worker,) = children(core)
        for pid in (server.pid, core, worker):
            maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")
            named = [line for line in maps.splitlines() if "/dev/shm/" in line and not line.endswith("(deleted)")]
            assert not named, "shared memory with a name there would outlive its processes"
        os.kill(worker, signal.SIGKILL)
        killed = time.monotonic()
        ends = pool.map(lambda stream: (ends_with_error(stream.events()), time.monotonic() - killed), streams)
        for error, seconds in ends:
            assert "worker (0, 0) was killed by signal 9" in error["message"]
            check_seconds(seconds, 1.0)
        assert server.process.wait(15) == 1
        eventually(lambda: is_gone(core), 5)


@pytest.mark.alone
def test_an_idle_server_notices_the_death_of_its_worker() -> None:
    with serve("--distributed-executor-backend", "mp") as server:
        (worker,) = children(server.core_pid)
        os.kill(worker, signal.SIGKILL)
        eventually(lambda: call(server.url, "GET", "/health").status == 503, 1)
        assert "signal 9" in call(server.url, "GET", "/health").json()["reason"]
        assert server.process.wait(15) == 1


ANSWERS_FIRST = """
import socket, sys
from penstock.messages.runner_output import ModelRunnerOutput
from penstock.messages.scheduler_output import SchedulerOutput
from penstock.worker.messages import CODEC
from penstock.utils.wire import FrameReader
connection = socket.socket(fileno=int(sys.argv[1]))
connection.sendall(CODEC.encode(ModelRunnerOutput(failed_requests={"answer": "x" * (32 << 20)})))
reader, messages = FrameReader(CODEC), []
while len(messages) < 2:
    messages += reader.feed(connection.recv(1 << 20))
assert isinstance(messages[0], SchedulerOutput)
connection.sendall(CODEC.encode(ModelRunnerOutput()))
"""


@pytest.mark.timeout(60)
def test_a_plan_and_an_answer_larger_than_the_socket_buffers_do_not_deadlock() -> None:
    """A worker that is sending does not read; both messages are larger than a socket's buffers."""
    worker = start_worker(LoadWorker(resolve(EngineArgs()), (0, 0)), ("-c", ANSWERS_FIRST))
    worker.execute_model(SchedulerOutput(step=1, finished_request_ids=frozenset({"y" * (32 << 20)})))
    pending = worker.sample_tokens(None)
    assert len(pending.result().failed_requests["answer"]) == 32 << 20
    assert pending.result() == ModelRunnerOutput()
    worker.shutdown()

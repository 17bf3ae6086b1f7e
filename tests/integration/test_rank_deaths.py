"""The death of a rank: every caller learns at once which one died and why, and nothing of the engine is left."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, ConfigError, EngineDeadError, SamplingParams
from penstock.config.engine import EngineArgs, resolve
from penstock.executor.executor import Executor
from penstock.executor.remote import start_worker
from penstock.messages.scheduler_output import SchedulerOutput
from penstock.parallel.topology import shards
from penstock.utils.child_process import ChildProcess
from penstock.utils.errors import RanksLostError
from penstock.worker.messages import LoadWorker
from tests.integration.raw_http import Stream, call, eventually
from tests.integration.server_probes import COMPLETIONS, endless, ends_with_error, is_gone, wait_for
from tests.integration.server_process import ServerProcess, serve
from tests.integration.timing import check_seconds, kill_soon, retried_when_slow

SMALL: dict[str, Any] = {"max_model_len": 512, "num_gpu_blocks_override": 64, "num_threads": 1}


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()]


def rank_memory_mappings() -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text(encoding="utf-8").count("memfd:penstock")


# ---- Inside a program ----


@pytest.mark.spread(1)
@pytest.mark.alone
@pytest.mark.parametrize(
    ("pp", "tp", "victim", "overlap", "waits"),
    [(1, 2, 0, False, True), (2, 1, 1, True, True), (2, 2, 2, True, False)],
    ids=["in a gather", "in a channel", "while stepping"],
)
@retried_when_slow
def test_generate_raises_after_the_death_of_a_rank(pp: int, tp: int, victim: int, overlap: bool, waits: bool) -> None:
    """A rank that is stopped first makes the others wait for it before it dies."""
    before, mapped = set(children(os.getpid())), rank_memory_mappings()
    llm = LLM(tensor_parallel_size=tp, pipeline_parallel_size=pp, async_scheduling=overlap, **SMALL)
    pids = sorted(set(children(os.getpid())) - before)
    assert len(pids) == pp * tp
    since_killed = kill_soon(pids[victim], seconds_stopped=0.2 if waits else 0)
    stage, tp_rank = shards(pp, tp)[victim]
    with pytest.raises(EngineDeadError, match=rf"worker \({stage}, {tp_rank}\) was killed by signal 9") as raised:
        llm.generate(["Once upon a time"] * 8, SamplingParams(max_tokens=480, ignore_eos=True), use_tqdm=False)
    seconds = since_killed()
    with pytest.raises(EngineDeadError, match="signal 9"):
        llm.generate("x", use_tqdm=False)
    llm.shutdown()
    assert all(is_gone(pid) for pid in pids)
    del llm, raised
    assert rank_memory_mappings() == mapped
    check_seconds(seconds, 1.0)


def test_a_refused_configuration_leaves_no_process() -> None:
    before = set(children(os.getpid()))
    with pytest.raises(ConfigError, match="lower kv_cache_memory to"):
        LLM(tensor_parallel_size=2, max_model_len=64, kv_cache_memory=1 << 62)
    assert set(children(os.getpid())) <= before


# ---- In a server ----


@contextmanager
def server_of_ranks(pp: int, tp: int, *flags: str) -> Iterator[tuple[ServerProcess, int, list[int]]]:
    """Starts a server; yields it, its engine core and the processes of its ranks."""
    sizes = ("--tensor-parallel-size", str(tp), "--pipeline-parallel-size", str(pp), "--num-threads", "1")
    with serve(*sizes, *flags) as server:
        core = server.core_pid
        pids = sorted(children(core))
        assert len(pids) == pp * tp
        yield server, core, pids


@pytest.mark.alone
@retried_when_slow
def test_every_client_receives_its_error_within_a_second() -> None:
    with (
        server_of_ranks(2, 2, "--async-scheduling") as (server, core, pids),
        ThreadPoolExecutor(16) as pool,
        ExitStack() as stack,
    ):
        streams = [stack.enter_context(closing(Stream(server.url, COMPLETIONS, endless()))) for _ in range(16)]
        assert [stream.begin() for stream in streams] == [200] * 16
        wait_for(server, 16)
        os.kill(pids[1], signal.SIGKILL)
        killed = time.monotonic()
        ends = pool.map(lambda stream: (ends_with_error(stream.events()), time.monotonic() - killed), streams)
        for error, seconds in ends:
            assert "worker (0, 1) was killed by signal 9" in error["message"]
            check_seconds(seconds, 1.0)
        assert server.process.wait(15) == 1
        eventually(lambda: all(is_gone(pid) for pid in (core, *pids)), 5)


@pytest.mark.long
@pytest.mark.alone
def test_an_idle_server_notices_the_death_of_a_rank() -> None:
    with server_of_ranks(1, 2) as (server, core, pids):
        os.kill(pids[1], signal.SIGKILL)
        eventually(lambda: call(server.url, "GET", "/health").status == 503, 1)
        assert "worker (0, 1) was killed by signal 9" in call(server.url, "GET", "/health").json()["reason"]
        assert server.process.wait(15) == 1
        eventually(lambda: all(is_gone(pid) for pid in (core, *pids)), 5)


@pytest.mark.long
@pytest.mark.alone
def test_a_stopped_rank_fails_the_health_check_and_does_not_outlive_the_server() -> None:
    flags = ("--health-timeout", "0.5", "--shutdown-timeout", "0")
    with (
        server_of_ranks(1, 2, *flags) as (server, core, pids),
        closing(Stream(server.url, COMPLETIONS, endless())) as stream,
    ):
        assert stream.begin() == 200
        os.kill(pids[1], signal.SIGSTOP)
        eventually(lambda: call(server.url, "GET", "/health").status == 503, 3)
        assert "no step was made" in call(server.url, "GET", "/health").json()["reason"]
        server.terminate()
        eventually(lambda: all(is_gone(pid) for pid in (core, *pids)), 5)


# ---- The executor, with ranks that only fail ----

_PROGRAM = """
import os, signal, socket, sys, time
from pathlib import Path
from penstock.utils.wire import FrameReader
from penstock.utils.child_process import Failed
from penstock.worker.messages import CODEC
has_failed, connection = Path(sys.argv[1]), socket.socket(fileno=int(sys.argv[2]))
reader, messages = FrameReader(CODEC), []
while not messages:
    messages += reader.feed(connection.recv(1 << 20))
"""
_FAILS = _PROGRAM + "has_failed.touch()\n"
RAISES = _FAILS + 'connection.sendall(CODEC.encode(Failed("ValueError: 7", traceback="line 3")))'
CANNOT_START = _FAILS + 'connection.sendall(CODEC.encode(Failed("lower max_num_seqs", is_config=True)))'
DIES = _FAILS + "os.kill(os.getpid(), signal.SIGSEGV)"
HANGS = _PROGRAM + "connection.recv(1 << 20)\nsignal.pause()"
# It does not report the other rank before that has failed, whichever process starts first.
REPORTS_LOST_RANK = (
    _PROGRAM
    + """
while not has_failed.exists():
    time.sleep(0.01)
connection.sendall(CODEC.encode(Failed("they left", is_consequence=True)))
"""
)


@contextmanager
def executor_of(folder: Path, *programs: str) -> Iterator[Executor]:
    """Starts ranks that run these programs; the file `failed` exists once one of them has failed."""
    command = [("-c", program, str(folder / "failed")) for program in programs]
    ranks = zip(shards(1, len(programs)), command, strict=True)
    executor = Executor([start_worker(LoadWorker(resolve(EngineArgs()), shard), program) for shard, program in ranks])
    try:
        yield executor
    finally:
        executor.kill()
        executor.shutdown()


@pytest.mark.parametrize(
    ("cause", "kind", "message"),
    [
        (RAISES, EngineDeadError, r"worker \(0, 1\): ValueError: 7"),
        (CANNOT_START, ConfigError, "lower max_num_seqs"),
        (DIES, EngineDeadError, r"the process of worker \(0, 1\) was killed by signal 11"),
    ],
    ids=["raises", "cannot start", "dies"],
)
@pytest.mark.parametrize("call_that_fails", ["answer", "send", "check"])
def test_the_error_is_that_of_the_failed_rank(
    tmp_path: Path, cause: str, kind: type[Exception], message: str, call_that_fails: str
) -> None:
    """Rank 0, which is asked first, only reports that it lost the other."""
    calls: dict[str, Callable[[Executor], object]] = {
        "answer": lambda executor: executor.load(),
        # Sent at once, without the message that starts its sampling.
        "send": lambda executor: executor.execute_model(SchedulerOutput(step=1, grammar_request_ids=frozenset("a"))),
        "check": lambda executor: executor.check(),
    }
    with executor_of(tmp_path, REPORTS_LOST_RANK, cause) as executor:
        if call_that_fails != "answer":
            for worker in executor._workers:
                worker.load()
            eventually(lambda: worker_has_ended(executor, 0), 10)
        with pytest.raises(kind, match=message) as raised:
            calls[call_that_fails](executor)
        if cause is RAISES:
            assert raised.value.__notes__ == ["In worker (0, 1):\nline 3"]


def worker_has_ended(executor: Executor, rank: int) -> bool:
    process = executor._workers[rank]._process  # pyright: ignore[reportAttributeAccessIssue]
    assert isinstance(process, ChildProcess)
    return process.ended(0) is not None


def test_a_hanging_rank_is_killed(tmp_path: Path) -> None:
    with executor_of(tmp_path, HANGS, DIES) as executor:
        begun = time.monotonic()
        with pytest.raises(EngineDeadError, match=r"worker \(0, 1\) was killed by signal 11") as raised:
            executor.load()
        assert isinstance(raised.value.__context__, RanksLostError)
        assert time.monotonic() - begun < 15
        eventually(lambda: worker_has_ended(executor, 0), 5)


def test_an_error_if_all_ranks_report_a_lost_rank(tmp_path: Path) -> None:
    (tmp_path / "failed").touch()
    missing = executor_of(tmp_path, REPORTS_LOST_RANK, REPORTS_LOST_RANK)
    with missing as executor, pytest.raises(RanksLostError, match="they left"):
        executor.load()

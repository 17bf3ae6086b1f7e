"""Ranks as processes: their exchanges, and the end of the other ranks when one is killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator

import pytest

from penstock.parallel.rank_memory import abort, create_rank_memory
from penstock.parallel.shared_memory import shared_links
from penstock.utils.hosts import free_port
from penstock.utils.shared_memory import attach_memory
from tests.unit import rank_harness
from tests.unit.rank_harness import SOON_S, raises_soon

# Processes that share nothing, forked from one that has imported torch, start in milliseconds.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.unit.rank_harness"])
START_S = 60.0


class Child:
    """A process that ends with its test, and its pipe."""

    def __init__(self, run, *arguments: object, pipe: bool = True) -> None:
        self.pipe, theirs = CONTEXT.Pipe()
        extra = (theirs,) if pipe else ()
        self.process = CONTEXT.Process(target=run, args=(*arguments, *extra), daemon=True)
        self.process.start()
        theirs.close()

    def receive(self, seconds: float = START_S):
        assert self.pipe.poll(seconds), f"nothing was received in {seconds} s"
        return self.pipe.recv()

    def kill(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()


@pytest.fixture
def start() -> Iterator[type[Child]]:
    children: list[Child] = []

    class Tracked(Child):
        def __init__(self, run, *arguments: object, pipe: bool = True) -> None:
            super().__init__(run, *arguments, pipe=pipe)
            children.append(self)

    yield Tracked
    for child in children:
        child.process.kill()
        child.process.join()
        child.pipe.close()


def let_it_wait() -> None:
    """Gives a process that has announced its wait the time to begin it."""
    threading.Event().wait(0.3)


def test_two_engines_of_processes_at_once(start: type[Child]) -> None:
    memories = [create_rank_memory(1, 2) for _ in range(2)]
    ranks = [
        start(rank_harness.gather_in_process, memory.name, len(memory.view), (0, rank), count, 60.0, pipe=False)
        for count, memory in zip((2500, 3000), memories, strict=True)
        for rank in range(2)
    ]
    for rank in ranks:
        rank.process.join(120)
    assert [rank.process.exitcode for rank in ranks] == [0] * 4


def test_a_process_that_sleeps_is_woken_by_another(start: type[Child], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing spins, and without wake-ups these waits would take ten seconds."""
    monkeypatch.setattr("penstock.parallel.rank_memory.usable_cores", lambda: 1)
    memory = create_rank_memory(1, 2)
    ranks = [
        start(rank_harness.gather_in_process, memory.name, len(memory.view), (0, rank), 100, 5.0, pipe=False)
        for rank in range(2)
    ]
    for rank in ranks:
        rank.process.join(60)
    assert [rank.process.exitcode for rank in ranks] == [0, 0]


def test_a_killed_rank_ends_the_others_by_abort(start: type[Child]) -> None:
    """The killed and the remaining process wait for a third rank, which is this process."""
    memory = create_rank_memory(1, 3)
    doomed, remaining = (
        start(rank_harness.wait_in_process, memory.name, len(memory.view), (1, 3), (0, rank)) for rank in (0, 1)
    )
    assert (doomed.receive(), remaining.receive()) == ("waiting", "waiting")
    let_it_wait()
    doomed.kill()
    assert not remaining.pipe.poll(0.3)
    abort(memory)
    assert remaining.receive(SOON_S).startswith("RanksLostError: another rank of this engine has ended")
    with raises_soon():
        shared_links(memory, 1, 3, (0, 2)).group.barrier()


def test_ranks_end_when_their_executor_is_killed(start: type[Child]) -> None:
    executor = start(rank_harness.create_in_process)
    name, num_bytes = executor.receive()
    rank = start(rank_harness.wait_in_process, name, num_bytes, (1, 2), (0, 0))
    assert rank.receive() == "waiting"
    let_it_wait()
    executor.kill()
    assert rank.receive(SOON_S).startswith("RanksLostError: the process that started")
    with pytest.raises(OSError, match="No such file"):
        attach_memory(name, num_bytes)


def test_a_rank_that_waits_handles_signals(start: type[Child]) -> None:
    memory = create_rank_memory(1, 2)
    rank = start(rank_harness.wait_in_process, memory.name, len(memory.view), (1, 2), (0, 0))
    assert rank.receive() == "waiting"
    let_it_wait()
    assert rank.process.pid is not None
    os.kill(rank.process.pid, signal.SIGINT)
    assert rank.receive(SOON_S).startswith("KeyboardInterrupt")


def test_abort_ends_a_wait_for_a_process_killed_in_a_gather(start: type[Child]) -> None:
    """The process is killed at an arbitrary moment, and may leave any state in the memory."""
    for delay in (0.0, 0.011, 0.023):
        memory = create_rank_memory(1, 2)
        ranks = [start(rank_harness.gather_and_report, memory.name, len(memory.view), (0, rank)) for rank in range(2)]
        assert [rank.receive() for rank in ranks] == ["gathering"] * 2
        threading.Event().wait(0.05 + delay)
        ranks[0].kill()
        abort(memory)
        assert ranks[1].receive(SOON_S) == "RanksLostError"


def test_gloo_notices_a_killed_process(start: type[Child]) -> None:
    """Rank (0, 1) is killed; its neighbours in a group and a channel raise, and then rank (1, 0) does."""
    address = f"127.0.0.1:{free_port()}"
    roles = {(0, 0): "gather", (0, 1): "die", (1, 0): "receive", (1, 1): "receive"}
    ranks = {shard: start(rank_harness.wait_with_gloo, address, shard, how) for shard, how in roles.items()}
    assert [rank.receive() for rank in ranks.values()] == ["waiting"] * 4
    let_it_wait()
    ranks[0, 1].kill()
    for shard in ((0, 0), (1, 1), (1, 0)):
        assert ranks[shard].receive(SOON_S)
    for shard in ((0, 0), (1, 1), (1, 0)):
        ranks[shard].process.join(10)
        assert ranks[shard].process.exitcode == 0, "it must not end by SIGABRT"

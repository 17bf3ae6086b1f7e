"""The executor's end of a worker process: what it sends, and when."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from penstock.config.engine import EngineArgs, resolve
from penstock.executor.remote import RemoteWorker
from penstock.messages.scheduler_output import NO_GRAMMARS, SchedulerOutput
from penstock.utils.wire import FrameReader
from penstock.worker.messages import CODEC, LoadWorker, SampleTokens


class NoProcess:
    """A rank's process that must be neither waited for nor killed."""

    def ended(self, seconds: float) -> str | None:
        raise AssertionError("the process was waited for")

    def kill(self) -> None:
        raise AssertionError("the process was killed")


@pytest.fixture
def ends() -> Iterator[tuple[RemoteWorker, socket.socket]]:
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    with ours, theirs:
        yield RemoteWorker(LoadWorker(resolve(EngineArgs()), (0, 0)), ours, NoProcess()), theirs


def test_a_step_without_grammars_wakes_the_worker_once(ends: tuple[RemoteWorker, socket.socket]) -> None:
    worker, theirs = ends
    plan = SchedulerOutput(step=1, num_scheduled_tokens={"a": 1}, num_computed_tokens=(5,))
    worker.execute_model(plan)
    with pytest.raises(BlockingIOError):
        theirs.recv(1 << 16)
    worker.sample_tokens(None)
    assert FrameReader(CODEC).feed(theirs.recv(1 << 16)) == [plan, SampleTokens()]


def test_a_step_that_waits_for_its_grammars_begins_at_once(ends: tuple[RemoteWorker, socket.socket]) -> None:
    worker, theirs = ends
    plan = SchedulerOutput(step=1, num_scheduled_tokens={"a": 1}, grammar_request_ids=frozenset("a"))
    worker.execute_model(plan)
    assert FrameReader(CODEC).feed(theirs.recv(1 << 16)) == [plan]
    worker.sample_tokens(NO_GRAMMARS)
    assert FrameReader(CODEC).feed(theirs.recv(1 << 16)) == [SampleTokens(NO_GRAMMARS)]

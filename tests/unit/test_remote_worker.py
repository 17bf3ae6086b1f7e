"""The executor's end of a worker process: what it sends, and when."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.config.engine import EngineArgs, resolve
from penstock.executor.remote import RemoteWorker
from penstock.messages.requests import RowRequest
from penstock.messages.runner_output import ModelRunnerOutput
from penstock.messages.sampling_params import SamplingParams
from penstock.messages.scheduler_output import NO_GRAMMARS, NewRequestData, SchedulerOutput
from penstock.runner.outputs import ReadyOutput
from penstock.utils import wire
from penstock.utils.child_process import Parent
from penstock.utils.errors import WireError
from penstock.utils.wire import FrameReader
from penstock.worker.messages import CODEC, LoadWorker, SampleTokens, WorkerReady
from penstock.worker.worker_process import WorkerProcess


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


class RecordingWorker:
    """A worker that keeps the plans of its steps."""

    ready = WorkerReady((0, 0), None, runs_ahead=False)

    def __init__(self) -> None:
        self.plans: list[SchedulerOutput] = []

    def execute_model(self, plan: SchedulerOutput) -> None:
        self.plans.append(plan)

    def sample_tokens(self, grammars: object) -> ReadyOutput:
        return ReadyOutput(ModelRunnerOutput())


@pytest.mark.parametrize("grammar_request_ids", [frozenset[str](), frozenset({"0"})], ids=["plain", "grammars"])
def test_new_requests_may_exceed_a_message_together(
    ends: tuple[RemoteWorker, socket.socket], monkeypatch: pytest.MonkeyPatch, grammar_request_ids: frozenset[str]
) -> None:
    """Clients choose how long the list of allowed tokens is, and how many completions have it."""
    worker, theirs = ends
    theirs.setblocking(True)
    params = SamplingParams(allowed_token_ids=list(range(1000, 2000)))
    new = tuple(
        NewRequestData(
            request=RowRequest(request_id=str(number), num_prompt_tokens=1, sampling_params=params, seed=number),
            token_ids=(5,),
            block_ids=((1,),),
            num_computed_tokens=0,
        )
        for number in range(8)
    )
    plans = [
        SchedulerOutput(step=1, new_requests=new, grammar_request_ids=grammar_request_ids),
        SchedulerOutput(step=2, num_scheduled_tokens={"0": 1}),
    ]
    monkeypatch.setattr(wire, "MAX_PAYLOAD_BYTES", 4096)
    with pytest.raises(WireError, match="exceeds 4096"):
        CODEC.encode(plans[0])
    for plan in plans:
        worker.execute_model(plan)
        worker.sample_tokens(None)
    worker._connection.shutdown(socket.SHUT_WR)
    recording: Any = RecordingWorker()
    WorkerProcess(Parent(theirs, CODEC)).serve(recording)
    assert recording.plans == plans

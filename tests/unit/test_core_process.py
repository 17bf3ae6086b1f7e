"""How the engine core's process ends when the core breaks."""

from __future__ import annotations

import queue
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.engine import core_process
from penstock.engine.core_messages import CODEC
from penstock.engine.core_process import CoreProcess, _Hangup, _Waker
from penstock.engine.joint_cores import JointCores
from penstock.messages.stats import SchedulerStats, StepReport
from penstock.utils.child_process import Channel, Failed, Parent
from penstock.utils.wire import FrameReader
from tests.processes import started

BREAKS = """
import os, sys
from penstock.engine import core_process
from penstock.utils.errors import EngineDeadError

class BrokenCore:
    cores = ()
    patience = 0.0

    def step(self, waits):
        raise EngineDeadError("the device is on fire")

    def shutdown(self):
        {shutdown}

    def __del__(self):
        os.abort()

core_process._start = lambda *_: BrokenCore()
sys.exit(core_process.main())
"""


@pytest.mark.parametrize(
    ("shutdown", "code"),
    [("pass", 1), ("raise RuntimeError('still on fire')", 1), ("os.abort()", -signal.SIGABRT)],
    ids=["frees", "raises", "aborts"],
)
def test_the_reason_is_sent_before_anything_is_freed(shutdown: str, code: int) -> None:
    """Torch aborts the process when it frees memory of a broken GPU."""
    ours, theirs = socket.socketpair()
    script = BREAKS.format(shutdown=shutdown)
    with ours, theirs:
        command = [sys.executable, "-c", script, str(theirs.fileno())]
        with started(command, pass_fds=(theirs.fileno(),), stderr=subprocess.DEVNULL) as process:
            theirs.close()
            received = b"".join(iter(lambda: ours.recv(1 << 16), b""))
            (failed,) = FrameReader(CODEC).feed(received)
            assert failed == Failed("the device is on fire", traceback=failed.traceback)
            assert "in step" in failed.traceback
            assert process.wait(30) == code


def test_the_cores_are_freed_before_the_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []

    class IdleCore:
        def shutdown(self) -> None: ...

    class FrontEnd:
        def __iter__(self) -> Iterator[Any]:
            return iter(())

        def live(self, work: Callable[[], None], log: Any, *others: Callable[[], None]) -> int:
            work()
            kept.extend(others)
            return 0

    def start(*_: Any) -> IdleCore:
        core = IdleCore()
        kept.append(weakref.ref(core))
        return core

    monkeypatch.setattr(Parent, "of_this_process", lambda _: FrontEnd())
    monkeypatch.setattr(core_process, "_start", start)
    monkeypatch.setattr(core_process, "CoreProcess", lambda *_: SimpleNamespace(run=lambda: None))
    assert core_process.main() == 0
    core, *others = kept
    assert core() is None
    for each in others:
        each()


class WaitingCore:
    """Cores whose requests all wait for KV of other engines, for a limited time."""

    def __init__(self) -> None:
        self.cores = ()
        self.patience: float | None = 60.0
        self.steps = queue.SimpleQueue[float | None]()

    def step(self, *, waits: bool) -> list[StepReport]:
        assert not waits, "messages of the front end may arrive meanwhile"
        patience, self.patience = self.patience, None
        self.steps.put(patience)
        stats = SchedulerStats(0, 1, 0.0, 0, 0, 0)
        return [StepReport(outputs=(), events=(), num_tokens=0, stats=stats)]

    def wake(self) -> None:
        self.patience = 0.0


def test_no_step_is_taken_until_kv_arrives_or_is_overdue() -> None:
    core, inbox = WaitingCore(), queue.SimpleQueue[Any]()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        running = threading.Thread(target=CoreProcess(cast(JointCores, core), Channel(theirs, CODEC), inbox).run)
        running.start()
        with pytest.raises(queue.Empty):
            core.steps.get(timeout=0.05)
        core.wake()
        _Waker(inbox).wake()
        assert core.steps.get(timeout=10.0) == 0.0
        core.patience = 0.05
        _Waker(inbox).wake()
        assert core.steps.get(timeout=10.0) == 0.05, "the wait has a limit"
        inbox.put(_Hangup())
        running.join(10.0)
        assert not running.is_alive()

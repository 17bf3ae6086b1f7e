"""A rank in a process of its own, on this host.

The process is started by command, never forked, and joined to this one by a socket pair over which the messages of
`worker.messages` travel. Answers come in the order of the questions and are read by the thread that waits for them, so
that a step takes no detour through another thread. A second thread only watches for the end of the connection: a dead
rank is reported at once, even while no answer is expected.
"""

from __future__ import annotations

import contextlib
import select
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from penstock.executor.executor import Later, Pending
from penstock.messages.runner_output import ModelRunnerOutput
from penstock.messages.scheduler_output import GrammarOutput, SchedulerOutput
from penstock.utils.errors import ConfigError, EngineDeadError, RanksLostError, WireError
from penstock.utils.interrupts import interrupts_blocked
from penstock.utils.wire import FrameReader
from penstock.worker.messages import (
    CODEC,
    InitializeWorker,
    LoadWorker,
    SampleTokens,
    WorkerFacts,
    WorkerFailed,
    WorkerReady,
)

_PROGRAM = ("-m", "penstock.worker.worker_process")
_RECEIVE_BYTES = 1 << 16
_SOCKET_BYTES = 4 << 20
_EXIT_SECONDS = 10.0
_DEATH_SECONDS = 0.5


class ProcessWorker:
    """One worker process and the connection to it (`WorkerHandle`). One thread drives it."""

    def __init__(
        self, load: LoadWorker, abort: Callable[[], None] | None = None, program: Sequence[str] = _PROGRAM
    ) -> None:
        """`program` is what Python runs, with the socket's descriptor as its last argument.

        One of several ranks is told how to `abort` the waits of the others when it dies.
        """
        self._load = load
        self._connection, theirs = socket.socketpair()
        for each in (self._connection, theirs):
            # Room for a step's messages, so that sending them rarely blocks; the system may grant less.
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
        command = [sys.executable, *program, str(theirs.fileno())]
        with theirs, interrupts_blocked():
            self._process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL)
        self._reader = FrameReader(CODEC)
        self._received: deque[Any] = deque()
        self._failure: Exception | None = None
        self._is_closing = False
        if abort is not None:
            self.watch(abort)

    def load(self) -> Pending[WorkerFacts]:
        return self._ask(self._load)

    def initialize(self, plan: InitializeWorker) -> Pending[WorkerReady]:
        return self._ask(plan)

    def execute_model(self, plan: SchedulerOutput) -> None:
        self._send(plan)

    def sample_tokens(self, grammars: GrammarOutput | None) -> Pending[ModelRunnerOutput]:
        return self._ask(SampleTokens(grammars))

    def watch(self, on_death: Callable[[], None]) -> None:
        threading.Thread(target=self._watch, args=(on_death,), name="penstock-watch-worker", daemon=True).start()

    def check(self) -> None:
        while self._failure is not None or self._poll(select.POLLRDHUP, timeout=0):
            self._receive()

    def shutdown(self) -> None:
        self._is_closing = True
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._connection.close()

    def _ask(self, message: Any) -> Pending[Any]:
        self._send(message)
        return Later(self._receive)

    def _send(self, message: Any) -> None:
        """While there is no room, what the worker sends is read: one that waits for room to answer reads nothing."""
        data = memoryview(CODEC.encode(message))
        try:
            while data:
                with contextlib.suppress(BlockingIOError):
                    data = data[self._connection.send(data, socket.MSG_DONTWAIT) :]
                    continue
                if self._poll(select.POLLIN | select.POLLOUT) & select.POLLIN:
                    self._read()
        except OSError:
            # Why it hung up may be among what it sent before.
            while True:
                self._receive()

    def _receive(self) -> Any:
        """The next answer. Raises ConfigError or EngineDeadError, now and from then on, when there will be none."""
        if self._failure is not None:
            raise self._failure
        while not self._received:
            self._read()
        message = self._received.popleft()
        if isinstance(message, WorkerFailed):
            message = self._told(message)
        if isinstance(message, Exception):
            self._failure = message
            raise message
        return message

    def _read(self) -> None:
        """Waits for messages, or for the end in place of them."""
        try:
            data = self._connection.recv(_RECEIVE_BYTES)
            self._received.extend(self._reader.feed(data) if data else [self._unexpected_end()])
        except OSError:
            self._received.append(self._unexpected_end())
        except WireError as error:
            self._process.kill()
            self._received.append(EngineDeadError(f"{self._name} sent what cannot be read: {error}"))

    @property
    def _name(self) -> str:
        return f"worker {self._load.shard}"

    def _told(self, failed: WorkerFailed) -> Exception:
        """The worker's own account of its end."""
        kind = RanksLostError if failed.is_consequence else EngineDeadError
        error = ConfigError(failed.message) if failed.is_config else kind(f"{self._name}: {failed.message}")
        if failed.traceback:
            error.add_note(f"In {self._name}:\n{failed.traceback}")
        return error

    def _unexpected_end(self) -> EngineDeadError:
        try:
            code = self._process.wait(_DEATH_SECONDS)
        except subprocess.TimeoutExpired:
            return EngineDeadError(f"{self._name} hung up")
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return EngineDeadError(f"the process of {self._name} {how}")

    def _watch(self, on_death: Callable[[], None]) -> None:
        # A connection that is closed by now was closed here.
        with contextlib.suppress(ValueError, OSError):
            self._poll(select.POLLRDHUP)
        if not self._is_closing:
            on_death()

    def _poll(self, events: int, timeout: int | None = None) -> int:
        """Which of these events of the connection have happened, within so many milliseconds."""
        poll = select.poll()
        poll.register(self._connection, events)
        return next((mask for _, mask in poll.poll(timeout)), 0)

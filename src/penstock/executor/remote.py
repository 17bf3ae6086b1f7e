"""A rank in another process: the connection to it, its responses in order, and the reason if it fails.

Responses arrive in the order of the requests and are read by the thread that waits for them, so that a step involves no
other thread. Another thread only watches for the end of the connection: a dead rank is reported at once, even while no
response is expected. Its `RankProcess` handles how the process was started, how it ended and how it is killed.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from msgspec.structs import replace

from penstock.config import env
from penstock.executor.executor import Later, Pending
from penstock.messages.runner_output import ModelRunnerOutput
from penstock.messages.scheduler_output import GrammarOutput, SchedulerOutput
from penstock.utils.child_process import ChildProcess, Failed
from penstock.utils.clock import SystemClock
from penstock.utils.errors import ConfigError, EngineDeadError, RanksLostError, WireError
from penstock.utils.wire import FrameReader
from penstock.worker.messages import (
    CODEC,
    InitializeWorker,
    LoadWorker,
    SampleTokens,
    WorkerFacts,
    WorkerReady,
)

_PROGRAM = ("-m", "penstock.worker.worker_process")
_RECEIVE_BYTES = 1 << 16
_EXIT_SECONDS = 10.0
_KILLED_SECONDS = 5.0
_DEATH_SECONDS = 0.5


class RankProcess(Protocol):
    """The process of one rank, for the process that started it: see `ChildProcess`."""

    def ended(self, seconds: float) -> str | None: ...
    def kill(self) -> None: ...


class RemoteWorker:
    """One worker process and the connection to it (`WorkerHandle`). One thread drives it."""

    def __init__(self, load: LoadWorker, connection: socket.socket, process: RankProcess) -> None:
        self._load = load
        self._connection = connection
        self._process = process
        self._reader = FrameReader(CODEC)
        self._received: deque[Any] = deque()
        self._unsent = b""
        self._failure: Exception | None = None
        self._was_killed = False
        self._closed: float | None = None
        # Ends the process and its watchers when this object is no longer referenced.
        self._hang_up = weakref.finalize(self, _hang_up, connection)

    def load(self) -> Pending[WorkerFacts]:
        return self._ask(self._load)

    def initialize(self, plan: InitializeWorker) -> Pending[WorkerReady]:
        return self._ask(plan)

    def execute_model(self, plan: SchedulerOutput) -> None:
        # New requests are messages of their own: hundreds with long prompts or lists of tokens exceed a frame.
        self._unsent = b"".join(map(CODEC.encode, (*plan.new_requests, replace(plan, new_requests=()))))
        # Without a grammar the next message follows at once: both are sent together, so that the process wakes up once.
        if plan.grammar_request_ids:
            self._send()

    def sample_tokens(self, grammars: GrammarOutput | None) -> Pending[ModelRunnerOutput]:
        return self._ask(SampleTokens(grammars))

    def watch(self, on_death: Callable[[], None]) -> None:
        arguments = (self._connection, self._hang_up, on_death)
        threading.Thread(target=_watch, args=arguments, name="penstock-watch-worker", daemon=True).start()

    def check(self) -> None:
        while self._failure is not None or _poll(self._connection, select.POLLRDHUP, timeout=0):
            self._receive()

    def kill(self) -> None:
        """Kills the process; one that has ended by itself still reports its own reason."""
        with contextlib.suppress(OSError, ValueError):
            self._was_killed = self._was_killed or not _poll(self._connection, select.POLLRDHUP, timeout=0)
        self._process.kill()

    def hang_up(self) -> None:
        if self._closed is None:
            self._closed = SystemClock().now()
            self._hang_up()

    def shutdown(self) -> None:
        self.hang_up()
        assert self._closed is not None, "hang_up has set it"
        if self._process.ended(max(0.0, self._closed + _EXIT_SECONDS - SystemClock().now())) is None:
            self._process.kill()
            self._process.ended(_KILLED_SECONDS)
        self._connection.close()

    def _ask(self, message: Any) -> Pending[Any]:
        self._send(message)
        return Later(self._receive)

    def _send(self, *messages: Any) -> None:
        """Sends what is unsent and then these. While the buffer is full, reads the worker's messages: it may be blocked
        sending a response.
        """
        data, self._unsent = memoryview(b"".join((self._unsent, *map(CODEC.encode, messages)))), b""
        try:
            while data:
                with contextlib.suppress(BlockingIOError):
                    data = data[self._connection.send(data, socket.MSG_DONTWAIT) :]
                    continue
                if _poll(self._connection, select.POLLIN | select.POLLOUT) & select.POLLIN:
                    self._read()
        except OSError:
            # Its last messages may contain the reason for the disconnection.
            while True:
                self._receive()

    def _receive(self) -> Any:
        """Returns the next response. Raises ConfigError or EngineDeadError, now and from then on, if there will be
        none.
        """
        if self._failure is not None:
            raise self._failure
        while not self._received:
            self._read()
        message = self._received.popleft()
        if isinstance(message, Failed):
            message = self._told(message)
        if isinstance(message, Exception):
            self._failure = message
            raise message
        return message

    def _read(self) -> None:
        """Waits for messages or the end of the connection."""
        try:
            data = self._connection.recv(_RECEIVE_BYTES)
            self._received.extend(self._reader.feed(data) if data else [self._unexpected_end()])
        except OSError:
            self._received.append(self._unexpected_end())
        except WireError as error:
            self._process.kill()
            self._received.append(EngineDeadError(f"{self._name} sent an invalid message: {error}"))

    @property
    def _name(self) -> str:
        return f"worker {self._load.name}"

    def _told(self, failed: Failed) -> Exception:
        """Returns the worker's own reason for its end."""
        kind = RanksLostError if failed.is_consequence else EngineDeadError
        error = ConfigError(failed.message) if failed.is_config else kind(f"{self._name}: {failed.message}")
        if failed.traceback:
            error.add_note(f"In {self._name}:\n{failed.traceback}")
        return error

    def _unexpected_end(self) -> EngineDeadError:
        if self._was_killed:
            return RanksLostError(f"{self._name} was stopped because another rank had ended")
        how = self._process.ended(_DEATH_SECONDS)
        closed = f"{self._name} closed the connection"
        return EngineDeadError(closed if how is None else f"the process of {self._name} {how}")


def start_worker(
    load: LoadWorker, program: Sequence[str] = _PROGRAM, environment: Mapping[str, str] | None = None
) -> RemoteWorker:
    """Starts a rank on this host. `environment` is added to that of this process."""
    process = ChildProcess(program, env.for_child(environment))
    return RemoteWorker(load, process.connection, process)


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _watch(connection: socket.socket, hang_up: weakref.finalize[..., Any], on_death: Callable[[], None]) -> None:
    # If the connection is closed by now, it was closed here.
    with contextlib.suppress(ValueError, OSError):
        _poll(connection, select.POLLRDHUP)
    if hang_up.alive:
        on_death()


def _poll(connection: socket.socket, events: int, timeout: int | None = None) -> int:
    """Waits this many milliseconds and returns which of these events of the connection have occurred."""
    poll = select.poll()
    poll.register(connection, events)
    return next((mask for _, mask in poll.poll(timeout)), 0)

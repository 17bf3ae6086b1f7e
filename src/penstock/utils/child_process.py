"""A child process of Penstock, from its start to its end, for both sides.

A child is started by command, never forked, and is connected to its parent by a socket, over which typed messages
travel. Only its parent decides when it ends: it ignores SIGINT and SIGTERM, which a terminal or a supervisor sends to
both. It never outlives its parent: the end of the connection makes it clean up and end, within ten seconds. A child
that may hang or crash, and has nothing to clean up, is killed by the kernel when its parent ends, whatever it does
then. A child that fails reports why with `Failed`, its last message.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import FileIO
from typing import Any, NoReturn

import msgspec

from penstock.utils.errors import ConfigError, EngineDeadError, RanksLostError
from penstock.utils.interrupts import interrupts_blocked
from penstock.utils.wire import Codec, FrameReader

SOCKET_BYTES = 4 << 20
"""Buffer size for messages, so that sending them rarely blocks; the system may grant less."""

_RECEIVE_BYTES = 1 << 16
_GRACE_SECONDS = 10.0
_CRASHED = 1


class Failed(msgspec.Struct, frozen=True):
    """The child ends after this: its configuration is invalid (`is_config`), another rank that it needs has ended
    (`is_consequence`), or it failed.
    """

    message: str
    is_config: bool = False
    is_consequence: bool = False
    traceback: str = ""

    @classmethod
    def because_of(cls, error: Exception) -> Failed:
        if isinstance(error, ConfigError):
            return cls(str(error), is_config=True)
        message = str(error) if isinstance(error, EngineDeadError) else f"{type(error).__name__}: {error}"
        trace = "".join(traceback.format_exception(error))
        return cls(message, is_consequence=isinstance(error, RanksLostError), traceback=trace)


class Channel:
    """Messages over a stream socket. One thread sends, and one receives by iterating."""

    def __init__(self, connection: socket.socket, codec: Codec) -> None:
        self.connection = connection
        self._codec = codec
        self._reader = FrameReader(codec)

    def send(self, message: Any) -> None:
        """Raises OSError if the other side has ended."""
        self.connection.sendall(self._codec.encode(message))

    def __iter__(self) -> Iterator[Any]:
        """Yields messages until the other side ends the connection. Raises OSError or WireError."""
        while data := self.connection.recv(_RECEIVE_BYTES):
            yield from self._reader.feed(data)


# ---- The parent's side ----


class ChildProcess:
    """A child, for its parent. `connection` is the parent's end of the socket."""

    def __init__(
        self, program: Sequence[str], environment: Mapping[str, str] | None = None, *, has_lifeline: bool = False
    ) -> None:
        """Starts it. `program` are Python's arguments; `environment` is this process's if it is None.

        With a lifeline the kernel kills the child at the end of this process, or when this object is no longer
        referenced. Raises OSError.
        """
        self._lifeline: FileIO | None = None
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            self.connection, socket_of_child = socket.socketpair()
            ours.callback(self.connection.close)
            theirs.callback(socket_of_child.close)
            for each in (self.connection, socket_of_child):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
            inherited = [socket_of_child.fileno()]
            if has_lifeline:
                end_of_child, end_of_parent = os.pipe()
                self._lifeline = FileIO(end_of_parent, "w")
                ours.callback(self._lifeline.close)
                theirs.callback(os.close, end_of_child)
                inherited.append(end_of_child)
            with interrupts_blocked():
                self._process = subprocess.Popen(
                    [sys.executable, *program, *map(str, inherited)],
                    pass_fds=inherited,
                    stdin=subprocess.DEVNULL,
                    # Output of libraries must not mix with that of the program.
                    stdout=sys.__stderr__,
                    env=environment,
                )
            ours.pop_all()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ended(self, seconds: float | None) -> str | None:
        """Waits this long for its end, None without a limit. Returns how it ended, None while it runs."""
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"

    def kill(self) -> None:
        """Kills it, also if it is stopped or has ended. May be called from any thread."""
        self._process.kill()

    def end(self) -> None:
        """Kills it, waits for its end and closes the connection. Idempotent."""
        self.kill()
        self._process.wait()
        self.connection.close()
        if self._lifeline is not None:
            self._lifeline.close()


# ---- The child's side ----


class Parent(Channel):
    """The parent, for its child."""

    has_lifeline = False

    @classmethod
    def of_this_process(cls, codec: Codec) -> Parent:
        """Returns the parent that started this process by `ChildProcess`. Called first in the process."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        descriptors = [int(argument) for argument in sys.argv[1:]]
        parent = cls(socket.socket(fileno=descriptors.pop(0)), codec)
        if descriptors:
            parent.has_lifeline = True
            # Its end is expected, and a core dump would contain all of its memory.
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            die_with(descriptors.pop(0))
        return parent

    def live(
        self,
        work: Callable[[], None],
        log: Callable[[Exception], None],
        clean_up: Callable[[], None] = lambda: None,
        kill_others: Callable[[], None] = lambda: None,
    ) -> int:
        """Works until the parent disconnects, and then cleans up. Returns the exit code.

        A failure is logged, except for a ConfigError, and ends the process (`crash`). `kill_others` kills processes
        that would not notice the end of this one, before it is killed because it takes too long to end.
        """
        ended = threading.Event()
        if not self.has_lifeline:
            threading.Thread(target=self._end_with_parent, args=(ended, kill_others), daemon=True).start()
        try:
            try:
                work()
            except (EOFError, BrokenPipeError, ConnectionResetError):
                # The work has other connections, which may end too.
                if not _has_ended(self.connection, 0):
                    raise
            clean_up()
        except Exception as error:  # noqa: BLE001 - it ends the process
            if not isinstance(error, ConfigError):
                log(error)
            self.crash(error, clean_up)
        ended.set()
        return 0

    def crash(self, error: Exception, clean_up: Callable[[], None] = lambda: None) -> NoReturn:
        """Reports the error, then cleans up, which may abort, and ends the process without freeing anything else:
        torch aborts when memory of a failed GPU is freed.
        """
        with contextlib.suppress(OSError):
            self.send(Failed.because_of(error))
            # The parent does not wait for the following, which must not exceed the grace period.
            self.connection.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(Exception):
            clean_up()
        sys.stderr.flush()
        os._exit(_CRASHED)

    def _end_with_parent(self, ended: threading.Event, kill_others: Callable[[], None]) -> None:
        """Ends the process if the parent has disconnected and the running work does not end."""
        _has_ended(self.connection, None)
        if not ended.wait(_GRACE_SECONDS):
            kill_others()
            signal.raise_signal(signal.SIGKILL)


def die_with(lifeline: int) -> None:
    """Makes the kernel send SIGKILL to this process when the other end of the pipe is closed."""
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if _has_ended(lifeline, 0):
        signal.raise_signal(signal.SIGKILL)


def _has_ended(connection: socket.socket | int, milliseconds: int | None) -> bool:
    """Waits this long for the other end of the socket or pipe to be closed; without a limit for None."""
    poll = select.poll()  # not `select`, which refuses the numbers of a process with many open files
    poll.register(connection, select.POLLRDHUP)
    return bool(poll.poll(milliseconds))

"""The engine's side of a helper process: starts it by command, sends it requests, and ends it by a signal."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from typing import Any, TypeVar

import numpy as np

from penstock.config import env
from penstock.kv_transfer.transports.helper_messages import (
    CODEC,
    AgentFailed,
    AgentReady,
    Landed,
    OpenAgent,
    Read,
    ServedMemory,
)
from penstock.utils.errors import ConfigError, PeerError, WireError
from penstock.utils.interrupts import interrupts_blocked
from penstock.utils.wire import FrameReader

_PROGRAM = "penstock.kv_transfer.transports.helper_process"
_RECEIVE_BYTES = 1 << 16

_Answer = TypeVar("_Answer")


class HelperProcess:
    """One thread sends requests; any thread may call `kill`. After `end`, nothing that the process began moves."""

    def __init__(self, defaults: dict[str, str]) -> None:
        """`defaults` are values of environment variables that the user has not set. Raises PeerError."""
        self._reader = FrameReader(CODEC)
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            try:
                self._connection, socket_of_helper = socket.socketpair()
                ours.callback(self._connection.close)
                theirs.callback(socket_of_helper.close)
                hang_up, lifeline = os.pipe()
                theirs.callback(os.close, hang_up)
                self._lifeline = os.fdopen(lifeline, "wb", buffering=0)
                ours.callback(self._lifeline.close)
                inherited = (socket_of_helper.fileno(), hang_up)
                with interrupts_blocked():
                    self._process = subprocess.Popen(
                        [sys.executable, "-m", _PROGRAM, *map(str, inherited)],
                        pass_fds=inherited,
                        stdin=subprocess.DEVNULL,
                        stdout=sys.__stderr__,
                        env=env.for_child(defaults=defaults),
                    )
            except OSError as error:
                raise PeerError(f"a helper process cannot be started: {error}") from error
            ours.pop_all()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def open(self, message: OpenAgent, seconds: float) -> ServedMemory:
        """Opens an agent. Raises PeerError, or ConfigError if the configuration or the installation must change."""
        self._connection.settimeout(seconds)
        memory = self._ask(message, AgentReady).memory
        self._connection.settimeout(None)
        return memory

    def read(self, runs: np.ndarray) -> None:
        """Returns when all bytes of the runs, [n, 3] int64, have landed. After a PeerError they may still land."""
        self._ask(Read(runs), Landed)

    def wait_for_end(self) -> str:
        """Waits until the process has ended, and returns how."""
        code = self._process.wait()
        return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"

    def kill(self) -> None:
        """Kills the process. May be called from any thread, at any time."""
        self._process.kill()

    def end(self) -> None:
        """Kills the process and waits for its end. Called by the thread that sends requests; idempotent."""
        self.kill()
        self._process.wait()
        self._connection.close()
        self._lifeline.close()

    def _ask(self, message: Any, kind: type[_Answer]) -> _Answer:
        try:
            self._connection.sendall(CODEC.encode(message))
            answer = self._receive()
        except TimeoutError:
            raise PeerError("a helper process has not answered in time") from None
        except (OSError, WireError) as error:
            raise PeerError(f"a helper process has ended: {error}") from error
        if isinstance(answer, AgentFailed):
            raise (ConfigError if answer.is_config else PeerError)(answer.reason)
        if not isinstance(answer, kind):
            raise PeerError(f"a helper process has answered with {type(answer).__name__}")
        return answer

    def _receive(self) -> Any:
        while data := self._connection.recv(_RECEIVE_BYTES):
            for message in self._reader.feed(data):
                return message
        raise PeerError("a helper process has ended")

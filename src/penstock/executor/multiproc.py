"""A rank in a separate process on this host: started by command, never forked, and connected by a socket pair."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

from penstock.config import env
from penstock.executor.remote import SOCKET_BYTES, RemoteWorker
from penstock.utils.interrupts import interrupts_blocked
from penstock.worker.messages import LoadWorker

_PROGRAM = ("-m", "penstock.worker.worker_process")


def start_worker(
    load: LoadWorker, program: Sequence[str] = _PROGRAM, environment: Mapping[str, str] | None = None
) -> RemoteWorker:
    """Starts the process. `program` are Python's arguments, followed by the socket's descriptor; `environment` is
    added to that of this process.
    """
    ours, theirs = socket.socketpair()
    for each in (ours, theirs):
        each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
    command = [sys.executable, *program, str(theirs.fileno())]
    with theirs, interrupts_blocked():
        process = subprocess.Popen(
            command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, env=env.for_child(environment)
        )
    return RemoteWorker(load, ours, ChildProcess(process))


class ChildProcess:
    """A child of this process (`RankProcess`)."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    def ended(self, seconds: float) -> str | None:
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"

    def kill(self) -> None:
        self._process.kill()

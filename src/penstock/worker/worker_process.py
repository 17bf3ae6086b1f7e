"""A worker in a separate process, which receives messages from a socket and sends responses.

    python -m penstock.worker.worker_process FD

`FD` is an inherited stream socket to the executor. The process ends when that socket does, so it never outlives the
engine core; like the core it ignores SIGINT and SIGTERM. One thread reads, executes steps and responds; if a device
computes while the next step is launched, another thread waits for the results and responds.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn, TypeVar

from penstock.messages.scheduler_output import SchedulerOutput
from penstock.runner.outputs import PendingOutput
from penstock.utils import logging
from penstock.utils.errors import ConfigError, RanksLostError, WireError
from penstock.utils.wire import FrameReader
from penstock.worker.messages import CODEC, InitializeWorker, LoadWorker, SampleTokens, WorkerFailed
from penstock.worker.worker import Worker, load_worker

logger = logging.get_logger(__name__)

_Message = TypeVar("_Message")

_RECEIVE_BYTES = 1 << 16
_GRACE_SECONDS = 10.0
_CRASHED = 1


class WorkerProcess:
    """Runs one rank over a socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._messages = self._receive()

    def run(self) -> None:
        """Raises EOFError if the executor disconnects before the first step, and returns if it does so later."""
        loaded = load_worker(self._expect(LoadWorker))
        self._send(loaded.facts)
        worker = loaded.initialize(self._expect(InitializeWorker))
        # Objects that exist now are permanent: exclude them from garbage collection.
        gc.collect()
        gc.freeze()
        self._send(worker.ready)
        try:
            self.serve(worker)
        except (BrokenPipeError, ConnectionResetError):
            # The executor has disconnected. After any other error the process must report why before other ranks notice
            # its end.
            worker.shutdown()
            raise
        worker.shutdown()

    def serve(self, worker: Worker) -> None:
        """Executes steps until the executor disconnects."""
        with ThreadPoolExecutor(1, "penstock-answers") as answers:
            for message in self._messages:
                match message:
                    case SchedulerOutput():
                        worker.execute_model(message)
                    case SampleTokens(grammars):
                        pending = worker.sample_tokens(grammars)
                        if worker.ready.runs_ahead:
                            answers.submit(self._answer_later, pending)
                        else:
                            self._send(pending.result())
                    case _:
                        raise WireError(f"a worker takes no {type(message).__name__}")

    def _answer_later(self, pending: PendingOutput) -> None:
        try:
            self._send(pending.result())
        except Exception as error:  # noqa: BLE001 - it ends the process
            crash(error, self._connection)

    def _expect(self, kind: type[_Message]) -> _Message:
        for message in self._messages:
            if isinstance(message, kind):
                return message
            raise WireError(f"a worker expects a {kind.__name__} now, not a {type(message).__name__}")
        raise EOFError

    def _send(self, message: Any) -> None:
        self._connection.sendall(CODEC.encode(message))

    def _receive(self) -> Iterator[Any]:
        reader = FrameReader(CODEC)
        while data := self._connection.recv(_RECEIVE_BYTES):
            yield from reader.feed(data)


def crash(error: Exception, connection: socket.socket) -> NoReturn:
    """Reports the error and ends the process without cleanup: torch aborts when memory of a failed GPU is freed."""
    is_config, is_consequence = isinstance(error, ConfigError), isinstance(error, RanksLostError)
    message = str(error) if is_config else f"{type(error).__name__}: {error}"
    trace = "" if is_config else "".join(traceback.format_exception(error))
    with contextlib.suppress(OSError):
        connection.sendall(CODEC.encode(WorkerFailed(message, trace, is_config, is_consequence)))
        connection.shutdown(socket.SHUT_RDWR)
    sys.stderr.flush()
    os._exit(_CRASHED)


def _exit_with_executor(connection: socket.socket, ended: threading.Event) -> None:
    """Ends the process if the executor has disconnected and the running step does not end."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    poll.poll()
    if not ended.wait(_GRACE_SECONDS):
        signal.raise_signal(signal.SIGKILL)


def live(connection: socket.socket) -> int:
    """Runs a rank until the executor disconnects; a rank that fails reports why and ends the process. Returns the exit
    code.
    """
    # Output of libraries must not mix with that of the front end.
    sys.stdout = sys.stderr
    ended = threading.Event()
    threading.Thread(target=_exit_with_executor, args=(connection, ended), daemon=True).start()
    try:
        WorkerProcess(connection).run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return 0
    except Exception as error:
        if isinstance(error, RanksLostError):
            logger.info("a worker stops: %s", error)
        else:
            logger.exception("a worker stops")
        crash(error, connection)
    finally:
        ended.set()
    return 0


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return live(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    sys.exit(main())

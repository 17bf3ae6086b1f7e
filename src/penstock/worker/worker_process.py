"""A worker in a separate process, which receives messages from a socket and sends responses.

    python -m penstock.worker.worker_process FD

`FD` is an inherited stream socket to the executor (`utils/child_process.py`). One thread reads, executes steps and
responds; if a device computes while the next step is launched, another thread waits for the results and responds.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from msgspec.structs import replace

from penstock.messages.scheduler_output import NewRequestData, SchedulerOutput
from penstock.runner.outputs import PendingOutput
from penstock.utils import logging
from penstock.utils.child_process import Parent
from penstock.utils.errors import RanksLostError, WireError
from penstock.worker.messages import CODEC, InitializeWorker, LoadWorker, SampleTokens
from penstock.worker.worker import Worker, load_worker

logger = logging.get_logger(__name__)

_Message = TypeVar("_Message")


class WorkerProcess:
    """Runs one rank over a socket."""

    def __init__(self, executor: Parent) -> None:
        self._executor = executor
        self._messages = iter(executor)

    def run(self) -> None:
        """Raises EOFError if the executor disconnects before the first step, and returns if it does so later."""
        loaded = load_worker(self._expect(LoadWorker))
        self._executor.send(loaded.facts)
        worker = loaded.initialize(self._expect(InitializeWorker))
        # Objects that exist now are permanent: exclude them from garbage collection.
        gc.collect()
        gc.freeze()
        self._executor.send(worker.ready)
        # If the executor has disconnected. After any other error the process must report why before other ranks notice
        # its end.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.serve(worker)
        worker.shutdown()

    def serve(self, worker: Worker) -> None:
        """Executes steps until the executor disconnects."""
        with ThreadPoolExecutor(1, "penstock-answers") as answers:
            new: list[NewRequestData] = []
            for message in self._messages:
                match message:
                    case SchedulerOutput():
                        worker.execute_model(replace(message, new_requests=tuple(new)))
                        new.clear()
                    case NewRequestData():
                        new.append(message)
                    case SampleTokens(grammars):
                        pending = worker.sample_tokens(grammars)
                        if worker.ready.runs_ahead:
                            answers.submit(self._answer_later, pending)
                        else:
                            self._executor.send(pending.result())
                    case _:
                        raise WireError(f"a worker takes no {type(message).__name__}")

    def _answer_later(self, pending: PendingOutput) -> None:
        try:
            self._executor.send(pending.result())
        except Exception as error:  # noqa: BLE001 - it ends the process
            self._executor.crash(error)

    def _expect(self, kind: type[_Message]) -> _Message:
        for message in self._messages:
            if isinstance(message, kind):
                return message
            raise WireError(f"a worker expects a {kind.__name__} now, not a {type(message).__name__}")
        raise EOFError


def live(executor: Parent) -> int:
    """Runs a rank until the executor disconnects; a rank that fails reports why and ends the process. Returns the exit
    code.
    """
    return executor.live(WorkerProcess(executor).run, _log)


def _log(error: Exception) -> None:
    (logger.info if isinstance(error, RanksLostError) else logger.exception)("a worker stops: %s", error)


if __name__ == "__main__":
    sys.exit(live(Parent.of_this_process(CODEC)))

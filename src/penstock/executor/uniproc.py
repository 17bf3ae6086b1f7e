"""Ranks in this process. On a CPU a single rank runs inline if steps are synchronous, and on a separate thread if they
overlap; on a GPU the caller only launches. With several ranks each has a thread.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from penstock.config import env
from penstock.executor.executor import Later, OverTheWire, Pending, WorkerHandle
from penstock.messages.runner_output import ModelRunnerOutput
from penstock.messages.scheduler_output import GrammarOutput, SchedulerOutput
from penstock.worker.messages import CODEC, InitializeWorker, LoadWorker, WorkerFacts, WorkerReady
from penstock.worker.worker import LoadedWorker, Worker, load_worker

_Answer = TypeVar("_Answer")


def make_local_worker(load: LoadWorker, abort: Callable[[], None] | None = None) -> WorkerHandle:
    """Makes the worker of a rank in this process. With several ranks, a failing rank calls `abort` to end the waits of
    the others. In debug mode every message is encoded and decoded, as between processes.
    """
    if env.debug():
        return OverTheWire(LocalWorker(CODEC.copy(load), abort))
    return LocalWorker(load, abort)


class LocalWorker:
    """Drives a worker on this process's device (`WorkerHandle`).

    One of several ranks does everything on its own thread. A single rank has a thread only for steps that overlap with
    the caller's work: the kernels release the interpreter lock.
    """

    def __init__(self, load: LoadWorker, abort: Callable[[], None] | None) -> None:
        self._load = load
        self._abort = abort
        self._thread = None if abort is None else _make_thread()
        self._loaded: LoadedWorker | None = None
        self._worker: Worker | None = None
        self._forward: Pending[None] | None = None
        self._failure: BaseException | None = None

    def load(self) -> Pending[WorkerFacts]:
        return self._submit(self._load_now)

    def initialize(self, plan: InitializeWorker) -> Pending[WorkerReady]:
        return self._submit(lambda: self._initialize_now(plan))

    def execute_model(self, plan: SchedulerOutput) -> None:
        worker = self._initialized
        self._forward = self._submit(lambda: worker.execute_model(plan))

    def sample_tokens(self, grammars: GrammarOutput | None) -> Pending[ModelRunnerOutput]:
        worker, forward, self._forward = self._initialized, self._forward, None
        assert forward is not None, "sample_tokens without execute_model"
        if self._thread is None:
            return worker.sample_tokens(grammars)

        def sample() -> ModelRunnerOutput:
            forward.result()
            return worker.sample_tokens(grammars).result()

        return self._submit(sample)

    def watch(self, on_death: Callable[[], None]) -> None:
        """Does nothing: the rank lives as long as this process."""

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def kill(self) -> None: ...

    def hang_up(self) -> None: ...

    def shutdown(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()
        if self._worker is not None:
            self._worker.shutdown()

    @property
    def _initialized(self) -> Worker:
        assert self._worker is not None, "a step before initialize"
        return self._worker

    def _load_now(self) -> WorkerFacts:
        self._loaded = load_worker(self._load)
        return self._loaded.facts

    def _initialize_now(self, plan: InitializeWorker) -> WorkerReady:
        assert self._loaded is not None, "initialize before load"
        self._worker = self._loaded.initialize(plan)
        if self._thread is None and plan.limits.max_num_in_flight > 1 and not self._worker.ready.runs_ahead:
            self._thread = _make_thread()
        return self._worker.ready

    def _submit(self, run: Callable[[], _Answer]) -> Pending[_Answer]:
        """Runs it on the thread, or at once if there is none."""
        if self._thread is not None:
            return self._thread.submit(self._run_or_abort, run)
        answer = run()
        return Later(lambda: answer)

    def _run_or_abort(self, run: Callable[[], _Answer]) -> _Answer:
        try:
            return run()
        except BaseException as error:
            if self._abort is not None:
                self._failure = self._failure or error
                self._abort()
            raise


def _make_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="penstock-rank")

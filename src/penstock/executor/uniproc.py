"""Ranks in this process. On a CPU a single rank runs inline if steps are synchronous, and on a separate thread if they
overlap; on a GPU the caller only launches. With several ranks each has a thread.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeVar

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
    is_debug = env.debug()
    load = CODEC.copy(load) if is_debug else load
    worker = LocalWorker(load) if abort is None else ThreadWorker(LocalWorker(load, is_direct=True), abort)
    return OverTheWire(worker) if is_debug else worker


class LocalWorker:
    """Drives a worker on this process's device (`WorkerHandle`)."""

    def __init__(self, load: LoadWorker, is_direct: bool = False) -> None:
        """`is_direct`: steps run on the calling thread, whether they overlap or not."""
        self._load = load
        self._is_direct = is_direct
        self._loaded: LoadedWorker | None = None
        self._steps: Steps = NoSteps()

    def load(self) -> Pending[WorkerFacts]:
        loaded = self._loaded = load_worker(self._load)
        return Later(lambda: loaded.facts)

    def initialize(self, plan: InitializeWorker) -> Pending[WorkerReady]:
        assert self._loaded is not None, "initialize before load"
        worker = self._loaded.initialize(plan)
        is_direct = self._is_direct or worker.ready.runs_ahead or plan.limits.max_num_in_flight == 1
        self._steps = worker if is_direct else ThreadedSteps(worker)
        return Later(lambda: worker.ready)

    def execute_model(self, plan: SchedulerOutput) -> None:
        self._steps.execute_model(plan)

    def sample_tokens(self, grammars: GrammarOutput | None) -> Pending[ModelRunnerOutput]:
        return self._steps.sample_tokens(grammars)

    def watch(self, on_death: Callable[[], None]) -> None:
        """Does nothing: the rank lives as long as this process."""

    def check(self) -> None: ...

    def kill(self) -> None: ...

    def hang_up(self) -> None: ...

    def shutdown(self) -> None:
        self._steps.shutdown()


class ThreadWorker:
    """A worker that runs on its own thread (`WorkerHandle`), as one of several ranks."""

    def __init__(self, worker: LocalWorker, abort: Callable[[], None]) -> None:
        self._worker = worker
        self._abort = abort
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="penstock-rank")
        self._forward: Future[None] | None = None
        self._failure: BaseException | None = None

    def load(self) -> Pending[WorkerFacts]:
        return self._submit(lambda: self._worker.load().result())

    def initialize(self, plan: InitializeWorker) -> Pending[WorkerReady]:
        return self._submit(lambda: self._worker.initialize(plan).result())

    def execute_model(self, plan: SchedulerOutput) -> None:
        self._forward = self._submit(lambda: self._worker.execute_model(plan))

    def sample_tokens(self, grammars: GrammarOutput | None) -> Pending[ModelRunnerOutput]:
        forward, self._forward = self._forward, None
        assert forward is not None, "sample_tokens without execute_model"

        def sample() -> ModelRunnerOutput:
            forward.result()
            return self._worker.sample_tokens(grammars).result()

        return self._submit(sample)

    def watch(self, on_death: Callable[[], None]) -> None:
        """Does nothing: the rank lives as long as this process."""

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def kill(self) -> None: ...

    def hang_up(self) -> None: ...

    def shutdown(self) -> None:
        self._thread.shutdown()
        self._worker.shutdown()

    def _submit(self, run: Callable[[], _Answer]) -> Future[_Answer]:
        def or_abort() -> _Answer:
            try:
                return run()
            except BaseException as error:
                self._failure = self._failure or error
                self._abort()
                raise

        return self._thread.submit(or_abort)


class Steps(Protocol):
    """Runs the steps of a local worker. A `Worker` runs or launches them on the calling thread."""

    def execute_model(self, plan: SchedulerOutput) -> None: ...

    def sample_tokens(self, grammars: GrammarOutput | None) -> Pending[ModelRunnerOutput]: ...

    def shutdown(self) -> None: ...


class NoSteps:
    """Stands for the steps of a worker that is not initialized: every step raises AssertionError."""

    def execute_model(self, plan: SchedulerOutput) -> None:
        raise AssertionError("a step before initialize")

    def sample_tokens(self, grammars: GrammarOutput | None) -> Pending[ModelRunnerOutput]:
        raise AssertionError("a step before initialize")

    def shutdown(self) -> None: ...


class ThreadedSteps:
    """Runs the steps in order on one thread, while the caller schedules the next.

    The kernels release the interpreter lock, so the two overlap.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="penstock-worker")
        self._forward: Future[None] | None = None

    def execute_model(self, plan: SchedulerOutput) -> None:
        self._forward = self._thread.submit(self._worker.execute_model, plan)

    def sample_tokens(self, grammars: GrammarOutput | None) -> Pending[ModelRunnerOutput]:
        forward, self._forward = self._forward, None
        assert forward is not None, "sample_tokens without execute_model"
        return self._thread.submit(self._sample_after, forward, grammars)

    def _sample_after(self, forward: Future[None], grammars: GrammarOutput | None) -> ModelRunnerOutput:
        forward.result()
        return self._worker.sample_tokens(grammars).result()

    def shutdown(self) -> None:
        self._thread.shutdown()
        self._worker.shutdown()

"""A rank in this process.

On a CPU it runs inline when steps are synchronous, and on a thread of its own when they overlap; where a GPU computes,
the caller only launches.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from penstock.config import env
from penstock.config.engine import EngineArgs
from penstock.executor.executor import Later, OverTheWire, Pending, WorkerHandle
from penstock.messages.kv_transfer import ShardId
from penstock.messages.runner_output import ModelRunnerOutput
from penstock.messages.scheduler_output import GrammarOutput, SchedulerOutput
from penstock.worker.messages import InitializeWorker, WorkerFacts, WorkerReady
from penstock.worker.worker import LoadedWorker, Worker, load_worker


def make_local_worker(args: EngineArgs, shard: ShardId) -> WorkerHandle:
    """In debug mode every message is encoded and decoded on its way, as it would be between processes."""
    worker = LocalWorker(args, shard)
    return OverTheWire(worker) if env.debug() else worker


class LocalWorker:
    """Drives a worker on this process's device (`WorkerHandle`)."""

    def __init__(self, args: EngineArgs, shard: ShardId) -> None:
        self._args = args
        self._shard = shard
        self._loaded: LoadedWorker | None = None
        self._steps: Steps = NoSteps()

    def load(self) -> Pending[WorkerFacts]:
        loaded = self._loaded = load_worker(self._args, self._shard)
        return Later(lambda: loaded.facts)

    def initialize(self, plan: InitializeWorker) -> Pending[WorkerReady]:
        assert self._loaded is not None, "initialize before load"
        worker = self._loaded.initialize(plan)
        is_direct = worker.ready.runs_ahead or plan.limits.max_num_in_flight == 1
        self._steps = worker if is_direct else ThreadedSteps(worker)
        return Later(lambda: worker.ready)

    def execute_model(self, plan: SchedulerOutput) -> None:
        self._steps.execute_model(plan)

    def sample_tokens(self, grammars: GrammarOutput | None) -> Pending[ModelRunnerOutput]:
        return self._steps.sample_tokens(grammars)

    def watch(self, on_death: Callable[[], None]) -> None:
        """It lives as long as this process."""

    def check(self) -> None: ...

    def shutdown(self) -> None:
        self._steps.shutdown()


class Steps(Protocol):
    """Where and when the steps of a local worker run. A worker itself runs or launches them where they are called."""

    def execute_model(self, plan: SchedulerOutput) -> None: ...

    def sample_tokens(self, grammars: GrammarOutput | None) -> Pending[ModelRunnerOutput]: ...

    def shutdown(self) -> None: ...


class NoSteps:
    """Of a worker that is not initialized."""

    def execute_model(self, plan: SchedulerOutput) -> None:
        raise AssertionError("a step before initialize")

    def sample_tokens(self, grammars: GrammarOutput | None) -> Pending[ModelRunnerOutput]:
        raise AssertionError("a step before initialize")

    def shutdown(self) -> None: ...


class ThreadedSteps:
    """Runs the steps in order on one thread, while the caller schedules the next.

    The kernels release the interpreter lock, so the two do overlap.
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

"""One worker in this process.

On a CPU inline when steps are synchronous, and on a thread of its own when they overlap; where a GPU computes, the
caller only launches.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from penstock.executor.executor import Executor
from penstock.messages.runner_output import ModelRunnerOutput
from penstock.messages.scheduler_output import GrammarOutput, SchedulerOutput
from penstock.runner.model_runner import ModelRunner
from penstock.runner.outputs import PendingOutput


def make_executor(runner: ModelRunner, max_num_in_flight: int) -> Executor:
    if runner.runs_ahead:
        return LaunchExecutor(runner)
    return InlineExecutor(runner) if max_num_in_flight == 1 else ThreadExecutor(runner)


class InlineExecutor:
    """Runs every step where it is called."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def execute_model(self, plan: SchedulerOutput) -> None:
        self._runner.execute_model(plan)

    def sample_tokens(self, grammars: GrammarOutput) -> Future[ModelRunnerOutput]:
        future: Future[ModelRunnerOutput] = Future()
        future.set_result(self._runner.sample_tokens(grammars).result())
        return future

    def shutdown(self) -> None:
        self._runner.shutdown()


class ThreadExecutor:
    """Runs the steps in order on one thread, while the caller schedules the next.

    The kernels release the interpreter lock, so the two do overlap.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="penstock-worker")
        self._forward: Future[None] | None = None

    def execute_model(self, plan: SchedulerOutput) -> None:
        self._forward = self._thread.submit(self._runner.execute_model, plan)

    def sample_tokens(self, grammars: GrammarOutput) -> Future[ModelRunnerOutput]:
        forward, self._forward = self._forward, None
        assert forward is not None, "sample_tokens without execute_model"
        return self._thread.submit(self._sample_after, forward, grammars)

    def _sample_after(self, forward: Future[None], grammars: GrammarOutput) -> ModelRunnerOutput:
        forward.result()
        return self._runner.sample_tokens(grammars).result()

    def shutdown(self) -> None:
        self._thread.shutdown()
        self._runner.shutdown()


class LaunchExecutor:
    """Launches every step where it is called, and waits for one when its result is asked for."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def execute_model(self, plan: SchedulerOutput) -> None:
        self._runner.execute_model(plan)

    def sample_tokens(self, grammars: GrammarOutput) -> Future[ModelRunnerOutput]:
        return _LaunchedStep(self._runner.sample_tokens(grammars))

    def shutdown(self) -> None:
        self._runner.shutdown()


class _LaunchedStep(Future[ModelRunnerOutput]):
    """A step's result, which is fetched when it is asked for."""

    def __init__(self, pending: PendingOutput) -> None:
        super().__init__()
        self._pending = pending

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        if not self.done():
            self.set_result(self._pending.result())
        return super().result(timeout)

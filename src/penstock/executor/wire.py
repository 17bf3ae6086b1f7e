"""Messages between an executor and a worker in its own process, encoded and decoded as if a wire lay between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.executor.executor import Pending, WorkerHandle
from penstock.messages.runner_output import ModelRunnerOutput
from penstock.messages.scheduler_output import GrammarOutput, SchedulerOutput
from penstock.worker.messages import CODEC, InitializeWorker, SampleTokens, WorkerFacts, WorkerReady


class OverTheWire:
    """Sends every message to a worker, and every answer back, through the codec (`WorkerHandle`)."""

    def __init__(self, worker: WorkerHandle) -> None:
        self._worker = worker

    def load(self) -> Pending[WorkerFacts]:
        return _Decoded(self._worker.load())

    def initialize(self, plan: InitializeWorker) -> Pending[WorkerReady]:
        return _Decoded(self._worker.initialize(CODEC.copy(plan)))

    def execute_model(self, plan: SchedulerOutput) -> None:
        self._worker.execute_model(CODEC.copy(plan))

    def sample_tokens(self, grammars: GrammarOutput | None) -> Pending[ModelRunnerOutput]:
        return _Decoded(self._worker.sample_tokens(CODEC.copy(SampleTokens(grammars)).grammars))

    def watch(self, on_death: Callable[[], None]) -> None:
        self._worker.watch(on_death)

    def check(self) -> None:
        self._worker.check()

    def shutdown(self) -> None:
        self._worker.shutdown()


class _Decoded:
    def __init__(self, pending: Pending[Any]) -> None:
        self._pending = pending

    def result(self) -> Any:
        return CODEC.copy(self._pending.result())

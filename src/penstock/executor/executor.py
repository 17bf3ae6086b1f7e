"""Runs plans on all ranks of an engine, wherever they are.

The engine core calls `execute_model` and `sample_tokens` in strict alternation and may be ahead of the workers by as
many steps as it keeps in flight; results come back in order. Every rank answers every step, and one aggregation makes
one result of the answers, for one rank and for many. An exception in a worker comes out of the step's result; the death
of a worker does too, and is also reported to `watch` while no step runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from msgspec.structs import replace

from penstock.kv_transfer.aggregate import aggregate
from penstock.messages.kv_transfer import HandshakePayload, ShardId
from penstock.messages.runner_output import ModelRunnerOutput
from penstock.messages.scheduler_output import GrammarOutput, SchedulerOutput
from penstock.worker.messages import CODEC, InitializeWorker, SampleTokens, WorkerFacts, WorkerReady

_Value = TypeVar("_Value", covariant=True)
_Answer = TypeVar("_Answer")


class Pending(Protocol[_Value]):
    """An answer that may still be on its way. A `concurrent.futures.Future` is one."""

    def result(self) -> _Value:
        """Waits for the answer, once. Raises what went wrong instead of it."""
        ...


class Later(Generic[_Answer]):
    """An answer that is worked out when it is asked for (`Pending`)."""

    def __init__(self, result: Callable[[], _Answer]) -> None:
        self.result = result


class WorkerHandle(Protocol):
    """One rank as its executor sees it, which says what the methods do. Calls come in the order of a worker's life
    (`worker.worker`).
    """

    def load(self) -> Pending[WorkerFacts]: ...

    def initialize(self, plan: InitializeWorker) -> Pending[WorkerReady]: ...

    def execute_model(self, plan: SchedulerOutput) -> None: ...

    def sample_tokens(self, grammars: GrammarOutput | None) -> Pending[ModelRunnerOutput]: ...

    def watch(self, on_death: Callable[[], None]) -> None: ...

    def check(self) -> None:
        """Raises what `result` would, if the rank is dead."""
        ...

    def shutdown(self) -> None:
        """Waits for what is running and frees the rank. Idempotent; must not raise or hang when the rank is dead."""
        ...


class OverTheWire:
    """A worker whose messages and answers are encoded and decoded, as if another process had it (`WorkerHandle`)."""

    def __init__(self, worker: WorkerHandle) -> None:
        self._worker = worker

    def load(self) -> Pending[WorkerFacts]:
        return _decoded(self._worker.load())

    def initialize(self, plan: InitializeWorker) -> Pending[WorkerReady]:
        return _decoded(self._worker.initialize(CODEC.copy(plan)))

    def execute_model(self, plan: SchedulerOutput) -> None:
        self._worker.execute_model(CODEC.copy(plan))

    def sample_tokens(self, grammars: GrammarOutput | None) -> Pending[ModelRunnerOutput]:
        return _decoded(self._worker.sample_tokens(CODEC.copy(SampleTokens(grammars)).grammars))

    def watch(self, on_death: Callable[[], None]) -> None:
        self._worker.watch(on_death)

    def check(self) -> None:
        self._worker.check()

    def shutdown(self) -> None:
        self._worker.shutdown()


def _decoded(pending: Pending[_Answer]) -> Pending[_Answer]:
    return Later(lambda: CODEC.copy(pending.result()))


class Executor:
    """Drives ranks in lockstep. `workers` are in the order of the ranks; the last stage's first rank samples."""

    def __init__(self, workers: Sequence[WorkerHandle]) -> None:
        assert workers, "an executor without workers"
        self._workers = tuple(workers)
        self._output_rank = 0

    def load(self) -> list[WorkerFacts]:
        """Loads the weights on every rank at once. Raises ConfigError, or EngineDeadError when a rank breaks."""
        facts = [pending.result() for pending in [worker.load() for worker in self._workers]]
        last_stage = max(pp_rank for pp_rank, _ in (each.shard for each in facts))
        self._output_rank = [each.shard for each in facts].index((last_stage, 0))
        return facts

    def initialize(self, plan: InitializeWorker) -> dict[ShardId, HandshakePayload | None]:
        """Allocates the KV cache on every rank; returns the handshakes of all ranks. Raises as `load`."""
        ready = [pending.result() for pending in [worker.initialize(plan) for worker in self._workers]]
        table = {each.shard: each.handshake for each in ready}
        assert len(table) == len(self._workers), f"{len(self._workers)} ranks sent handshakes as {list(table)}"
        return table

    def execute_model(self, plan: SchedulerOutput) -> None:
        """Launches the forward pass on every rank; does not wait for it."""
        for worker in self._workers:
            worker.execute_model(plan)

    def sample_tokens(self, grammars: GrammarOutput | None) -> Pending[ModelRunnerOutput]:
        """Launches sampling for the plan launched last, within its grammars."""
        parts = [worker.sample_tokens(grammars) for worker in self._workers]
        return Later(lambda: aggregate_outputs([part.result() for part in parts], self._output_rank))

    def watch(self, on_death: Callable[[], None]) -> None:
        """Has `on_death` called, from another thread, when a rank dies by itself; `check` then says why."""
        for worker in self._workers:
            worker.watch(on_death)

    def check(self) -> None:
        """Raises EngineDeadError if a rank is dead. Only between steps."""
        for worker in self._workers:
            worker.check()

    def shutdown(self) -> None:
        """Waits for what is running and frees the workers. Idempotent."""
        for worker in self._workers:
            worker.shutdown()


def aggregate_outputs(outputs: Sequence[ModelRunnerOutput], output_rank: int) -> ModelRunnerOutput:
    """What the sampling rank sampled, with the connector's reports of all ranks."""
    sampled = outputs[output_rank]
    moved = aggregate(output.kv_connector_output for output in outputs)
    return sampled if moved == sampled.kv_connector_output else replace(sampled, kv_connector_output=moved)

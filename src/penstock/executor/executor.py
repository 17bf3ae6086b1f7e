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
from penstock.utils.errors import RanksLostError
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

    def __init__(self, workers: Sequence[WorkerHandle], abort: Callable[[], None] = lambda: None) -> None:
        """`abort` ends every wait of a rank for another one: they would wait for ever when one has failed."""
        assert workers, "an executor without workers"
        self._workers = tuple(workers)
        self._abort = abort
        self._samplers: Sequence[bool] = (True,) * len(workers)
        self._output_rank = 0
        self._is_broken = False

    def load(self) -> list[WorkerFacts]:
        """Loads the weights on every rank at once. Raises ConfigError, or EngineDeadError when a rank breaks."""
        facts = self._results([worker.load() for worker in self._workers])
        last_stage = max(pp_rank for pp_rank, _ in (each.shard for each in facts))
        self._samplers = [each.shard[0] == last_stage for each in facts]
        self._output_rank = [each.shard for each in facts].index((last_stage, 0))
        return facts

    def initialize(self, plan: InitializeWorker) -> dict[ShardId, HandshakePayload | None]:
        """Allocates the KV cache on every rank; returns the handshakes of all ranks. Raises as `load`."""
        ready = self._results([worker.initialize(plan) for worker in self._workers])
        table = {each.shard: each.handshake for each in ready}
        assert len(table) == len(self._workers), f"{len(self._workers)} ranks sent handshakes as {list(table)}"
        return table

    def execute_model(self, plan: SchedulerOutput) -> None:
        """Launches the forward pass on every rank; does not wait for it."""
        for worker in self._workers:
            worker.execute_model(plan)

    def sample_tokens(self, grammars: GrammarOutput | None) -> Pending[ModelRunnerOutput]:
        """Launches sampling for the plan launched last, within its grammars."""
        ranks = zip(self._workers, self._samplers, strict=True)
        parts = [worker.sample_tokens(grammars if samples else None) for worker, samples in ranks]
        return Later(lambda: aggregate_outputs(self._results(parts), self._output_rank))

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
        if self._is_broken:
            self._abort()
        for worker in self._workers:
            worker.shutdown()

    def _results(self, parts: Sequence[Pending[_Answer]]) -> list[_Answer]:
        """Of all ranks. Raises the error of the rank that failed first of all, not of those that missed it."""
        if len(parts) == 1:
            return [parts[0].result()]
        results: list[_Answer] = []
        errors: list[Exception] = []
        for part in parts:
            try:
                results.append(part.result())
            except Exception as error:  # noqa: BLE001 - raised below
                errors.append(error)
                # The others must answer, too.
                self._abort()
        if errors:
            self._is_broken = True
            raise next((error for error in errors if not isinstance(error, RanksLostError)), errors[0])
        return results


def aggregate_outputs(outputs: Sequence[ModelRunnerOutput], output_rank: int) -> ModelRunnerOutput:
    """What the sampling rank sampled, with the connector's reports of all ranks."""
    sampled = outputs[output_rank]
    moved = aggregate(output.kv_connector_output for output in outputs)
    return sampled if moved == sampled.kv_connector_output else replace(sampled, kv_connector_output=moved)

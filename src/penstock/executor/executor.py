"""Runs plans on all ranks of an engine, local or remote, or of several engines that share experts.

The engine core calls `execute_model` and `sample_tokens` in strict alternation and may be ahead of the workers by as
many steps as it keeps in flight; results come back in order. Every rank responds to every step, and the responses are
aggregated into one result, for one rank and for many. A step's result raises the error of a worker that failed or
died; while no step runs, a worker's death is reported to `watch`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Generic, NoReturn, Protocol, TypeVar

from msgspec.structs import replace

from penstock.kv_transfer.aggregate import aggregate
from penstock.messages.experts import NO_EXPERTS, ExpertsOutput
from penstock.messages.kv_transfer import HandshakePayload, ShardId
from penstock.messages.runner_output import ModelRunnerOutput
from penstock.messages.scheduler_output import GrammarOutput, SchedulerOutput
from penstock.utils.errors import RanksLostError
from penstock.worker.messages import CODEC, InitializeWorker, SampleTokens, WorkerFacts, WorkerReady

_Value = TypeVar("_Value", covariant=True)
_Answer = TypeVar("_Answer")

# Ranks that are notified of a death end within tenths of a second, unless they are computing.
_ABORT_SECONDS = 2.0
_CAUSE_SECONDS = (0.0, 0.01, 0.05, 0.2, 0.5)


class Pending(Protocol[_Value]):
    """A response that may not have arrived yet, such as a `concurrent.futures.Future`."""

    def result(self) -> _Value:
        """Waits for the response, once. Raises the error if there is one."""
        ...


class Later(Generic[_Answer]):
    """A response that is computed on request (`Pending`)."""

    def __init__(self, result: Callable[[], _Answer]) -> None:
        self.result = result


class WorkerHandle(Protocol):
    """The executor's interface to one rank; `Executor` documents the methods. Calls follow the order of a worker's life
    (`worker.worker`).
    """

    def load(self) -> Pending[WorkerFacts]: ...

    def initialize(self, plan: InitializeWorker) -> Pending[WorkerReady]: ...

    def execute_model(self, plan: SchedulerOutput) -> None: ...

    def sample_tokens(self, grammars: GrammarOutput | None) -> Pending[ModelRunnerOutput]: ...

    def watch(self, on_death: Callable[[], None]) -> None: ...

    def check(self) -> None:
        """Raises the error that `result` would raise, if the rank is dead."""
        ...

    def kill(self) -> None:
        """Kills the rank's process, if it has one; may be called from any thread.

        Calls then raise RanksLostError, unless the rank had ended by itself.
        """
        ...

    def hang_up(self) -> None:
        """Notifies the rank that no further messages follow. Idempotent; does not wait."""
        ...

    def shutdown(self) -> None:
        """Waits for running steps and frees the rank. Idempotent; must not raise or hang if the rank is dead."""
        ...


class OverTheWire:
    """A worker whose messages and responses are encoded and decoded, as between processes (`WorkerHandle`)."""

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

    def kill(self) -> None:
        self._worker.kill()

    def hang_up(self) -> None:
        self._worker.hang_up()

    def shutdown(self) -> None:
        self._worker.shutdown()


def _decoded(pending: Pending[_Answer]) -> Pending[_Answer]:
    return Later(lambda: CODEC.copy(pending.result()))


class Executor:
    """Drives ranks in lockstep. `workers` are in the order of the ranks; the last stage's first rank samples.

    Of several engines each has as many ranks and plans of its own. Their ranks depend on each other: wait for a step's
    result only when that step has been launched on all engines.

    When one of several ranks dies, the others are told to abort, and those that do not are killed. The error raised is
    that of the rank that failed first by itself.
    """

    def __init__(
        self,
        workers: Sequence[WorkerHandle],
        abort: Callable[[], None] = lambda: None,
        release: Callable[[], None] = lambda: None,
        num_engines: int = 1,
    ) -> None:
        """`abort` ends every wait of a rank for another one, which would otherwise wait forever for a failed rank.
        `release` is called when the workers have been shut down, and may be called again.
        """
        assert workers and len(workers) % num_engines == 0, f"{len(workers)} workers for {num_engines} engines"
        self._workers = tuple(workers)
        self._num_ranks = len(workers) // num_engines
        self._abort = abort
        self._release = release
        self._samplers: Sequence[bool] = (True,) * self._num_ranks
        self._output_rank = 0
        self._is_broken = False
        self._is_over = threading.Event()
        if len(workers) > 1:
            self.watch(_calls(weakref.WeakMethod(self._on_death)))

    def load(self) -> list[list[WorkerFacts]]:
        """Loads the weights on all ranks concurrently; returns the facts of each engine's ranks. Raises ConfigError, or
        EngineDeadError if a rank fails.
        """
        try:
            facts = _results([worker.load() for worker in self._workers])
        except Exception as error:  # noqa: BLE001 - raised by `_fail`
            self._fail(error)
        engines = [facts[start : start + self._num_ranks] for start in range(0, len(facts), self._num_ranks)]
        shards = [each.shard for each in engines[0]]
        last_stage = max(pp_rank for pp_rank, _ in shards)
        self._samplers = [pp_rank == last_stage for pp_rank, _ in shards]
        self._output_rank = shards.index((last_stage, 0))
        return engines

    def initialize(self, *plans: InitializeWorker) -> list[dict[ShardId, HandshakePayload | None]]:
        """Allocates the KV cache on every rank, by the plan of its engine; returns the handshakes of each engine's
        ranks. Raises like `load`.
        """
        ranks = [(worker, plan) for engine, plan in enumerate(plans) for worker in self._ranks(engine)]
        assert len(ranks) == len(self._workers), f"{len(plans)} plans for {len(self._workers)} ranks"
        try:
            ready = _results([worker.initialize(plan) for worker, plan in ranks])
        except Exception as error:  # noqa: BLE001 - raised by `_fail`
            self._fail(error)
        parts = [ready[start : start + self._num_ranks] for start in range(0, len(ready), self._num_ranks)]
        tables = [{each.shard: each.handshake for each in part} for part in parts]
        assert all(len(table) == self._num_ranks for table in tables), f"ranks sent handshakes as {tables}"
        return tables

    def execute_model(self, plan: SchedulerOutput, engine: int = 0) -> None:
        """Launches the forward pass on every rank of an engine; does not wait for it."""
        try:
            for worker in self._ranks(engine):
                worker.execute_model(plan)
        except Exception as error:  # noqa: BLE001 - raised by `_fail`
            self._fail(error)

    def sample_tokens(self, grammars: GrammarOutput | None, engine: int = 0) -> Pending[ModelRunnerOutput]:
        """Launches sampling for the engine's plan launched last, constrained by its grammars."""
        ranks = zip(self._ranks(engine), self._samplers, strict=True)
        try:
            parts = [worker.sample_tokens(grammars if samples else None) for worker, samples in ranks]
        except Exception as error:  # noqa: BLE001 - raised by `_fail`
            self._fail(error)
        return Later(lambda: self._united(parts))

    def watch(self, on_death: Callable[[], None]) -> None:
        """Registers `on_death`, called from another thread when a rank dies by itself; `check` then raises the
        reason.
        """
        for worker in self._workers:
            worker.watch(on_death)

    def check(self) -> None:
        """Raises EngineDeadError if a rank is dead. Call it only between steps."""
        try:
            for worker in self._workers:
                worker.check()
        except Exception as error:  # noqa: BLE001 - raised by `_fail`
            self._fail(error)

    def kill(self) -> None:
        """Kills the processes of all ranks, including stopped ones. May be called from any thread."""
        for worker in self._workers:
            worker.kill()

    def shutdown(self) -> None:
        """Waits for running steps and frees the workers. Idempotent."""
        self._is_over.set()
        if self._is_broken:
            self._abort()
        for worker in self._workers:
            worker.hang_up()
        for worker in self._workers:
            worker.shutdown()
        self._release()

    def _ranks(self, engine: int) -> Sequence[WorkerHandle]:
        return self._workers[engine * self._num_ranks : (engine + 1) * self._num_ranks]

    def _on_death(self) -> None:
        """Called on the thread that watches a rank, when the rank has died."""
        self._abort()
        if not self._is_over.wait(_ABORT_SECONDS):
            # A rank that computes for long, is stopped, or waits where an abort has no effect.
            self.kill()

    def _united(self, parts: Sequence[Pending[ModelRunnerOutput]]) -> ModelRunnerOutput:
        try:
            outputs = _results(parts)
        except Exception as error:  # noqa: BLE001 - raised by `_fail`
            self._fail(error)
        return aggregate_outputs(outputs, self._output_rank)

    def _fail(self, error: Exception) -> NoReturn:
        """Raises the error of the rank that failed by itself, also if a rank that depends on it was noticed first."""
        self._is_broken = True
        self._abort()
        raise (self._find_cause() if isinstance(error, RanksLostError) else None) or error

    def _find_cause(self) -> Exception | None:
        """Finds the rank that failed first; its end may be noticed shortly after that of a dependent rank."""
        for seconds in _CAUSE_SECONDS:
            for worker in self._workers:
                try:
                    worker.check()
                except RanksLostError:
                    continue
                except Exception as error:  # noqa: BLE001 - the caller raises it
                    return error
            threading.Event().wait(seconds)
        return None


def _results(parts: Sequence[Pending[_Answer]]) -> list[_Answer]:
    return [part.result() for part in parts]


def _calls(method: weakref.WeakMethod[Callable[[], None]]) -> Callable[[], None]:
    """Returns a function that calls a method of an object without keeping the object alive."""

    def call() -> None:
        bound = method()
        if bound is not None:
            bound()

    return call


def aggregate_outputs(outputs: Sequence[ModelRunnerOutput], output_rank: int) -> ModelRunnerOutput:
    """Returns the sampling rank's output with what all ranks report about KV, experts and failed requests."""
    experts = [output.experts for output in outputs if output.experts is not NO_EXPERTS]
    return replace(
        outputs[output_rank],
        kv_connector_output=aggregate(output.kv_connector_output for output in outputs),
        failed_requests={name: error for output in outputs for name, error in output.failed_requests.items()},
        experts=unite_experts(experts) if experts else NO_EXPERTS,
    )


def unite_experts(outputs: Sequence[ExpertsOutput]) -> ExpertsOutput:
    """Returns the union of the reports. One rank of a stage reports the loads of its layers."""
    loads = {name: load for output in outputs for name, load in output.loads.items()}
    assert len(loads) == sum(len(output.loads) for output in outputs), "two ranks report one layer's loads"
    return ExpertsOutput(loads, tuple(report for output in outputs for report in output.reports))

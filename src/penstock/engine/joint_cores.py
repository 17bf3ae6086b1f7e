"""The engine cores of one process: one, or several that make all steps together because they share experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.engine.engine_core import EngineCore, failing, shut_down, step_together
from penstock.executor.executor import Executor
from penstock.messages.stats import StepReport


class JointCores:
    """`cores` are in the order of their data parallel ranks, on one executor. One thread calls this."""

    def __init__(self, cores: Sequence[EngineCore], executor: Executor) -> None:
        self.cores = tuple(cores)
        self._executor = executor

    @property
    def patience(self) -> float | None:
        """See `EngineCore.patience`: that of the core which waits for the shortest time."""
        return min((seconds for core in self.cores if (seconds := core.patience) is not None), default=None)

    def step(self, *, waits: bool = True) -> list[StepReport]:
        """Makes a step on all engines; returns a report of each. See `EngineCore.step`."""
        return step_together(self.cores, waits)

    def watch_workers(self, on_death: Callable[[], None]) -> None:
        """Registers `on_death`, called from another thread when a worker dies; `check_workers` then raises the
        reason.
        """
        self._executor.watch(on_death)

    def check_workers(self) -> None:
        """Raises EngineDeadError, now and from then on, if a worker is dead."""
        with failing(self.cores):
            self._executor.check()

    def kill_workers(self) -> None:
        """Kills the workers' processes. May be called from any thread; the engines are dead afterwards."""
        self._executor.kill()

    def shutdown(self) -> None:
        """See `EngineCore.shutdown`."""
        shut_down(self.cores)

"""Runs plans on workers.

The engine core calls `execute_model` and `sample_tokens` in strict alternation and may be ahead of the workers by as
many steps as it keeps in flight; results come back in order. An exception in a worker comes out of the future.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol

from penstock.messages.runner_output import ModelRunnerOutput
from penstock.messages.scheduler_output import GrammarOutput, SchedulerOutput


class Executor(Protocol):
    def execute_model(self, plan: SchedulerOutput) -> None:
        """Launches the forward pass on every rank; does not wait for it."""
        ...

    def sample_tokens(self, grammars: GrammarOutput) -> Future[ModelRunnerOutput]:
        """Launches sampling for the plan launched last, within its grammars.

        The future holds the step's result or its failure.
        """
        ...

    def shutdown(self) -> None:
        """Waits for what is running and frees the workers."""
        ...

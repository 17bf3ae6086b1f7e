"""The work of a rank after the model's pass, by its place in the pipeline.

    last stage       sample, verify drafts, store the tokens where the next step reads them, propose new drafts, and
                     send all of it to the earlier stages
    earlier stages   apply what the last stage sent, before a step that needs it

All ranks derive what they send and receive from the plans alone, which are the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from penstock.messages.requests import RowRequest
from penstock.messages.scheduler_output import GrammarOutput, SchedulerOutput
from penstock.models.interface import ModelOutput
from penstock.runner.awaited_results import AwaitedResults
from penstock.runner.buffers import HostCopy
from penstock.runner.input_batch import InputBatch
from penstock.runner.outputs import CopiedDrafts, PendingPart, StepOutput, check_chunks
from penstock.runner.passes import Passes, StepSampler
from penstock.runner.request_states import RequestStates
from penstock.runner.sampling.prompt_logprobs import PromptScorer
from penstock.runner.sampling.states import SamplingStates
from penstock.runner.speculation.speculator import Speculator
from penstock.runner.step_results import ResultsReceiver, ResultsSender


@dataclass(frozen=True, slots=True)
class ExecuteModelState:
    """The data of the forward pass that `sample_tokens` needs."""

    step: int
    batch: InputBatch
    output: ModelOutput
    num_drafts_to_propose: int
    grammar_request_ids: frozenset[str]


class StepEnd(Protocol):
    """Lifecycle: one is chosen and built with the runner. Threading: the runner's thread."""

    @property
    def runs_ahead(self) -> bool:
        """Whether a step is launched here and computed on a device, so that its result arrives later."""
        ...

    def add(self, row: int, request: RowRequest) -> None:
        """Called when a request gets its row; staged like the rows themselves."""
        ...

    def remove(self, rows: Iterable[int]) -> None:
        """Called when rows become free."""
        ...

    def prepare(self, plan: SchedulerOutput) -> None:
        """Called before the batch of a step with tokens is built: updates the tables of its rows."""
        ...

    def finish(self, state: ExecuteModelState, grammars: GrammarOutput) -> StepOutput | None:
        """Ends the step; returns None on a rank whose samples are not reported."""
        ...


@dataclass(frozen=True, eq=False)
class SamplingEnd:
    """Used by the last stage (`StepEnd`). All its ranks sample the same; `is_reported` is true on one of them."""

    sampling: SamplingStates
    prompt_scorer: PromptScorer
    sampler: StepSampler
    speculator: Speculator
    passes: Passes
    states: RequestStates
    results: ResultsSender
    copy_to_host: Callable[[torch.Tensor], HostCopy]
    is_reported: bool

    @property
    def runs_ahead(self) -> bool:
        return self.sampler.runs_ahead

    def add(self, row: int, request: RowRequest) -> None:
        self.sampler.add(row, request)

    def remove(self, rows: Iterable[int]) -> None:
        self.sampling.remove(rows)

    def prepare(self, plan: SchedulerOutput) -> None:
        """Nothing to prepare: its own sampler has written the tables."""

    def finish(self, state: ExecuteModelState, grammars: GrammarOutput) -> StepOutput | None:
        batch, output, num_drafts = state.batch, state.output, state.num_drafts_to_propose
        parts = self.prompt_scorer.of_step(batch, output.hidden)
        parts += check_chunks(batch.host, output.hidden, self.copy_to_host)
        sampled = self.passes.sample(batch, output, grammars)
        self.passes.propose(batch, output, num_drafts if len(batch.host.sampling) else 0)
        self.results.send(batch)
        if not self.is_reported:
            return None
        return StepOutput(sampled, (*parts, *self._report_drafts(state)), self.passes.replays(batch))

    def _report_drafts(self, state: ExecuteModelState) -> tuple[PendingPart, ...]:
        num_drafts = state.num_drafts_to_propose
        if not num_drafts or not (state.grammar_request_ids or self.speculator.leaves_gaps):
            return ()
        names = state.batch.host.sampling_request_ids
        wanted = [i for i, name in enumerate(names) if name in state.grammar_request_ids]
        if not names or not (wanted or self.speculator.leaves_gaps):
            return ()
        drafts = self.copy_to_host(self.states.drafts[state.batch.tensors.sampling_rows, :num_drafts])
        return (CopiedDrafts(names, wanted, self.speculator.leaves_gaps, drafts),)


@dataclass(frozen=True, eq=False)
class EarlierStageEnd:
    """Used by all earlier stages (`StepEnd`). It samples nothing and receives the tokens later."""

    states: RequestStates
    awaited: AwaitedResults
    results: ResultsReceiver
    runs_ahead: bool

    def add(self, row: int, request: RowRequest) -> None:
        """No sampling parameters are kept here."""

    def remove(self, rows: Iterable[int]) -> None: ...

    def prepare(self, plan: SchedulerOutput) -> None:
        rows = self.states.rows.rows(tuple(plan.num_scheduled_tokens))
        for _ in range(self.awaited.num_due(plan.step, rows)):
            self.results.receive(self.awaited.take())

    def finish(self, state: ExecuteModelState, grammars: GrammarOutput) -> None:
        tensors = state.batch.tensors
        # Exact for rows that do not sample; the others wait for their result.
        self.states.num_computed_exact[tensors.idx_mapping, 0] = tensors.seq_lens.long()
        self.awaited.expect(state.step, state.batch.host)

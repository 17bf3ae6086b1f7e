"""One device's step, in two calls that alternate strictly:

    execute_model(plan)   free rows, add rows, refresh rows, build the batch, run the model; parks an ExecuteModelState
    sample_tokens()       sample, verify drafts, store the tokens where the next step reads them, propose new drafts,
                          return what the scheduler needs

They are two so that the CPU can work out which tokens a grammar allows while the model runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch

from penstock.messages.runner_output import ModelRunnerOutput
from penstock.messages.scheduler_output import BlockIds, GrammarOutput, SchedulerOutput
from penstock.models.interface import ModelOutput
from penstock.runner.input_batch import InputBatch
from penstock.runner.outputs import CopiedDrafts, PendingOutput, PendingPart, ReadyOutput, StepOutput
from penstock.runner.parts import RunnerParts


def _no_output() -> None:
    """Of a step without tokens."""


@dataclass(frozen=True, slots=True)
class ExecuteModelState:
    """What `sample_tokens` needs of the forward pass before it."""

    batch: InputBatch
    output: ModelOutput
    num_drafts_to_propose: int
    grammar_request_ids: frozenset[str]


class ModelRunner:
    """Receives finished parts and owns the rows. Not thread-safe: one thread drives it."""

    def __init__(self, parts: RunnerParts, max_drafts_in_flight: int | None = None) -> None:
        """With `max_drafts_in_flight` every step checks the two counts of computed tokens against each other."""
        self._states = parts.states
        self._sampling = parts.sampling
        self._blocks = parts.blocks
        self._writer = parts.writer
        self._inputs = parts.inputs
        self._prompt_scorer = parts.prompt_scorer
        self._sampler = parts.sampler
        self._speculator = parts.speculator
        self._passes = parts.passes
        self._kv_step = parts.kv_step
        self._copy_to_host = parts.copy_to_host
        self._poisoned = parts.poisoned
        self._max_drafts_in_flight = max_drafts_in_flight
        self._parked: ExecuteModelState | None = None

    @torch.inference_mode()
    def execute_model(self, plan: SchedulerOutput) -> None:
        """Applies the plan to the rows and runs the model over its tokens."""
        assert self._parked is None, "execute_model was called twice without sample_tokens"
        self._parked = self._kv_step.run_forward(plan, lambda: self._forward(plan))

    def _forward(self, plan: SchedulerOutput) -> ExecuteModelState | None:
        self._update_rows(plan)
        if plan.is_empty:
            return None
        batch = self._inputs.build(plan)
        if self._max_drafts_in_flight is not None:
            exact = self._states.num_computed_exact[batch.host.rows, 0].cpu().numpy()
            ahead = batch.host.num_computed_upper_bound - exact
            assert ((ahead >= 0) & (ahead <= self._max_drafts_in_flight)).all(), ahead
        output = self._passes.forward(batch)
        return ExecuteModelState(batch, output, plan.num_drafts_to_propose, plan.grammar_request_ids)

    @torch.inference_mode()
    def sample_tokens(self, grammars: GrammarOutput) -> PendingOutput:
        """Samples for the step that `execute_model` ran last, within its grammars."""
        state, self._parked = self._parked, None
        sample = partial(self._sample, state, grammars) if state is not None else _no_output
        output, finished = self._kv_step.run_sampling(sample)
        if output is None:
            return ReadyOutput(ModelRunnerOutput.with_kv_conn_output_only(finished))
        return replace(output, kv_connector_output=finished)

    @property
    def runs_ahead(self) -> bool:
        """Whether a step is launched here and computed elsewhere, so that its result comes later."""
        return self._sampler.runs_ahead

    def shutdown(self) -> None:
        """No step will come any more."""
        self._kv_step.shutdown()

    def _sample(self, state: ExecuteModelState, grammars: GrammarOutput) -> StepOutput:
        batch, output, num_drafts = state.batch, state.output, state.num_drafts_to_propose
        parts = self._prompt_scorer.of_step(batch, output.hidden)
        sampled = self._passes.sample(batch, output, grammars)
        self._passes.propose(batch, output, num_drafts if len(batch.host.sampling) else 0)
        return StepOutput(sampled, (*parts, *self._report_drafts(state)), self._passes.replays(batch))

    def _report_drafts(self, state: ExecuteModelState) -> tuple[PendingPart, ...]:
        num_drafts = state.num_drafts_to_propose
        if not num_drafts or not (state.grammar_request_ids or self._speculator.leaves_gaps):
            return ()
        names = state.batch.host.sampling_request_ids
        wanted = [i for i, name in enumerate(names) if name in state.grammar_request_ids]
        if not names or not (wanted or self._speculator.leaves_gaps):
            return ()
        drafts = self._copy_to_host(self._states.drafts[state.batch.tensors.sampling_rows, :num_drafts])
        return (CopiedDrafts(names, wanted, self._speculator.leaves_gaps, drafts),)

    def _update_rows(self, plan: SchedulerOutput) -> None:
        self._sampling.remove(self._states.rows.remove(plan.finished_request_ids | plan.preempted_request_ids))
        for new in plan.new_requests:
            row = self._states.add(new)
            self._sampler.add(row, new.request)
            self._blocks.clear(row)
            self._append_blocks(row, new.block_ids, num_kept=new.num_computed_tokens)
        for cached in plan.cached_requests:
            row = self._states.rows.update(cached.request_id, cached.num_computed_tokens)
            self._append_blocks(row, cached.new_block_ids)
        self._writer.apply()

    def _append_blocks(self, row: int, block_ids: BlockIds, num_kept: int = 0) -> None:
        self._blocks.append(row, block_ids)
        if self._poisoned:
            # Blocks beyond the cached prefix hold nothing yet: a read before they are written must show.
            fresh = [i for ids in block_ids for i in ids[num_kept // self._blocks.block_size :]]
            for tensor in self._poisoned:
                tensor[fresh] = torch.nan

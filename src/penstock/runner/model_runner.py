"""One device's step, in two calls that alternate strictly:

    execute_model(plan)   free rows, add rows, refresh rows, build the batch, run the model; parks an ExecuteModelState
    sample_tokens()       end the step as the rank's place in the pipeline requires (`step_end`), return what the
                          scheduler needs

They are separate so that the CPU can compute the tokens that a grammar allows while the model runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import torch

from penstock.kv_transfer.kv_step import KVStep
from penstock.messages.runner_output import ModelRunnerOutput
from penstock.messages.scheduler_output import BlockIds, GrammarOutput, SchedulerOutput
from penstock.models.interface import ModelOutput
from penstock.runner.block_tables import BlockTables
from penstock.runner.buffers import TableWriter
from penstock.runner.expert_mover import ExpertStep
from penstock.runner.input_batch import InputBatch, InputBuilder
from penstock.runner.kv_cache import KVCache
from penstock.runner.lora_step import LoraStep
from penstock.runner.outputs import PendingOutput, ReadyOutput, StepOutput
from penstock.runner.request_states import RequestStates
from penstock.runner.step_end import ExecuteModelState, StepEnd

BYTE_OF_NAN = 0xFF
"""A number of such bytes is NaN in every floating-point type."""
_NO_TOKENS = StepOutput(ReadyOutput(ModelRunnerOutput()))


class Forward(Protocol):
    """The part of `Passes` that every stage has."""

    def forward(self, batch: InputBatch) -> ModelOutput: ...


def _no_output() -> None:
    """The output of a step without tokens."""


@dataclass(eq=False)
class ModelRunner:
    """Owns the rows and drives its parts, which are passed to it. Not thread-safe: one thread drives it."""

    states: RequestStates
    blocks: BlockTables
    writer: TableWriter  # for the tables of states and blocks
    inputs: InputBuilder
    passes: Forward
    end: StepEnd
    kv_step: KVStep
    experts: ExpertStep
    poisoned: KVCache | None  # the cache if new blocks are filled with NaN, so that early reads show
    lora: LoraStep | None
    max_drafts_in_flight: int | None  # if set, every step checks the two counts of computed tokens
    _parked: ExecuteModelState | None = field(default=None, init=False)

    @torch.inference_mode()
    def execute_model(self, plan: SchedulerOutput) -> None:
        """Applies the plan to the rows and runs the model over its tokens."""
        assert self._parked is None, "execute_model was called twice without sample_tokens"
        self._parked = self.kv_step.run_forward(plan, lambda: self._forward(plan))

    def _forward(self, plan: SchedulerOutput) -> ExecuteModelState | None:
        self.experts.begin(plan)
        if self.lora is not None:
            self.lora.begin(plan)
        self._update_rows(plan)
        if plan.is_empty:
            self.experts.skip()
            return None
        self.end.prepare(plan)
        batch = self.inputs.build(plan)
        if self.lora is not None:
            self.lora.set_rows(batch.host)
        if self.max_drafts_in_flight is not None:
            exact = self.states.num_computed_exact[batch.host.rows, 0].cpu().numpy()
            ahead = batch.host.num_computed_upper_bound - exact
            assert ((ahead >= 0) & (ahead <= self.max_drafts_in_flight)).all(), ahead
        output = self.passes.forward(batch)
        return ExecuteModelState(plan.step, batch, output, plan.num_drafts_to_propose, plan.grammar_request_ids)

    @torch.inference_mode()
    def sample_tokens(self, grammars: GrammarOutput) -> PendingOutput:
        """Samples for the step that `execute_model` ran last, constrained by its grammars."""
        state, self._parked = self._parked, None
        end = partial(self.end.finish, state, grammars) if state is not None else _no_output
        output, finished = self.kv_step.run_sampling(end)
        experts = self.experts.end()
        output = replace(output or _NO_TOKENS, kv_connector_output=finished, experts=experts)
        return output if self.lora is None else self.lora.finish(output)

    @property
    def runs_ahead(self) -> bool:
        """Whether a step is launched here and computed on a device, so that its result arrives later."""
        return self.end.runs_ahead

    def shutdown(self) -> None:
        """Shuts down; no step follows."""
        self.kv_step.shutdown()
        self.experts.shutdown()

    def _update_rows(self, plan: SchedulerOutput) -> None:
        self.end.remove(self.states.rows.remove(plan.finished_request_ids | plan.preempted_request_ids))
        for new in plan.new_requests:
            row = self.states.add(new)
            self.end.add(row, new.request)
            self.blocks.clear(row)
            self._append_blocks(row, new.block_ids, num_kept=new.num_computed_tokens)
        for request_id, block_ids in plan.new_block_ids.items():
            self._append_blocks(self.states.rows.row(request_id), block_ids)
        self.writer.apply()

    def _append_blocks(self, row: int, block_ids: BlockIds, num_kept: int = 0) -> None:
        self.blocks.append(row, block_ids)
        if self.poisoned is not None:
            # Blocks after the cached prefix have no content yet: a read before they are written must show.
            for group, ids in enumerate(block_ids):
                self.poisoned.fill(group, ids[num_kept // self.blocks.block_size :], BYTE_OF_NAN)

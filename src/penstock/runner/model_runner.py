"""One device's step, in two calls that alternate strictly:

    execute_model(plan)   free rows, add rows, refresh rows, build the batch, run the model; parks an ExecuteModelState
    sample_tokens()       sample, store the tokens where the next step reads them, return what the scheduler needs

They are two so that the CPU can work out which tokens a grammar allows while the model runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from penstock.attention.metadata import ForwardContext
from penstock.config.engine import SchedulerConfig
from penstock.kernels.prepare_inputs import store_sampled
from penstock.messages.kv_cache_spec import NULL_BLOCK
from penstock.messages.runner_output import ModelRunnerOutput, TokenLogprobs
from penstock.messages.scheduler_output import BlockIds, SchedulerOutput
from penstock.runner.block_tables import BlockTables
from penstock.runner.buffers import to_device
from penstock.runner.input_batch import InputBatch, make_attention_metadata, make_input_batch
from penstock.runner.load import KVCache, LoadedModel
from penstock.runner.request_states import RequestStates
from penstock.runner.sampling.logprobs import token_logprobs
from penstock.runner.sampling.sampler import SamplerOutput, sample
from penstock.runner.sampling.states import SamplingBatch, SamplingStates

# Prompt log probabilities need logits for every prompt token: this many rows of the vocabulary at a time.
_PROMPT_LOGITS_ROWS = 256


@dataclass(frozen=True, slots=True)
class ExecuteModelState:
    """What `sample_tokens` needs of the forward pass before it."""

    batch: InputBatch
    hidden: torch.Tensor  # [num_tokens, hidden_size]


class ModelRunner:
    """Receives finished parts and owns the rows. Not thread-safe: one thread drives it."""

    def __init__(self, loaded: LoadedModel, cache: KVCache, config: SchedulerConfig, debug: bool = False) -> None:
        self._model = loaded.model
        self._cache = cache
        self._device = loaded.device
        self._debug = debug
        if debug:
            # The null block is unreadable: whoever reads it shall see.
            for tensor in cache.tensors.values():
                tensor[NULL_BLOCK] = torch.nan
        self._states = RequestStates(config.max_num_seqs, config.max_model_len, loaded.device)
        self._sampling = SamplingStates(config.max_num_seqs)
        groups = cache.config.groups
        self._blocks = BlockTables(
            len(groups), config.max_num_seqs, config.max_model_len, cache.config.block_size, loaded.device
        )
        self._layers_of_group = [group.layer_names for group in groups]
        self._parked: ExecuteModelState | None = None

    @torch.inference_mode()
    def execute_model(self, plan: SchedulerOutput) -> None:
        """Applies the plan to the rows and runs the model over its tokens."""
        assert self._parked is None, "execute_model was called twice without sample_tokens"
        self._update_rows(plan)
        if plan.is_empty:
            return
        batch = make_input_batch(plan, self._states, self._blocks)
        if self._debug:
            exact = self._states.num_computed_exact[batch.idx_mapping, 0].cpu().numpy()
            assert (exact == batch.num_computed_np).all(), (exact, batch.num_computed_np)
        context = self._make_context(batch)
        hidden = self._model.forward(batch.tokens.input_ids, batch.tokens.positions, context)
        self._states.num_computed_exact[batch.idx_mapping, 0] = batch.seq_lens.long()
        self._parked = ExecuteModelState(batch, hidden)

    @torch.inference_mode()
    def sample_tokens(self) -> ModelRunnerOutput:
        """Samples for the step that `execute_model` ran last."""
        state, self._parked = self._parked, None
        if state is None:
            return ModelRunnerOutput()
        prompt_logprobs = self._prompt_logprobs(state)
        batch = state.batch
        if not len(batch.sampling_np):
            no_tokens = dict.fromkeys(batch.request_ids, ())
            return ModelRunnerOutput(sampled_token_ids=no_tokens, prompt_logprobs=prompt_logprobs)
        sampling = self._make_sampling_batch(batch)
        logits = self._model.compute_logits(state.hidden[batch.logits_indices])
        sampled = sample(logits, sampling)
        store_sampled(sampled.token_ids, sampling.rows, sampling.positions, self._states.token_ids)
        return _make_output(batch, sampled, self._logprobs(logits, sampled, sampling), prompt_logprobs)

    def _update_rows(self, plan: SchedulerOutput) -> None:
        self._sampling.remove(self._states.remove(plan.finished_request_ids | plan.preempted_request_ids))
        for new in plan.new_requests:
            row = self._states.add(new)
            self._sampling.add(row, new.request)
            self._blocks.clear(row)
            self._append_blocks(row, new.block_ids, num_kept=new.num_computed_tokens)
        for cached in plan.cached_requests:
            self._append_blocks(self._states.update(cached), cached.new_block_ids)
        self._states.apply_staged_writes()
        self._blocks.apply_staged_writes()

    def _append_blocks(self, row: int, block_ids: BlockIds, num_kept: int = 0) -> None:
        self._blocks.append(row, block_ids)
        if self._debug:
            # Blocks beyond the cached prefix hold nothing yet: whoever reads them before they are written shall see.
            fresh = [i for ids in block_ids for i in ids[num_kept // self._blocks.block_size :]]
            for tensor in self._cache.tensors.values():
                tensor[fresh] = torch.nan

    def _make_context(self, batch: InputBatch) -> ForwardContext:
        metadata = make_attention_metadata(batch, self._blocks)
        by_layer = {name: view for names, view in zip(self._layers_of_group, metadata, strict=True) for name in names}
        return ForwardContext(by_layer, self._cache.tensors)

    def _make_sampling_batch(self, batch: InputBatch) -> SamplingBatch:
        index = batch.sampling_np
        on_device = to_device(index, self._device)
        return SamplingBatch(
            requests=self._sampling.at(batch.rows_np[index]),
            positions_np=batch.num_computed_np[index] + batch.query_lens_np[index],
            rows=batch.idx_mapping[on_device],
            positions=batch.seq_lens[on_device].long(),
            token_ids=self._states.token_ids,
        )

    def _logprobs(
        self, logits: torch.Tensor, sampled: SamplerOutput, sampling: SamplingBatch
    ) -> dict[str, tuple[TokenLogprobs, ...]]:
        chosen = sampling.where(lambda request: request.sampling_params.logprobs is not None)
        if not chosen:
            return {}
        index = sampling.indices(chosen)
        num_top = [sampling.requests[i].sampling_params.logprobs or 0 for i in chosen]
        rows = token_logprobs(logits[index], sampled.token_ids[index], num_top)
        return {sampling.requests[i].request_id: (row,) for i, row in zip(chosen, rows, strict=True)}

    def _prompt_logprobs(self, state: ExecuteModelState) -> dict[str, tuple[TokenLogprobs, ...]]:
        batch = state.batch
        requests = self._sampling.at(batch.rows_np)
        starts = np.cumsum(batch.query_lens_np) - batch.query_lens_np
        found: dict[str, tuple[TokenLogprobs, ...]] = {}
        for index, request in enumerate(requests):
            num_top = request.sampling_params.prompt_logprobs
            first = int(batch.num_computed_np[index])
            # The logits at position p speak of the token at p + 1, so the prompt's last position asks for nothing.
            count = min(int(batch.query_lens_np[index]), len(request.prompt_token_ids) - 1 - first)
            if num_top is not None and count > 0:
                hidden = state.hidden[int(starts[index]) :][:count]
                targets = self._states.token_ids[int(batch.rows_np[index]), first + 1 :][:count].long()
                found[request.request_id] = self._logprobs_of(hidden, targets, num_top)
        return found

    def _logprobs_of(self, hidden: torch.Tensor, targets: torch.Tensor, num_top: int) -> tuple[TokenLogprobs, ...]:
        rows: list[TokenLogprobs] = []
        for part, tokens in zip(hidden.split(_PROMPT_LOGITS_ROWS), targets.split(_PROMPT_LOGITS_ROWS), strict=True):
            rows += token_logprobs(self._model.compute_logits(part.contiguous()), tokens, [num_top] * len(tokens))
        return tuple(rows)


def _make_output(
    batch: InputBatch,
    sampled: SamplerOutput,
    logprobs: dict[str, tuple[TokenLogprobs, ...]],
    prompt_logprobs: dict[str, tuple[TokenLogprobs, ...]],
) -> ModelRunnerOutput:
    tokens: dict[str, tuple[int, ...]] = dict.fromkeys(batch.request_ids, ())
    tokens.update(
        (request_id, (token,))
        for request_id, token in zip(batch.sampling_request_ids, sampled.token_ids.tolist(), strict=True)
    )
    failed = [
        request_id
        for request_id, is_valid in zip(batch.sampling_request_ids, sampled.is_valid.tolist(), strict=True)
        if not is_valid
    ]
    return ModelRunnerOutput(
        sampled_token_ids=tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        failed_requests=dict.fromkeys(failed, "no token can be drawn: the logits are not finite"),
    )

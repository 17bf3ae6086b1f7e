"""The end of a step: from logits to tokens in their rows, drafts judged, counts put right."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from msgspec.structs import replace

from penstock.config.engine import SchedulerConfig
from penstock.config.speculative import SpeculativeConfig
from penstock.kernels.dispatch import has_gpu_kernels
from penstock.kernels.prepare_inputs import store_sampled
from penstock.messages.requests import EngineRequest
from penstock.messages.runner_output import TokenLogprobs
from penstock.messages.scheduler_output import GrammarOutput
from penstock.runner.buffers import TableWriter, to_device
from penstock.runner.host_batch import HostBatch
from penstock.runner.input_batch import InputBatch
from penstock.runner.load import LoadedModel
from penstock.runner.outputs import (
    PendingOutput,
    ReadyOutput,
    SampledArrays,
    Verdict,
    make_empty_output,
    make_output,
)
from penstock.runner.request_states import RequestStates
from penstock.runner.sampling.logprobs import token_logprobs
from penstock.runner.sampling.sampler import SamplerOutput
from penstock.runner.sampling.states import SamplingBatch, SamplingStates
from penstock.runner.speculation.pick import Picker
from penstock.runner.speculation.select import make_verification
from penstock.runner.speculation.verify import Verified, Verifier


class StepSampler(Protocol):
    """Lifecycle: one is chosen and built with the runner. Threading: the runner's thread.

    When `skip` or `sample` return, what is launched next finds the step's tokens and exact counts in the rows' tables.
    """

    runs_ahead: bool
    """Whether a result may be asked for later than its step is launched."""

    def add(self, row: int, request: EngineRequest) -> None:
        """A request gets its row; staged as the rows themselves are."""
        ...

    def skip(self, batch: InputBatch) -> PendingOutput:
        """Ends a step in which no request samples. Its result, too, is there when the step has been computed."""
        ...

    def sample(self, logits: torch.Tensor, batch: InputBatch, grammars: GrammarOutput) -> PendingOutput:
        """Ends a step. `logits` [num_logits, vocab_size] in the model's dtype are left as they are."""
        ...


def make_step_sampler(
    loaded: LoadedModel,
    config: SchedulerConfig,
    speculative: SpeculativeConfig | None,
    states: RequestStates,
    sampling: SamplingStates,
    writer: TableWriter,
) -> tuple[StepSampler, Picker]:
    """With what picks the drafts that it judges. Raises ConfigError when there is no memory for either."""
    if has_gpu_kernels(loaded.device):
        # Only now: a CPU needs no Triton.
        from penstock.runner.gpu.sampling.sampler import make_gpu_sampling

        return make_gpu_sampling(loaded, config, speculative, states, sampling, writer)
    picker, verifier = make_verification(loaded, speculative, states.drafts, sampling)
    return TorchStepSampler(states, sampling, verifier, knows_positions=config.max_num_drafts == 0), picker


class TorchStepSampler:
    """By torch, on a CPU (`StepSampler`).

    `knows_positions`: there are no drafts, behind which the CPU knows no exact position.
    """

    runs_ahead = False

    def __init__(
        self, states: RequestStates, sampling: SamplingStates, verifier: Verifier, knows_positions: bool
    ) -> None:
        self._states = states
        self._sampling = sampling
        self._verifier = verifier
        self._knows_positions = knows_positions

    def add(self, row: int, request: EngineRequest) -> None:
        self._sampling.add(row, request)

    def skip(self, batch: InputBatch) -> PendingOutput:
        self._states.num_computed_exact[batch.tensors.idx_mapping, 0] = batch.tensors.seq_lens.long()
        return ReadyOutput(make_empty_output(batch.host))

    def sample(self, logits: torch.Tensor, batch: InputBatch, grammars: GrammarOutput) -> PendingOutput:
        sampling = self._make_batch(batch, grammars)
        sampled, verified = self._verifier.verify(logits, sampling, batch.tensors.sampling_rows, batch.host.num_drafts)
        self._store(batch, sampled, verified)
        arrays = SampledArrays(
            sampled.token_ids.cpu().numpy(),
            _verdicts(sampled.is_valid, logits).cpu().numpy(),
            verified.num_accepted.cpu().numpy(),
            verified.num_real_drafts.cpu().numpy(),
        )
        output = make_output(batch.host, arrays)
        return ReadyOutput(replace(output, logprobs=_logprobs(logits, sampled, sampling)))

    def _store(self, batch: InputBatch, sampled: SamplerOutput, verified: Verified) -> None:
        """Puts the sampled tokens where the next step reads them, and counts what was computed but rejected drafts."""
        states = self._states
        states.num_computed_exact[batch.tensors.idx_mapping, 0] = batch.tensors.seq_lens.long()
        store_sampled(sampled.token_ids, batch.tensors.logits_rows, batch.tensors.logits_positions, states.token_ids)
        if batch.host.has_drafts:
            num_drafts = to_device(batch.host.num_drafts, states.token_ids.device)
            states.num_computed_exact[batch.tensors.sampling_rows, 0] -= num_drafts - verified.num_accepted

    def _make_batch(self, batch: InputBatch, grammars: GrammarOutput) -> SamplingBatch:
        host = batch.host
        index = host.sampling[host.logits_request]
        if self._knows_positions:
            positions_np = host.num_computed_upper_bound[index] + host.query_lens[index]
        else:
            positions_np = batch.tensors.logits_positions.cpu().numpy()
        return SamplingBatch(
            requests=self._sampling.at(host.rows[index]),
            positions_np=positions_np,
            rows=batch.tensors.logits_rows,
            positions=batch.tensors.logits_positions,
            token_ids=self._states.token_ids,
            bitmasks=_arrange_bitmasks(host, grammars),
        )


def _logprobs(
    logits: torch.Tensor, sampled: SamplerOutput, sampling: SamplingBatch
) -> dict[str, tuple[TokenLogprobs, ...]]:
    chosen = sampling.where(lambda request: request.sampling_params.logprobs is not None)
    if not chosen:
        return {}
    index = sampling.indices(chosen)
    num_top = [sampling.requests[i].sampling_params.logprobs or 0 for i in chosen]
    rows = token_logprobs(logits[index], sampled.token_ids[index], num_top)
    found: dict[str, tuple[TokenLogprobs, ...]] = {}
    for i, row in zip(chosen, rows, strict=True):
        request_id = sampling.requests[i].request_id
        found[request_id] = (*found.get(request_id, ()), row)
    return found


def _verdicts(is_valid: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """[num_logits] int8: `Verdict` on each row of `logits`, [num_logits, vocab_size]."""
    if bool(is_valid.all()):
        return torch.zeros_like(is_valid, dtype=torch.int8)
    is_finite = ~(logits.isnan() | (logits == torch.inf)).any(-1)
    return torch.where(is_finite, Verdict.NOTHING_ALLOWED, Verdict.NOT_FINITE).to(torch.int8) * ~is_valid


def _arrange_bitmasks(host: HostBatch, grammars: GrammarOutput) -> dict[int, np.ndarray]:
    """Each logits row's bitmask, where it has one."""
    if not grammars.bitmasks:
        return {}
    found: dict[int, np.ndarray] = {}
    for request_id, start in zip(host.sampling_request_ids, host.window_starts.tolist(), strict=True):
        for offset, mask in enumerate(grammars.bitmasks.get(request_id, ())):
            found[start + offset] = mask
    return found

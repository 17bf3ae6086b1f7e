"""Samples and stores a step's tokens with torch, on a CPU."""

from __future__ import annotations

import numpy as np
import torch
from msgspec.structs import replace

from penstock.kernels.prepare_inputs import store_sampled
from penstock.messages.requests import RowRequest
from penstock.messages.runner_output import TokenLogprobs
from penstock.messages.scheduler_output import GrammarOutput
from penstock.runner.buffers import to_device
from penstock.runner.cpu.drafts import (
    DraftDistributions,
    ExactVerifier,
    RejectionVerifier,
    SamplingPicker,
    SyntheticVerifier,
    TorchSampledStep,
)
from penstock.runner.cpu.sampler import sample
from penstock.runner.host_batch import HostBatch
from penstock.runner.input_batch import InputBatch
from penstock.runner.memory import DeviceMemory
from penstock.runner.outputs import PendingOutput, ReadyOutput, SampledArrays, Verdict, make_empty_output, make_output
from penstock.runner.parts import SamplingContext
from penstock.runner.request_states import RequestStates
from penstock.runner.sampling.batch import SamplingBatch
from penstock.runner.sampling.features import WITH_LOGPROBS
from penstock.runner.sampling.logprobs import token_logprobs
from penstock.runner.sampling.states import SamplingStates
from penstock.runner.speculation.draft import BestPicker, Picker, allocate_draft_logits
from penstock.runner.speculation.verifier import Verifier


class TorchStepSampler:
    """`StepSampler`. `knows_positions`: there are no drafts; with drafts the CPU does not know the exact positions."""

    runs_ahead = False

    def __init__(
        self,
        states: RequestStates,
        sampling: SamplingStates,
        verifier: Verifier[TorchSampledStep],
        knows_positions: bool,
    ) -> None:
        self._states = states
        self._sampling = sampling
        self._verifier = verifier
        self._knows_positions = knows_positions

    def add(self, row: int, request: RowRequest) -> None:
        self._sampling.add(row, request)

    def skip(self, batch: InputBatch) -> PendingOutput:
        self._states.num_computed_exact[batch.tensors.idx_mapping, 0] = batch.tensors.seq_lens.long()
        return ReadyOutput(make_empty_output(batch.host))

    def sample(self, logits: torch.Tensor, batch: InputBatch, grammars: GrammarOutput) -> PendingOutput:
        sampling = self._make_batch(batch, grammars)
        sampled = sample(logits, sampling)
        token_ids, distributions = sampled.token_ids, sampled.distributions
        counts = token_ids.new_zeros((2, len(batch.host.rows)))
        if batch.host.has_drafts:
            step = TorchSampledStep(batch, token_ids, counts[0], counts[1], sampling, distributions)
            self._verifier.verify(step)
        self._store(batch, token_ids, counts[0])
        verdicts = _verdicts(distributions.is_valid, logits).numpy()
        arrays = SampledArrays(token_ids.numpy(), verdicts, *counts.numpy()[:, batch.host.sampling])
        output = make_output(batch.host, arrays)
        if sampling.needs & WITH_LOGPROBS:
            output = replace(output, logprobs=_logprobs(logits, token_ids, sampling))
        return ReadyOutput(output)

    def _store(self, batch: InputBatch, token_ids: torch.Tensor, num_accepted: torch.Tensor) -> None:
        """Stores the tokens where the next step reads them; updates the counts, without rejected drafts."""
        states, step = self._states, batch.tensors
        states.num_computed_exact[step.idx_mapping, 0] = step.seq_lens.long()
        store_sampled(token_ids, step.logits_rows, step.logits_positions, states.token_ids)
        if batch.host.has_drafts:
            num_drafts = to_device(batch.host.num_drafts, states.token_ids.device)
            states.num_computed_exact[step.sampling_rows, 0] -= num_drafts - num_accepted[step.sampling]

    def _make_batch(self, batch: InputBatch, grammars: GrammarOutput) -> SamplingBatch:
        host = batch.host
        index = host.sampling[host.logits_request]
        if self._knows_positions:
            positions_np = host.num_computed_upper_bound[index] + host.query_lens[index]
        else:
            positions_np = batch.tensors.logits_positions.numpy()
        return SamplingBatch(
            requests=self._sampling.at(host.rows[index]),
            positions_np=positions_np,
            rows=batch.tensors.logits_rows,
            positions=batch.tensors.logits_positions,
            token_ids=self._states.token_ids,
            bitmasks=_arrange_bitmasks(host, grammars),
            needs=self._sampling.needs(host.sampling_rows),
        )


def _logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, sampling: SamplingBatch
) -> dict[str, tuple[TokenLogprobs, ...]]:
    chosen = sampling.where(lambda request: request.sampling_params.logprobs is not None)
    index = sampling.indices(chosen)
    num_top = [sampling.requests[i].sampling_params.logprobs or 0 for i in chosen]
    rows = token_logprobs(logits[index], token_ids[index], num_top)
    found: dict[str, tuple[TokenLogprobs, ...]] = {}
    for i, row in zip(chosen, rows, strict=True):
        request_id = sampling.requests[i].request_id
        found[request_id] = (*found.get(request_id, ()), row)
    return found


def _verdicts(is_valid: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Returns [num_logits] int8: the `Verdict` on each row of `logits`, [num_logits, vocab_size]."""
    if bool(is_valid.all()):
        return torch.zeros_like(is_valid, dtype=torch.int8)
    is_finite = ~(logits.isnan() | (logits == torch.inf)).any(-1)
    return torch.where(is_finite, Verdict.NOTHING_ALLOWED, Verdict.NOT_FINITE).to(torch.int8) * ~is_valid


def _arrange_bitmasks(host: HostBatch, grammars: GrammarOutput) -> dict[int, np.ndarray]:
    """Returns the bitmasks by logits row, for rows that have one."""
    if not grammars.bitmasks:
        return {}
    found: dict[int, np.ndarray] = {}
    for request_id, start in zip(host.sampling_request_ids, host.window_starts.tolist(), strict=True):
        for offset, mask in enumerate(grammars.bitmasks.get(request_id, ())):
            found[start + offset] = mask
    return found


def make_torch_sampling(context: SamplingContext, memory: DeviceMemory) -> tuple[TorchStepSampler, Picker]:
    """See `DeviceParts.make_sampling`."""
    speculative, drafts = context.speculative, context.states.drafts
    verifier: Verifier[TorchSampledStep] = ExactVerifier(drafts)
    picker: Picker = BestPicker()
    if speculative is not None and speculative.synthetic_acceptance_rates:
        verifier = SyntheticVerifier(drafts, speculative.synthetic_acceptance_rates)
    elif speculative is not None and speculative.samples_drafts:
        kept = DraftDistributions(allocate_draft_logits(context.loaded, len(drafts) - 1, drafts.shape[1], memory))
        verifier, picker = RejectionVerifier(drafts, kept), SamplingPicker(context.sampling, kept)
    knows_positions = context.config.max_num_drafts == 0
    return TorchStepSampler(context.states, context.sampling, verifier, knows_positions), picker

"""Ends a step without waiting for the device: Triton kernels draw, verify and store tokens, which are copied back
asynchronously.

A step's launches depend on the features that its rows use and on whether it has a grammar:

    always          the maxima and sums of the logits' tiles, a token per row, counts and tokens into the rows' tables
    truncation      four launches between the two, for top_k, top_p and min_p
    adjustment      one before them, for everything that changes logits; one more that counts tokens, for penalties;
                    one copy to the device, for grammars
    log probabilities   two launches after them; one more for likeliest tokens
    drafts          the verifier's: one launch, or three if drafts were drawn
"""

from __future__ import annotations

import enum

import torch

from penstock.config.engine import SchedulerConfig
from penstock.kernels.triton.prepare_inputs import finish_step
from penstock.kernels.triton.sampling.draw import sample
from penstock.kernels.triton.sampling.logprobs import LogprobsWorkspace, score_tokens
from penstock.kernels.triton.sampling.rejection import KeptDrafts
from penstock.kernels.triton.sampling.tiles import Workspace
from penstock.messages.requests import RowRequest
from penstock.messages.scheduler_output import GrammarOutput
from penstock.runner.gpu.buffers import Fence, FetchRing
from penstock.runner.gpu.sampling.adjuster import Bitmasks, BitmaskUploader, LogitsAdjuster
from penstock.runner.gpu.sampling.drafts import (
    DrawingPicker,
    ExactVerifier,
    GpuSampledStep,
    RejectionVerifier,
    SyntheticVerifier,
)
from penstock.runner.gpu.sampling.outputs import CopiedOutput, EmptyOutput, Packed
from penstock.runner.gpu.sampling.rows import SamplingRows
from penstock.runner.input_batch import InputBatch
from penstock.runner.memory import DeviceMemory
from penstock.runner.outputs import PendingOutput
from penstock.runner.parts import SamplingContext
from penstock.runner.request_states import RequestStates
from penstock.runner.sampling.features import CHANGED_LOGITS, TRUNCATED, WITH_LOGPROBS, WITH_TOP_LOGPROBS
from penstock.runner.sampling.noise import Purpose
from penstock.runner.sampling.states import SamplingStates
from penstock.runner.speculation.draft import BestPicker, Picker, allocate_draft_logits
from penstock.runner.speculation.verifier import Verifier


def make_gpu_sampling(context: SamplingContext, memory: DeviceMemory) -> tuple[GpuStepSampler, Picker]:
    """See `DeviceParts.make_sampling`."""
    config, speculative, drafts = context.config, context.speculative, context.states.drafts
    device, vocab_size = drafts.device, context.loaded.config.vocab_size
    rows = SamplingRows(config.max_num_seqs, vocab_size, device, context.writer)
    workspace = Workspace.allocate(config.max_num_seqs * (1 + config.max_num_drafts), vocab_size, device)
    verifier: Verifier[GpuSampledStep] = ExactVerifier(drafts)
    picker: Picker = BestPicker()
    if speculative is not None and speculative.synthetic_acceptance_rates:
        verifier = SyntheticVerifier(drafts, speculative.synthetic_acceptance_rates, rows.tables.seed)
    elif speculative is not None and speculative.samples_drafts:
        kept = KeptDrafts.around(allocate_draft_logits(context.loaded, len(drafts) - 1, drafts.shape[1], memory))
        verifier = RejectionVerifier(drafts, kept, rows.tables, workspace)
        picker = DrawingPicker(rows.tables, workspace, kept)
    return GpuStepSampler(config, context.states, context.sampling, rows, workspace, verifier), picker


_RARE = CHANGED_LOGITS | WITH_LOGPROBS


class CommonSampling(enum.Enum):
    """The common kinds of sampling; all others are rare."""

    WHOLE = enum.auto()  # any temperature, from the whole vocabulary
    TRUNCATED = enum.auto()  # some rows with top_k, top_p or min_p


class GpuStepSampler:
    """See the module (`StepSampler`)."""

    runs_ahead = True

    def __init__(
        self,
        config: SchedulerConfig,
        states: RequestStates,
        sampling: SamplingStates,
        rows: SamplingRows,
        workspace: Workspace,
        verifier: Verifier[GpuSampledStep],
    ) -> None:
        device = states.token_ids.device
        self._device = device
        self._states = states
        self._sampling = sampling
        self._rows = rows
        self._workspace = workspace
        self._verifier = verifier
        self._bitmasks = BitmaskUploader(device, config.max_num_in_flight)
        num_logits = config.max_num_seqs * (1 + config.max_num_drafts)
        self._adjuster = LogitsAdjuster(rows, states.token_ids, num_logits)
        self._sampled = Packed(num_logits, config.max_num_seqs, device)
        self._copies = FetchRing(self._sampled.memory, config.max_num_in_flight + 1)

    def add(self, row: int, request: RowRequest) -> None:
        self._sampling.add(row, request)
        self._rows.add(row, request)

    def skip(self, batch: InputBatch) -> PendingOutput:
        self._finish(batch)
        fence = Fence(self._device)
        fence.record()
        return EmptyOutput(batch.host, fence)

    def sample(self, logits: torch.Tensor, batch: InputBatch, grammars: GrammarOutput) -> PendingOutput:
        needs = self._sampling.needs(batch.host.sampling_rows)
        bitmasks = self._bitmasks.upload(batch.host, grammars, len(logits))
        adjusted = self._adjuster.adjust(logits, batch, needs, bitmasks)
        self.begin()
        self._draw(adjusted, batch, bool(needs & TRUNCATED), bitmasks)
        if needs & WITH_LOGPROBS:
            self._score(logits, batch, bool(needs & WITH_TOP_LOGPROBS))
        return self.fetch(batch, len(logits) if needs & WITH_LOGPROBS else 0)

    def common_kind(self, batch: InputBatch, grammars: GrammarOutput) -> CommonSampling | None:
        """Returns the kind of a step that needs only `draw`, else None."""
        needs = self._sampling.needs(batch.host.sampling_rows)
        if needs & _RARE or grammars.bitmasks:
            return None
        return CommonSampling.TRUNCATED if needs & TRUNCATED else CommonSampling.WHOLE

    def begin(self) -> None:
        """Called before drawing: the last step's results must have been copied."""
        self._copies.join()

    def draw(self, logits: torch.Tensor, batch: InputBatch, kind: CommonSampling) -> None:
        """Does all that most steps need. A CUDA graph may contain it."""
        self._draw(logits, batch, kind is CommonSampling.TRUNCATED, self._bitmasks.none)

    def fetch(self, batch: InputBatch, num_records: int = 0) -> PendingOutput:
        """Starts the copy of the drawn tokens to the CPU, with `num_records` records of log probabilities."""
        num_top = self._rows.num_top_logprobs(batch.host.sampling_rows)
        copied = self._copies.fetch(self._sampled.num_bytes(num_records))
        return CopiedOutput(batch.host, num_top, copied, self._sampled)

    def _draw(self, logits: torch.Tensor, batch: InputBatch, truncates: bool, bitmasks: Bitmasks) -> None:
        step, drawn, num_logits = batch.tensors, self._sampled, len(logits)
        token_ids = drawn.token_ids[:num_logits]
        tables = (self._rows.tables, self._workspace)
        out = (token_ids, drawn.verdicts[:num_logits])
        sample(logits, step.logits_rows, step.logits_positions, *tables, int(Purpose.SAMPLE), truncates, *out)
        if batch.host.has_drafts:
            num_reqs = len(step.idx_mapping)
            counts = (drawn.num_accepted[:num_reqs], drawn.num_real_drafts[:num_reqs])
            self._verifier.verify(GpuSampledStep(batch, token_ids, *counts, logits, truncates, bitmasks))
        self._finish(batch)

    def _score(self, logits: torch.Tensor, batch: InputBatch, with_top: bool) -> None:
        """Log probabilities are computed from the model's logits before any adjustment."""
        rows = batch.tensors.logits_rows
        workspace = LogprobsWorkspace.allocate(len(logits), logits.shape[1], self._device)
        token_ids, records = self._sampled.token_ids[: len(logits)], self._sampled.records[: len(logits)]
        score_tokens(logits, rows, self._rows.num_top, token_ids, workspace, with_top, records)

    def _finish(self, batch: InputBatch) -> None:
        states, step = self._states, batch.tensors
        num_accepted = self._sampled.num_accepted[: len(step.idx_mapping)]
        requests, tables = (step.idx_mapping, step.seq_lens), (states.num_computed_exact, states.token_ids)
        finish_step(self._sampled.token_ids, step.windows, num_accepted, *requests, *tables)

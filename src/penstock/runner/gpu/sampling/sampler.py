"""The end of a step without a word from the device: tokens are drawn, judged and stored by Triton's kernels, and copied
back while the CPU goes on.

What a step launches beyond that follows from what its rows' requests asked for when they came (`Needs`) and whether it
has a grammar:

    always          the maxima and sums of the logits' tiles, a token per row, counts and tokens into the rows' tables
    truncation      four launches between the two, for top_k, top_p and min_p
    adjustment      one before them, for everything that changes logits; one more that counts tokens, for penalties;
                    one copy to the device, for grammars
    log probabilities   two launches behind them; one more for likeliest tokens
    drafts          what the judge does, which is one launch, or three where drafts were drawn
"""

from __future__ import annotations

import itertools

import torch

from penstock.config.engine import SchedulerConfig
from penstock.config.speculative import SpeculativeConfig
from penstock.kernels.triton.prepare_inputs import finish_step
from penstock.kernels.triton.sampling.draw import sample
from penstock.kernels.triton.sampling.logprobs import LogprobsWorkspace, score_tokens
from penstock.kernels.triton.sampling.rejection import KeptDrafts
from penstock.kernels.triton.sampling.tiles import Workspace
from penstock.messages.requests import EngineRequest
from penstock.messages.scheduler_output import GrammarOutput
from penstock.runner.buffers import Fence, SideStream, TableWriter
from penstock.runner.gpu.sampling.adjuster import BitmaskUploader, LogitsAdjuster
from penstock.runner.gpu.sampling.judges import ExactJudge, Judge, RejectionJudge, Sampled, SyntheticJudge
from penstock.runner.gpu.sampling.outputs import EmptyOutput, Packed
from penstock.runner.gpu.sampling.picker import DrawingPicker
from penstock.runner.gpu.sampling.rows import Needs, SamplingRows
from penstock.runner.input_batch import InputBatch
from penstock.runner.load import LoadedModel
from penstock.runner.outputs import PendingOutput
from penstock.runner.request_states import RequestStates
from penstock.runner.sampling.noise import Purpose
from penstock.runner.sampling.states import SamplingStates
from penstock.runner.speculation.pick import BestPicker, Picker, allocate_draft_logits


def make_gpu_sampling(
    loaded: LoadedModel,
    config: SchedulerConfig,
    speculative: SpeculativeConfig | None,
    states: RequestStates,
    sampling: SamplingStates,
    writer: TableWriter,
) -> tuple[GpuStepSampler, Picker]:
    """How tokens are sampled and drafts judged, and how drafts are picked, which belong together.

    Raises ConfigError when the drafts' logits do not fit into the memory.
    """
    device, vocab_size = loaded.device, loaded.config.vocab_size
    rows = SamplingRows(config.max_num_seqs, vocab_size, device, writer)
    workspace = Workspace.allocate(config.max_num_seqs * (1 + config.max_num_drafts), vocab_size, device)
    judge: Judge = ExactJudge(states.drafts)
    picker: Picker = BestPicker()
    if speculative is not None and speculative.synthetic_acceptance_rates:
        judge = SyntheticJudge(states.drafts, speculative.synthetic_acceptance_rates, rows.tables.seed)
    elif speculative is not None and speculative.samples_drafts:
        kept = KeptDrafts.around(allocate_draft_logits(loaded, config.max_num_seqs, config.max_num_drafts))
        judge = RejectionJudge(states.drafts, kept, rows.tables, workspace)
        picker = DrawingPicker(rows.tables, workspace, kept)
    return GpuStepSampler(config, states, sampling, rows, workspace, judge), picker


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
        judge: Judge,
    ) -> None:
        device = states.token_ids.device
        self._device = device
        self._states = states
        self._sampling = sampling
        self._rows = rows
        self._workspace = workspace
        self._judge = judge
        self._bitmasks = BitmaskUploader(device, config.max_num_in_flight)
        num_logits = config.max_num_seqs * (1 + config.max_num_drafts)
        self._adjuster = LogitsAdjuster(rows, states.token_ids, num_logits)
        # One more than steps are in flight: a step's copy has ended when its memory is written again.
        self._ring = itertools.cycle(
            [Packed(num_logits, config.max_num_seqs, device) for _ in range(config.max_num_in_flight + 1)]
        )
        self._beside = SideStream(device)

    def add(self, row: int, request: EngineRequest) -> None:
        self._sampling.add(row, request)
        self._rows.add(row, request)

    def skip(self, batch: InputBatch) -> PendingOutput:
        self._finish(batch, next(self._ring))
        fence = Fence(self._device)
        fence.record()
        return EmptyOutput(batch.host, fence)

    def sample(self, logits: torch.Tensor, batch: InputBatch, grammars: GrammarOutput) -> PendingOutput:
        host, num_logits, sampled = batch.host, len(logits), next(self._ring)
        sampling_rows = host.rows[host.sampling]
        needs = self._rows.needs(sampling_rows)
        truncates = bool(needs & Needs.TRUNCATION)
        bitmasks = self._bitmasks.upload(host, grammars, num_logits)
        adjusted = self._adjuster.adjust(logits, batch, needs, bitmasks)
        token_ids = sampled.token_ids[:num_logits]
        sample(
            adjusted,
            batch.logits_rows,
            batch.logits_positions,
            self._rows.tables,
            self._workspace,
            int(Purpose.SAMPLE),
            truncates,
            token_ids,
            sampled.verdicts[:num_logits],
        )
        if host.has_drafts:
            counts = [each[: len(batch.idx_mapping)] for each in (sampled.num_accepted, sampled.num_real_drafts)]
            self._judge.judge(Sampled(batch, adjusted, truncates, bitmasks, token_ids, *counts))
        self._finish(batch, sampled)
        self._score(logits, batch, needs, sampled)
        num_records = num_logits if needs & Needs.LOGPROBS else 0
        with self._beside.behind_current():
            return sampled.copy(host, self._rows.num_top_logprobs(sampling_rows), num_records)

    def _score(self, logits: torch.Tensor, batch: InputBatch, needs: Needs, sampled: Packed) -> None:
        """Log probabilities are the model's own, before anything was adjusted."""
        if needs & Needs.LOGPROBS:
            score_tokens(
                logits,
                batch.logits_rows,
                self._rows.num_top,
                sampled.token_ids[: len(logits)],
                LogprobsWorkspace.allocate(len(logits), logits.shape[1], self._device),
                bool(needs & Needs.TOP_LOGPROBS),
                sampled.records[: len(logits)],
            )

    def _finish(self, batch: InputBatch, sampled: Packed) -> None:
        states = self._states
        finish_step(
            sampled.token_ids,
            batch.windows,
            sampled.num_accepted[: len(batch.idx_mapping)],
            batch.idx_mapping,
            batch.seq_lens,
            states.num_computed_exact,
            states.token_ids,
        )

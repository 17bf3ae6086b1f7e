"""Log probabilities of a prompt's tokens, which need logits for each of them."""

from __future__ import annotations

import torch
from msgspec.structs import replace

from penstock.messages.runner_output import ModelRunnerOutput
from penstock.models.interface import Model
from penstock.runner.input_batch import InputBatch
from penstock.runner.outputs import PendingPart
from penstock.runner.sampling.logprobs import PendingLogprobs, Score
from penstock.runner.sampling.states import SamplingStates

_LOGITS_ROWS = 256  # rows of the vocabulary at a time


class PromptScorer:
    """Lifecycle: one per runner. Threading: the runner's thread."""

    def __init__(self, model: Model, token_ids: torch.Tensor, sampling: SamplingStates, score: Score) -> None:
        """`token_ids` [max_num_reqs, width] int32 and `sampling` are the runner's, by state row."""
        self._model = model
        self._token_ids = token_ids
        self._sampling = sampling
        self._score_tokens = score

    def of_step(self, batch: InputBatch, hidden: torch.Tensor) -> tuple[PendingPart, ...]:
        """Scores the prompt tokens that the step computed; `hidden` is [num_tokens, hidden_size]."""
        host = batch.host
        chosen = self._sampling.with_prompt_logprobs(host.rows)
        if not len(chosen):
            return ()
        found: dict[str, list[PendingLogprobs]] = {}
        for index, request in zip(chosen, self._sampling.at(host.rows[chosen]), strict=True):
            first, start = int(host.num_computed_upper_bound[index]), int(host.query_start_loc[index])
            # The logits at position p predict the token at p + 1, so the prompt's last position is not scored.
            count = min(int(host.query_lens[index]), request.num_prompt_tokens - 1 - first)
            if count > 0:
                targets = self._token_ids[int(host.rows[index]), first + 1 :][:count].long()
                num_top = request.sampling_params.prompt_logprobs or 0
                found[request.request_id] = self._score(hidden[start:][:count], targets, num_top)

        def add(output: ModelRunnerOutput) -> ModelRunnerOutput:
            rows = {request_id: tuple(row for part in parts for row in part()) for request_id, parts in found.items()}
            return replace(output, prompt_logprobs=rows)

        return (add,) if found else ()

    def _score(self, hidden: torch.Tensor, targets: torch.Tensor, num_top: int) -> list[PendingLogprobs]:
        parts = zip(hidden.split(_LOGITS_ROWS), targets.split(_LOGITS_ROWS), strict=True)
        return [
            self._score_tokens(self._model.compute_logits(part.contiguous()), tokens, num_top) for part, tokens in parts
        ]

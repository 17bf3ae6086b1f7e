"""Converts the engine core's tokens to request outputs: text, stop strings, log probabilities, `n` completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.frontend.detokenizer import Detokenizer
from penstock.frontend.input_processor import ProcessedRequest
from penstock.messages.outputs import CompletionOutput, EngineOutput, FinishReason, Logprob, RequestOutput
from penstock.messages.runner_output import TokenLogprobs
from penstock.messages.sampling_params import SamplingParams
from penstock.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ProcessedOutputs:
    """Requests that changed, in the order of their first change, and engine requests that have ended or must end.

    `ended` gives the reason for each ended engine request; `aborts` those that the engine core still runs.
    """

    request_outputs: list[RequestOutput]
    ended: list[tuple[str, str]]
    aborts: list[str]


@dataclass(slots=True)
class _Child:
    """One completion in progress."""

    parent: RequestOutput
    completion: CompletionOutput
    params: SamplingParams
    detokenizer: Detokenizer | None
    ending_token_ids: frozenset[int]


def _give(completion: CompletionOutput, token_ids: Sequence[int], detokenizer: Detokenizer | None) -> None:
    """Begins a completion with output that was generated before."""
    completion.token_ids.extend(token_ids)
    completion.num_given_tokens = len(token_ids)
    if detokenizer is not None:
        for token_id in token_ids:
            stop = detokenizer.append(token_id)
            assert stop is None, f"output that contains the stop string {stop!r} was accepted"
        completion.text = detokenizer.stable_text(finished=False)
        completion.num_given_characters = len(completion.text)


class OutputProcessor:
    """Keeps a `RequestOutput` per request and updates it; the returned object is updated in place."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._children: dict[str, _Child] = {}

    @property
    def num_unfinished(self) -> int:
        """The number of completions that have not ended."""
        return len(self._children)

    def add_request(self, request: ProcessedRequest) -> RequestOutput:
        """Returns the request's output, still empty, which `process` updates."""
        params = request.params
        output = RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=list(request.prompt_token_ids),
            outputs=[CompletionOutput(index) for index in range(params.n)],
        )
        for child, given, completion in zip(request.completions, request.given, output.outputs, strict=True):
            if params.logprobs is not None:
                completion.logprobs = []
                completion.cumulative_logprob = 0.0
            detokenizer = None
            if self._tokenizer is not None and params.detokenize:
                detokenizer = Detokenizer(self._tokenizer, request.prompt_token_ids, params)
            if child is None:
                _give(completion, given, None)
                completion.finish_reason = FinishReason.STOP.value
                continue
            if given:
                _give(completion, given, detokenizer)
            ending = child.eos_token_ids | child.stop_token_ids
            self._children[child.request_id] = _Child(output, completion, params, detokenizer, ending)
        return output

    def discard(self, request_ids: Iterable[str]) -> None:
        """Forgets completions that no longer have a reader."""
        for request_id in request_ids:
            self._children.pop(request_id, None)

    def process(self, outputs: Sequence[EngineOutput]) -> ProcessedOutputs:
        """Applies one step's outputs; those of requests that have already ended here are dropped."""
        changed: dict[str, RequestOutput] = {}
        ended: list[tuple[str, str]] = []
        aborts: list[str] = []
        for output in outputs:
            child = self._children.get(output.request_id)
            if child is None:
                continue
            stop = self._update(child, output)
            parent, completion = child.parent, child.completion
            changed[parent.request_id] = parent
            if completion.finish_reason is not None:
                ended.append((output.request_id, completion.finish_reason))
                del self._children[output.request_id]
                parent.finished = all(each.finished for each in parent.outputs)
                if stop is not None and output.finish_reason is None:
                    aborts.append(output.request_id)
        return ProcessedOutputs(list(changed.values()), ended, aborts)

    def _update(self, child: _Child, output: EngineOutput) -> str | None:
        """Updates one completion; returns the stop string that ended it."""
        completion, detokenizer = child.completion, child.detokenizer
        self._update_request(child.parent, child.params, output)
        new_token_ids, stop = output.new_token_ids, None
        if detokenizer is not None:
            stop, num_taken = self._detokenize(child, detokenizer, output)
            new_token_ids = new_token_ids[:num_taken]
        completion.token_ids.extend(new_token_ids)
        if completion.logprobs is not None:
            for row in output.logprobs[: len(new_token_ids)]:
                completion.logprobs.append(self._logprob_dict(row))
                completion.cumulative_logprob = (completion.cumulative_logprob or 0.0) + row.logprobs[0]
        if stop is not None:
            completion.finish_reason, completion.stop_reason = FinishReason.STOP.value, stop
        elif output.finish_reason is not None:
            completion.finish_reason, completion.stop_reason = output.finish_reason.value, output.stop_reason
        if detokenizer is not None:
            completion.text = detokenizer.stable_text(completion.finished)
        return stop

    def _update_request(self, request: RequestOutput, params: SamplingParams, output: EngineOutput) -> None:
        """Updates the fields that a request has besides its completions."""
        if params.prompt_logprobs is not None and request.prompt_logprobs is None and output.new_token_ids:
            request.prompt_logprobs = [None, *map(self._logprob_dict, output.prompt_logprobs)]
        if output.num_cached_tokens > request.num_cached_tokens:
            request.num_cached_tokens = output.num_cached_tokens
        if output.num_draft_tokens:
            request.num_draft_tokens += output.num_draft_tokens
            request.num_accepted_tokens += output.num_accepted_tokens
        if output.pooled is not None:
            request.pooled = output.pooled
        if output.kv_transfer_params is not None:
            request.kv_transfer_params = output.kv_transfer_params
        if output.error is not None:
            request.error = output.error
            request.is_request_error |= output.is_request_error

    @staticmethod
    def _detokenize(child: _Child, detokenizer: Detokenizer, output: EngineOutput) -> tuple[str | None, int]:
        """Adds the new tokens; returns the stop string that ended them and how many tokens were used."""
        # A completed grammar is a stop as well, but its last token is text.
        ended = output.finish_reason is FinishReason.STOP and output.new_token_ids[-1] in child.ending_token_ids
        last = len(output.new_token_ids) - 1
        for index, token_id in enumerate(output.new_token_ids):
            if index == last and ended and not child.params.include_stop_str_in_output:
                detokenizer.skip()
                continue
            stop = detokenizer.append(token_id)
            if stop is not None:
                return stop, index + 1
        return None, len(output.new_token_ids)

    def _logprob_dict(self, row: TokenLogprobs) -> dict[int, Logprob]:
        """Orders the chosen token first, then the likeliest; a token that is both keeps its place and its rank."""
        entries: dict[int, Logprob] = {}
        for place, (token_id, logprob) in enumerate(zip(row.token_ids, row.logprobs, strict=True)):
            if token_id not in entries:
                text = None if self._tokenizer is None else self._tokenizer.decode_token(token_id)
                entries[token_id] = Logprob(logprob, row.rank if place == 0 else place, text)
        return entries

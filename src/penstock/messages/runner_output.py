"""The result of one step, after the one copy from the device: plain lists, no tensors."""

from __future__ import annotations

import msgspec
import numpy as np
from msgspec import field

from penstock.messages.experts import NO_EXPERTS, ExpertsOutput
from penstock.messages.kv_transfer import NO_OUTPUT, KVConnectorOutput


class TokenLogprobs(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Log probabilities at one position.

    `token_ids[0]` is the token at this position (sampled, or given by the prompt) and `rank` its rank, 1 for the most
    likely; the rest are the most likely tokens in descending order. `logprobs` is parallel to `token_ids`.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    rank: int


class ModelRunnerOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The result of one step on the rank that samples or pools.

    `sampled_token_ids` has an entry for every scheduled request; it is empty for a chunk of a prefill that did not
    reach the last known token, and holds the accepted drafts and the token after them if drafts were verified;
    `logprobs` is parallel to it. `prompt_logprobs` holds the positions that this step's chunk covered, in order;
    position 0 of a prompt has none. `num_draft_tokens` counts the verified drafts that were real: a speculator that
    finds nothing to propose leaves gaps. `num_proposed_tokens` is the number of real new drafts, if the CPU knows it
    anyway. `draft_token_ids` holds the new drafts of requests with a grammar, -1 for gaps. `failed_requests` maps a
    request to an error that concerns it alone, `unsatisfiable_requests` to constraints that cannot be satisfied after
    its tokens of this step, unless it ends with one of them.
    `is_replayed`: a CUDA graph computed the step. `pooled` holds the vectors of requests whose prompts a step of a
    pooling engine has completed, [hidden_size] float32 each; such a step samples nothing.
    `experts` is what the ranks report about experts that move.
    """

    sampled_token_ids: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    num_draft_tokens: dict[str, int] = field(default_factory=dict[str, int])
    num_proposed_tokens: dict[str, int] = field(default_factory=dict[str, int])
    draft_token_ids: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    logprobs: dict[str, tuple[TokenLogprobs, ...]] = field(default_factory=dict[str, tuple[TokenLogprobs, ...]])
    prompt_logprobs: dict[str, tuple[TokenLogprobs, ...]] = field(default_factory=dict[str, tuple[TokenLogprobs, ...]])
    pooled: dict[str, np.ndarray] = field(default_factory=dict[str, np.ndarray])
    failed_requests: dict[str, str] = field(default_factory=dict[str, str])
    unsatisfiable_requests: dict[str, str] = field(default_factory=dict[str, str])
    is_replayed: bool = False
    kv_connector_output: KVConnectorOutput = NO_OUTPUT
    experts: ExpertsOutput = NO_EXPERTS

    @staticmethod
    def with_kv_conn_output_only(output: KVConnectorOutput) -> ModelRunnerOutput:
        """Returns the output of a rank that samples nothing, or of a step without tokens."""
        return ModelRunnerOutput(kv_connector_output=output)

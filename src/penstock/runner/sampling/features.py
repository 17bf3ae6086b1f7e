"""Which features a request uses."""

from __future__ import annotations

from penstock.messages.requests import EngineRequest
from penstock.runner.sampling.penalties import has_penalty


def changes_logits(request: EngineRequest) -> bool:
    """Whether any of the features that change logits but a grammar may concern the request."""
    params = request.sampling_params
    return bool(
        params.logit_bias
        or params.allowed_token_ids
        or request.bad_words_token_ids
        or params.min_tokens
        or has_penalty(request)
    )

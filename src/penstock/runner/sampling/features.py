"""All sampling features, in the order in which they are applied.

A step's needs are the features that any of its rows uses, a bit for each.
"""

from __future__ import annotations

import torch

from penstock.messages.requests import RowRequest
from penstock.runner.sampling.feature import Column, Feature
from penstock.runner.sampling.logprobs import LOGPROBS, PROMPT_LOGPROBS, TOP_LOGPROBS
from penstock.runner.sampling.penalties import PENALTIES
from penstock.runner.sampling.token_rules import ALLOWED_TOKEN_IDS, BAD_WORDS, LOGIT_BIAS, MIN_TOKENS
from penstock.runner.sampling.truncation import MIN_P, TEMPERATURE, TOP_K, TOP_P

# These change the logits of greedy and random rows alike. Hard constraints come last, so that no later feature can
# allow a forbidden token again; after all of them comes the step's grammar (`apply_bitmask`).
LOGITS = (LOGIT_BIAS, PENALTIES, ALLOWED_TOKEN_IDS, BAD_WORDS, MIN_TOKENS)
# These form the distribution that a random row draws from.
TRUNCATIONS = (MIN_P, TOP_K, TOP_P)
DISTRIBUTION = (TEMPERATURE, *TRUNCATIONS)
# The draws' seed, which every row has (`noise`).
SEED = Feature(
    concerns=lambda request, _: False,
    columns=(Column("seed", torch.int64, lambda request, _: ((request.seed + 2**63) % 2**64 - 2**63,)),),
)
FEATURES = (*LOGITS, *DISTRIBUTION, SEED, LOGPROBS, TOP_LOGPROBS, PROMPT_LOGPROBS)


def bits(*features: Feature) -> int:
    return sum(1 << FEATURES.index(feature) for feature in features)


def needs_of(request: RowRequest, vocab_size: int) -> int:
    """Returns the features that a request uses, as bits."""
    return sum(1 << place for place, feature in enumerate(FEATURES) if feature.concerns(request, vocab_size))


CHANGED_LOGITS = bits(*LOGITS)
COUNTED_TOKENS = bits(PENALTIES)
DRAWN = bits(TEMPERATURE)
TRUNCATED = bits(*TRUNCATIONS)
WITH_LOGPROBS, WITH_TOP_LOGPROBS, WITH_PROMPT_LOGPROBS = bits(LOGPROBS), bits(TOP_LOGPROBS), bits(PROMPT_LOGPROBS)

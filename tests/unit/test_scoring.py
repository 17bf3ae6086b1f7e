"""The prompts of scores, without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.config.sentence_transformers import Prompts
from penstock.frontend.front_end import FrontEnd
from penstock.frontend.input_processor import InputProcessor
from penstock.frontend.scoring import plan_scores
from penstock.messages.pooling_params import PoolingParams
from penstock.utils.errors import RequestError

MAX_MODEL_LEN = 16


class WordTokenizer:
    """A token for each word; counts the pairs that it has encoded."""

    def __init__(self) -> None:
        self.num_pairs = 0

    def encode_pair(self, first: str, second: str, truncation: Any) -> tuple[list[int], int | None]:
        self.num_pairs += 1
        return [1] * len(f"{first} {second}".split()), None


def front_end(tokenizer: WordTokenizer) -> FrontEnd:
    """Returns that of a classifier with one label."""
    config: Any = SimpleNamespace(head=object(), prompts=Prompts({}), score_template=None)
    processor = InputProcessor(
        tokenizer=None,
        vocab_size=2,
        max_model_len=MAX_MODEL_LEN,
        eos_token_ids=frozenset(),
        seed=0,
        pooling=config,
    )
    pooling = SimpleNamespace(check=lambda *_: None, config=config)
    return cast(
        "FrontEnd", SimpleNamespace(pooling=pooling, input_processor=processor, get_tokenizer=lambda: tokenizer)
    )


def test_a_query_that_is_too_long_is_encoded_once() -> None:
    tokenizer = WordTokenizer()
    plan = plan_scores(front_end(tokenizer), "word " * 15, ["a"] * 100, PoolingParams())
    assert (len(plan.prompts), tokenizer.num_pairs) == (100, 100)
    tokenizer.num_pairs = 0
    with pytest.raises(RequestError, match=f"the prompt has 17 tokens; max_model_len={MAX_MODEL_LEN}") as caught:
        plan_scores(front_end(tokenizer), "word " * 16, ["a"] * 100, PoolingParams())
    assert (tokenizer.num_pairs, caught.value.code) == (1, "context_length_exceeded")

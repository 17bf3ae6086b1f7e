"""Every field's bound, and that the refusal names the field."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from penstock.messages.sampling_params import SamplingParams
from penstock.utils.errors import RequestError

BAD = [
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", "hot"),
    ("temperature", True),
    ("top_p", 0.0),
    ("top_p", 1.1),
    ("top_p", math.nan),
    ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", -0.1),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", -1.0),
    ("presence_penalty", 2.5),
    ("frequency_penalty", math.nan),
    ("n", 0),
    ("n", 65),
    ("max_tokens", 0),
    ("max_tokens", 2.0),
    ("min_tokens", -1),
    ("min_tokens", 17),
    ("logprobs", 21),
    ("logprobs", -1),
    ("prompt_logprobs", 21),
    ("seed", 2**63),
    ("seed", "x"),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", [3]),
    ("stop", ["a"] * 65),
    ("bad_words", "word"),
    ("bad_words", [""]),
    ("stop_token_ids", [-1]),
    ("allowed_token_ids", []),
    ("allowed_token_ids", ["a"]),
    ("stop", 5),
    ("bad_words", 5),
    ("stop_token_ids", 5),
    ("allowed_token_ids", "ab"),
    ("logit_bias", [1]),
    ("ignore_eos", "false"),
    ("detokenize", 1),
    ("logit_bias", {1: 101.0}),
    ("logit_bias", {1: math.nan}),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", dict.fromkeys(range(1025), 1.0)),
]


@pytest.mark.parametrize(("field", "value"), BAD)
def test_out_of_bounds_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=field) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field


def test_unknown_fields_are_refused_with_the_nearest_name() -> None:
    with pytest.raises(RequestError, match="did you mean 'max_tokens'") as caught:
        SamplingParams(max_token=3)  # pyright: ignore[reportCallIssue]
    assert caught.value.field == "max_token"


def test_numbers_of_numpy_are_numbers() -> None:
    assert SamplingParams(temperature=np.float32(0.5), max_tokens=np.int64(3)).max_tokens == 3


def test_several_greedy_completions_may_be_asked_for() -> None:
    assert SamplingParams(n=2, temperature=0.0).is_greedy


def test_stop_strings_need_text() -> None:
    with pytest.raises(RequestError, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)


def test_one_stop_string_is_a_list_of_one() -> None:
    assert SamplingParams(stop="end").stop_strings == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert SamplingParams().stop_strings == ()

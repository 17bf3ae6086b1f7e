"""The bounds of every field, and errors that name the field."""

from __future__ import annotations

import math
from typing import Any, get_type_hints

import numpy as np
import pytest

from penstock.messages.sampling_params import BOUNDS, SamplingParams
from penstock.utils.errors import RequestError

CIRCULAR: dict[str, Any] = {}
CIRCULAR["again"] = [CIRCULAR] * 60000

BAD = [
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", 10**400),
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
    ("kv_transfer_params", [1]),
    ("kv_transfer_params", {"a": {1: 2}}),
    ("kv_transfer_params", {"a": b"bytes"}),
    ("kv_transfer_params", {"a": [{"b": {1, 2}}]}),
    ("kv_transfer_params", {"a": [2**64]}),
    ("kv_transfer_params", {"a": -(2**63) - 1}),
    ("kv_transfer_params", {"a": [math.nan]}),
    ("kv_transfer_params", {"a": math.inf}),
    ("kv_transfer_params", {"a": "\ud800"}),
    ("kv_transfer_params", {"\ud800": 1}),
    ("kv_transfer_params", {"a": ["x" * 40000, {"y" * 40000: 1}]}),
    ("kv_transfer_params", {"a": [[0] * 40000, [0] * 40000]}),
    ("kv_transfer_params", {"a": [[[[[[[[1]]]]]]]]}),
    ("kv_transfer_params", CIRCULAR),
]


@pytest.mark.parametrize(("field", "value"), BAD)
def test_the_error_for_an_invalid_value_names_the_field(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=field) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field


def test_every_number_has_bounds_which_it_may_reach() -> None:
    numbers = {name for name, hint in get_type_hints(SamplingParams).items() if hint in (int, float, int | None)}
    assert numbers == BOUNDS.keys()
    for name, bound in BOUNDS.items():
        for value in (bound.high, bound.low + bound.excludes_low):
            assert getattr(SamplingParams(**{"max_tokens": None, name: value}), name) == value
        kind = "an integer" if bound.is_whole else "a number"
        for value in (bound.low - 1, bound.high + 1):
            with pytest.raises(RequestError) as caught:
                SamplingParams(**{name: value})
            assert str(caught.value) == f"{name} must be {kind} between {bound.low} and {bound.high}, got {value}"


def test_transfer_parameters_of_routers_are_accepted() -> None:
    from_prefill = {
        "do_remote_prefill": True,
        "remote_block_ids": [list(range(8192)), []],
        "remote_engine_id": None,
        "remote_port": 5600,
        "seconds": 1.5,
        "of_another_engine": {"nested": [[[{"deep": "x" * 8000}]]]},
    }
    assert SamplingParams(kv_transfer_params=from_prefill).kv_transfer_params == from_prefill
    assert SamplingParams(kv_transfer_params={"a": [[[[[[[1]]]]]]]}).kv_transfer_params


def test_a_refusal_does_not_repeat_thousands_of_values() -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(kv_transfer_params={"remote_block_ids": [0] * 70000})
    assert str(caught.value) == "kv_transfer_params must have at most 65536 entries, nested ones included"


def test_unknown_fields_are_refused_with_the_nearest_name() -> None:
    with pytest.raises(RequestError, match="did you mean 'max_tokens'") as caught:
        SamplingParams(max_token=3)  # pyright: ignore[reportCallIssue]
    assert caught.value.field == "max_token"


def test_numpy_numbers_are_accepted() -> None:
    assert SamplingParams(temperature=np.float32(0.5), max_tokens=np.int64(3)).max_tokens == 3


def test_several_greedy_completions_may_be_requested() -> None:
    assert SamplingParams(n=2, temperature=0.0).is_greedy


def test_stop_strings_need_text() -> None:
    with pytest.raises(RequestError, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)


def test_one_stop_string_is_a_list_of_one() -> None:
    assert SamplingParams(stop="end").stop_strings == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert SamplingParams().stop_strings == ()

"""A request's parameters for sampling, stopping and reporting.

The names and meanings are those of vLLM. A value outside its bound is refused at construction with a `RequestError`
that names the field.
"""

# The values come from users and may have types other than those declared.
# pyright: reportUnnecessaryIsInstance=false

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from numbers import Integral, Real
from typing import Any, TypeVar

from penstock.messages.structured_outputs import StructuredOutputsParams
from penstock.utils.errors import RequestError
from penstock.utils.names import did_you_mean, is_unicode

_T = TypeVar("_T")

MAX_N = 64
MAX_LOGPROBS = 20
MAX_TRANSFER_DEPTH = 8
MAX_TRANSFER_ENTRIES = 65536
MAX_TRANSFER_TEXT = 65536
MAX_STOP_STRINGS = 64
MAX_LOGIT_BIAS = 1024
MAX_COUNT = 2**31 - 1
_MIN_WIRE_INT, _MAX_WIRE_INT = -(2**63), 2**64 - 1
_PLAIN_TYPES = frozenset((str, int, float, bool, type(None)))
_FLAGS = (
    "ignore_eos", "include_stop_str_in_output", "detokenize", "skip_special_tokens", "spaces_between_special_tokens",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Bound:
    """The numbers that a parameter may be: from `low`, or above it, to `high`."""

    low: int
    high: int
    is_whole: bool = True
    excludes_low: bool = False

    def check(self, field: str, value: Any) -> None:
        """Raises RequestError for anything else."""
        if self.is_whole:
            _check_int(field, value, self.low, self.high)
            return
        number: Any = value if isinstance(value, Real) and not isinstance(value, bool) else math.nan
        if not self.low <= number <= self.high:
            raise _refuse(field, f"a number between {self.low} and {self.high}", value)
        if self.excludes_low and value == self.low:
            raise _refuse(field, f"above {self.low}", value)


BOUNDS: Mapping[str, Bound] = {
    "temperature": Bound(0, 100, is_whole=False),
    "top_p": Bound(0, 1, is_whole=False, excludes_low=True),
    "min_p": Bound(0, 1, is_whole=False),
    "presence_penalty": Bound(-2, 2, is_whole=False),
    "frequency_penalty": Bound(-2, 2, is_whole=False),
    "repetition_penalty": Bound(0, 100, is_whole=False, excludes_low=True),
    "n": Bound(1, MAX_N),
    "top_k": Bound(-1, MAX_COUNT),
    "min_tokens": Bound(0, MAX_COUNT),
    "max_tokens": Bound(1, MAX_COUNT),
    "logprobs": Bound(0, MAX_LOGPROBS),
    "prompt_logprobs": Bound(0, MAX_LOGPROBS),
    "num_speculative_tokens": Bound(0, MAX_COUNT),
    "seed": Bound(-(2**63), 2**63 - 1),
}
"""The bounds of all parameters that are numbers; the requests of the server's APIs have the same."""

_MAY_BE_NONE = ("max_tokens", "logprobs", "prompt_logprobs", "num_speculative_tokens", "seed")


def _refuse_unknown_fields(cls: type[_T]) -> type[_T]:
    """Makes an unknown argument a RequestError that names the nearest field, instead of a TypeError."""
    known = [field.name for field in fields(cls)]  # pyright: ignore[reportArgumentType]
    initialise = cls.__init__

    @functools.wraps(initialise)
    def checked(self: _T, **values: Any) -> None:
        for name in values:
            if name not in known:
                raise RequestError(f"unknown sampling parameter {name!r}{did_you_mean(name, known)}", name)
        initialise(self, **values)

    cls.__init__ = checked
    return cls


@_refuse_unknown_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request; immutable.

    temperature 0 is greedy. top_k 0 or -1, top_p 1, min_p 0, and penalties of 1 / 0 / 0 are off. Penalties count prompt
    and output tokens (repetition) or output tokens alone (presence, frequency). `logprobs` and `prompt_logprobs`
    request that many most likely tokens in addition to the chosen one. With a `seed` the tokens depend only on the
    prompt and the parameters, whatever else the engine is running. `num_speculative_tokens` bounds the drafts per step
    in an engine that speculates; 0 is none. It changes the speed but, unless the engine samples its drafts
    (docs/SPECULATION.md), no token. `structured_outputs` constrains the output to a grammar. `kv_transfer_params` is a
    JSON object for the engine's KV connector: each connector reads its own keys, and an engine without a connector
    ignores them all.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    num_speculative_tokens: int | None = None
    structured_outputs: StructuredOutputsParams | None = None
    kv_transfer_params: Mapping[str, Any] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True

    def __post_init__(self) -> None:
        for field, bound in BOUNDS.items():
            value = getattr(self, field)
            if value is not None or field not in _MAY_BE_NONE:
                bound.check(field, value)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _refuse("min_tokens", f"at most max_tokens ({self.max_tokens})", self.min_tokens)
        _check_collections(self)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, regardless of its given form."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def is_disaggregated(self) -> bool:
        """Whether another engine decodes this prompt (do_remote_decode) or has computed it (do_remote_prefill)."""
        asked = self.kv_transfer_params or {}
        return bool(asked.get("do_remote_decode") or asked.get("do_remote_prefill"))

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


def _refuse(field: str, bound: str, value: object) -> RequestError:
    return RequestError(f"{field} must be {bound}, got {value!r}", field)


def _check_int(field: str, value: Any, low: int, high: int | None = None) -> None:
    is_int = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_int or int(value) < low or (high is not None and int(value) > high):
        bound = f"an integer of at least {low}" if high is None else f"an integer between {low} and {high}"
        raise _refuse(field, bound, value)


def _check_collections(params: SamplingParams) -> None:
    if not isinstance(params.structured_outputs, StructuredOutputsParams | None):
        raise _refuse("structured_outputs", "StructuredOutputsParams", params.structured_outputs)
    if params.kv_transfer_params is not None:
        _check_transfer(params.kv_transfer_params)
    for field in _FLAGS:
        if not isinstance(getattr(params, field), bool):
            raise _refuse(field, "True or False", getattr(params, field))
    if params.stop is not None and not isinstance(params.stop, str):
        _check_list("stop", params.stop)
    if len(params.stop_strings) > MAX_STOP_STRINGS:
        raise _refuse("stop", f"at most {MAX_STOP_STRINGS} strings", f"{len(params.stop_strings)} strings")
    _check_texts("stop", params.stop_strings)
    _check_texts("bad_words", params.bad_words or ())
    if params.stop_strings and not params.detokenize:
        raise RequestError("stop strings need detokenize=True; use stop_token_ids instead", "stop")
    for field, ids in (("stop_token_ids", params.stop_token_ids), ("allowed_token_ids", params.allowed_token_ids)):
        given = _check_list(field, () if ids is None else ids)
        # There may be hundreds of thousands: nothing is called for each.
        _check_int(field, next((each for each in given if type(each) is not int or each < 0), 0), 0)
    if params.allowed_token_ids is not None and not params.allowed_token_ids:
        raise _refuse("allowed_token_ids", "absent or a list that is not empty", params.allowed_token_ids)
    _check_bias({} if params.logit_bias is None else params.logit_bias)


def _check_transfer(given: Any) -> None:
    """Checks the object level by level; error messages never include the values, which may be large."""
    if not isinstance(given, Mapping):
        raise _refuse_transfer(f"must be an object, got {type(given).__name__}")
    num_entries = num_characters = 0
    level: list[Any] = [given]
    for _ in range(MAX_TRANSFER_DEPTH):
        num_entries += sum(map(len, level))
        # Checked first: an object that contains itself would grow with every level.
        if num_entries > MAX_TRANSFER_ENTRIES:
            raise _refuse_transfer(f"must have at most {MAX_TRANSFER_ENTRIES} entries, nested ones included")
        objects: list[Mapping[Any, Any]] = [each for each in level if isinstance(each, Mapping)]
        lists: list[Any] = [each for each in level if not isinstance(each, Mapping)]
        values: list[Any] = [*chain(*lists), *chain(*(each.values() for each in objects))]
        texts: list[Any] = [*chain(*objects), *(value for value in values if type(value) is str)]
        if not all(isinstance(text, str) for text in texts):
            raise _refuse_transfer("must have text for keys")
        num_characters += sum(map(len, texts))
        if num_characters > MAX_TRANSFER_TEXT:
            raise _refuse_transfer(f"must have at most {MAX_TRANSFER_TEXT} characters of text")
        level = [value for value in values if type(value) not in _PLAIN_TYPES]
        if not all(map(is_unicode, texts)) or not _are_numbers(values) or not all(map(_is_container, level)):
            raise _refuse_transfer("must hold text, numbers of at most 64 bits, booleans, null, lists and objects")
        if not level:
            return
    raise _refuse_transfer(f"must be nested at most {MAX_TRANSFER_DEPTH} levels deep")


def _refuse_transfer(bound: str) -> RequestError:
    return RequestError(f"kv_transfer_params {bound}", "kv_transfer_params")


def _are_numbers(values: list[Any]) -> bool:
    """Whether JSON and a message can represent the numbers among the values."""
    integers = [value for value in values if type(value) is int]
    is_in_range = not integers or (min(integers) >= _MIN_WIRE_INT and max(integers) <= _MAX_WIRE_INT)
    return is_in_range and all(math.isfinite(value) for value in values if type(value) is float)


def _is_container(value: object) -> bool:
    return isinstance(value, Mapping | list | tuple)


def _check_list(field: str, value: Any) -> Sequence[Any]:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise _refuse(field, "a list", value)
    return value  # pyright: ignore[reportUnknownVariableType]


def _check_texts(field: str, texts: Any) -> None:
    for text in _check_list(field, texts):
        if not isinstance(text, str) or not text:
            raise _refuse(field, "a list of strings that are not empty", texts)
        if not is_unicode(text):
            raise _refuse(field, "valid Unicode", text)


def _check_bias(bias: Mapping[Any, Any]) -> None:
    if not isinstance(bias, Mapping):
        raise _refuse("logit_bias", "a mapping of token ids to numbers", bias)
    if len(bias) > MAX_LOGIT_BIAS:
        raise _refuse("logit_bias", f"at most {MAX_LOGIT_BIAS} entries", f"{len(bias)} entries")
    for token_id, value in bias.items():
        _check_int("logit_bias", token_id, 0)
        if not isinstance(value, Real) or not -100.0 <= float(value) <= 100.0:
            raise _refuse("logit_bias", "values between -100 and 100", value)

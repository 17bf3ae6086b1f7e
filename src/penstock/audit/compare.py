"""Where two answers to one prompt differ, and whether rounding explains it.

The rule: with greedy decoding, the token that a run emits has the highest log probability of that run. Two correct runs
may order two tokens differently only if the tokens are as close as their rounding errors. Every run that reports log
probabilities at the first difference is a witness of how far apart the two tokens are; if one of them sees them further
apart than the margin, one of the two tokens was improbable given the prompt: it comes from another state.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from penstock.audit.answers import Answer, Token

Top = Mapping[str, float]
_MAX_IMPROBABLE = 0.01


class Verdict(enum.StrEnum):
    EQUAL = "equal"
    ROUNDING = "rounding"
    CORRUPTION = "corruption"
    UNCLEAR = "unclear"


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference: at `position`, in tokens, or None if tokens are not known; `common` is the output before.

    `expected` and `observed` are the tokens there, None where an answer had ended or where tokens are not known. They
    are the same token if only its log probability differs.
    """

    position: int | None
    common: str
    expected: Token | None
    observed: Token | None


@dataclass(frozen=True, slots=True)
class Judgement:
    """`size` is how far apart the two tokens are, in nats: at least so far where that is all that is known."""

    verdict: Verdict
    size: float | None = None


def first_difference(reference: Answer, observed: Answer, margin: float) -> Difference | None:
    """Returns None if the texts are equal and no token's log probability differs by more than `margin`."""
    pairs = list(zip(reference.tokens, observed.tokens, strict=False))
    for position, (one, other) in enumerate(pairs):
        if not one.is_same(other) or _moved(one, other) > margin:
            return Difference(position, _joined(reference.tokens[:position]), one, other)
    if reference.text == observed.text:
        return None
    if not (reference.tokens and observed.tokens):
        return _difference_of_texts(reference, observed.text)
    end = len(pairs)
    return Difference(
        end,
        _joined(reference.tokens[:end]),
        reference.tokens[end] if end < len(reference.tokens) else None,
        observed.tokens[end] if end < len(observed.tokens) else None,
    )


def drift(reference: Answer, observed: Answer) -> float:
    """Returns the largest change of a token's log probability before the first different token, 0 if none is known."""
    largest = 0.0
    for one, other in zip(reference.tokens, observed.tokens, strict=False):
        if not one.is_same(other):
            break
        largest = max(largest, _moved(one, other))
    return largest


def judge(difference: Difference, witnesses: Iterable[Top], margin: float, *, is_greedy: bool = True) -> Judgement:
    """Decides what explains a difference, from the log probabilities of every witness at its position.

    If the server does not emit the most probable tokens (`is_greedy` False), the choice of a token proves nothing: then
    only witnesses that contradict each other are corruption, and all else is unclear.
    """
    expected, observed = difference.expected, difference.observed
    if expected is not None and observed is not None and expected.is_same(observed):
        return Judgement(Verdict.CORRUPTION, _moved(expected, observed))
    names = [None if token is None else token.text for token in (expected, observed)]
    if names[0] == names[1]:
        # Two tokens of the same text, such as pieces of a character, or nothing is known of both.
        return Judgement(Verdict.UNCLEAR)
    ranges = [_apart(top, names[0], names[1]) for top in witnesses if top]
    if not is_greedy:
        apart = max((low for low, _ in ranges), default=0.0) - min((high for _, high in ranges), default=0.0)
        return Judgement(Verdict.CORRUPTION, apart) if apart > margin else Judgement(Verdict.UNCLEAR)
    least = max((max(0.0, low, -high) for low, high in ranges), default=0.0)
    known = [max(-low, high) for low, high in ranges if math.isfinite(low) and math.isfinite(high)]
    if least > margin:
        return Judgement(Verdict.CORRUPTION, max([least, *known]))
    if known:
        return Judgement(Verdict.ROUNDING, max(known))
    return Judgement(Verdict.UNCLEAR, least or None)


def emits_most_probable(answers: Iterable[Answer], margin: float) -> bool:
    """Returns whether answers have the most probable tokens, but for a few; otherwise the server penalizes or samples.

    A token within `margin` of the most probable one counts as that.
    """
    found = [gap(token.top, token.text) > margin for answer in answers for token in answer.tokens if token.top]
    return sum(found) <= _MAX_IMPROBABLE * len(found)


def gap(top: Top, name: str | None) -> float:
    """Returns how far a token lies below the most probable one, in nats; at least so far if it is not listed."""
    if not top:
        return 0.0
    return max(top.values()) - (top[name] if name is not None and name in top else min(top.values()))


def foreign_words(text: str, own: str, others: Mapping[str, frozenset[str]]) -> dict[str, list[str]]:
    """Returns, by prompt, the made-up words of other prompts in an output whose own prompt does not contain them."""
    found = {name: sorted(word for word in words if word in text and word not in own) for name, words in others.items()}
    return {name: words for name, words in found.items() if words}


def _moved(one: Token, other: Token) -> float:
    if one.logprob is None or other.logprob is None:
        return 0.0
    return abs(one.logprob - other.logprob)


def _apart(top: Top, one: str | None, other: str | None) -> tuple[float, float]:
    """Returns the least and the greatest difference between the log probabilities of two tokens, of which one may be
    the end of the output (None), whose name is unknown.
    """
    (low, high), (other_low, other_high) = _bounds(top, one, other), _bounds(top, other, one)
    return low - other_high, high - other_low


def _bounds(top: Top, name: str | None, rival: str | None) -> tuple[float, float]:
    if name is not None:
        value = top.get(name)
        return (-math.inf, min(top.values())) if value is None else (value, value)
    rest = [value for each, value in top.items() if each != rival]
    missing = 1.0 - sum(map(math.exp, top.values()))
    return -math.inf, max([*rest, math.log(max(missing, 1e-30))])


def _difference_of_texts(reference: Answer, text: str) -> Difference:
    """Finds the token of the reference in which the texts differ, if its tokens are known."""
    length = next((i for i, (a, b) in enumerate(zip(reference.text, text, strict=False)) if a != b), None)
    length = min(len(reference.text), len(text)) if length is None else length
    offset = 0
    if _joined(reference.tokens).startswith(reference.text):
        for position, token in enumerate(reference.tokens):
            if offset + len(token.text) > length:
                return Difference(position, reference.text[:offset], token, None)
            offset += len(token.text)
    return Difference(None, reference.text[:length], None, None)


def _joined(tokens: Sequence[Token]) -> str:
    return "".join(token.text for token in tokens)

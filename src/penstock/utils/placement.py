"""Places requests on engines by an estimate of their work: for the router's instances and a front end's replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

_TOKENS_PER_ANSWER = 256


def load(num_prompt_tokens: int, num_requests: int = 1) -> int:
    """Estimates the load of unfinished requests in prompt tokens: the prompts to compute, plus the steps of answers of
    unknown lengths.
    """
    return num_prompt_tokens + _TOKENS_PER_ANSWER * num_requests


class Loaded(Protocol):
    """An engine with its `load`. `last_chosen` grows with every choice of any engine."""

    @property
    def load(self) -> int: ...

    @property
    def last_chosen(self) -> int: ...


_Engine = TypeVar("_Engine", bound=Loaded)


def least_loaded(engines: Iterable[_Engine], num_cached: Callable[[_Engine], int]) -> _Engine:
    """Returns the engine with the least load minus cached tokens of the prompt; among equals the one chosen least
    recently, so that idle engines alternate.
    """
    return min(engines, key=lambda engine: (engine.load - num_cached(engine), engine.last_chosen))

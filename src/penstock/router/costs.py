"""Whether another instance should compute a prompt, or share its KV, by the expected time of the first token. Pure.

The times are sums of measured rates (`router.rates`): the prompt tokens that an instance has yet to compute for earlier
requests and for this one, and the tokens whose KV is loaded from another instance.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from penstock.router.pool import Member, Pool

_MARGIN = 1.25
"""A way that is not the usual one must be expected to be so many times as fast, so that noise decides nothing."""
_LEAST_SHARED = 64
"""Tokens. Less than these are not worth a request to another instance."""


class Prompt(Protocol):
    def num_missing(self, url: str) -> int:
        """Returns how many of its tokens the instance does not have."""
        ...


class CostModel:
    """`estimates`: the last ones by decision, in seconds until the first token."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.estimates: dict[str, float] = {}

    def is_sooner_alone(self, prompt: Prompt, target: Member, prefill: Member, now: float) -> bool:
        """Returns whether a decode instance gives the first token sooner if it computes the prompt itself.

        False before a prompt of the prefill instance and a load of the decode instance have been measured.
        """
        there, here = self._pool.rate_of_prompts(prefill, now), self._pool.rate_of_prompts(target, now)
        if there is None or here is None or not target.loads.is_known(now):
            return False
        missing = prompt.num_missing(target.url)
        alone = here.seconds(target.num_prompt_tokens + missing)
        divided = there.seconds(prefill.num_prompt_tokens + prompt.num_missing(prefill.url))
        divided += target.loads.seconds(missing)
        self.estimates.update(decode=alone, prefill=divided)
        return alone * _MARGIN < divided

    def sibling(self, prompt: Prompt, target: Member, others: Iterable[Member], now: float) -> Member | None:
        """Returns the instance from which the target should load the beginning of the prompt; None if it should compute
        that itself. The first loads are tried without having been measured. Of several, the one with which the first
        token is expected soonest.
        """
        rate = self._pool.rate_of_prompts(target, now) if target.shares_kv else None
        if rate is None:
            return None
        queued, missing = target.num_prompt_tokens, prompt.num_missing(target.url)
        alone = rate.seconds(queued + missing)
        ways: list[tuple[float, int, float, Member]] = []
        for source in others:
            num_shared = missing - prompt.num_missing(source.url)
            if source.shares_kv and source.models == target.models and num_shared >= _LEAST_SHARED:
                rest = rate.seconds(queued + missing - num_shared)
                load = self._seconds_until_shared(source, num_shared, now)
                load += target.loads.seconds(num_shared) if target.loads.is_known(now) else 0.0
                ways.append((rest + load, source.load, load, source))
        if not ways:
            return None
        together, _, load, source = min(ways, key=lambda way: way[:2])
        self.estimates.update(whole=alone, sibling=together)
        return source if load * _MARGIN < alone - (together - load) else None

    def _seconds_until_shared(self, source: Member, num_tokens: int, now: float) -> float:
        """Returns when the source offers tokens that it has: as was measured, but not before its earlier prompts."""
        measured = source.shares.seconds(num_tokens) if source.shares.is_known(now) else 0.0
        rate = self._pool.rate_of_prompts(source, now) if source.num_prompt_tokens else None
        return measured if rate is None else max(measured, rate.seconds(source.num_prompt_tokens))

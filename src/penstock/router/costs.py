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
        that itself. The first loads are tried without having been measured.
        """
        if not target.shares_kv:
            return None
        able = [each for each in others if each.shares_kv and each.models == target.models]
        source = min(able, key=lambda each: (prompt.num_missing(each.url), each.load), default=None)
        rate = self._pool.rate_of_prompts(target, now)
        if source is None or rate is None:
            return None
        num_shared = prompt.num_missing(target.url) - prompt.num_missing(source.url)
        if num_shared < _LEAST_SHARED:
            return None
        missing = target.num_prompt_tokens + prompt.num_missing(target.url)
        alone, rest = rate.seconds(missing), rate.seconds(missing - num_shared)
        load = target.loads.seconds(num_shared) if target.loads.is_known(now) else 0.0
        self.estimates.update(whole=alone, sibling=rest + load)
        return source if load * _MARGIN < alone - rest else None

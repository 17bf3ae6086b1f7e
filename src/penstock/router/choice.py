"""Chooses among several instances for a request."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence

from penstock.router.pool import Member
from penstock.utils.load import load

Choice = Callable[[Sequence[Member], Mapping[str, int]], Member]
"""Takes members that could all handle the request, and by URL how many tokens of its prompt they have cached."""


class Policy(enum.StrEnum):
    PREFIX_AWARE = "prefix-aware"
    """Chooses the least work, not counting cached tokens. Equals least-loaded if there are no KV events."""
    LEAST_LOADED = "least-loaded"
    ROUND_ROBIN = "round-robin"


def make_choice(policy: Policy) -> Choice:
    return _in_turn if policy is Policy.ROUND_ROBIN else _least_work


def load_of(member: Member) -> int:
    """Returns the load in prompt tokens."""
    return load(member.num_prompt_tokens, member.num_outstanding)


def _least_work(members: Sequence[Member], cached: Mapping[str, int]) -> Member:
    """Returns, among equals, the member chosen least recently, so that idle instances alternate."""
    return min(members, key=lambda member: (load_of(member) - cached.get(member.url, 0), member.last_chosen))


def _in_turn(members: Sequence[Member], cached: Mapping[str, int]) -> Member:
    return min(members, key=lambda member: member.last_chosen)

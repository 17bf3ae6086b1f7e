"""Chooses the replica that a request runs on."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.frontend.input_processor import ProcessedRequest
from penstock.frontend.replica import Replica
from penstock.utils.errors import RequestError
from penstock.utils.held_blocks import PromptKeys


@dataclass(frozen=True, slots=True)
class Place:
    """`num_cached`: tokens of the request's prompt that the replica is expected to have cached."""

    replica: Replica
    num_cached: int


class Placement:
    """Chooses the serving replica with the least work; among equals, the one chosen least recently.

    With `is_prefix_aware` the prompt's tokens that a replica has cached are subtracted from its work.
    """

    def __init__(self, replicas: Sequence[Replica], is_prefix_aware: bool) -> None:
        self._replicas = replicas
        self._is_prefix_aware = is_prefix_aware
        self._turns = itertools.count(1)
        self._last_turn = [0] * len(replicas)

    def choose(self, request: ProcessedRequest, rank: int | None) -> Place:
        """Returns the replica `rank` if given, or the best one. If none serves, returns one that raises the reason.

        Raises RequestError if there is no such rank.
        """
        count = len(self._replicas)
        if rank is not None and not 0 <= rank < count:
            raise RequestError(
                f"data_parallel_rank must be from 0 to {count - 1}, the server's data_parallel_size is {count}: got "
                f"{rank}",
                "data_parallel_rank",
            )
        cached = self._num_cached(request)
        if rank is None:
            serving = [each for each in range(count) if self._replicas[each].outage is None]
            rank = min(
                serving or range(count),
                key=lambda each: (self._replicas[each].load - cached[each], self._last_turn[each]),
            )
        self._last_turn[rank] = next(self._turns)
        return Place(self._replicas[rank], cached[rank])

    def _num_cached(self, request: ProcessedRequest) -> Sequence[int]:
        """Returns the cached tokens by rank; 0 unless the policy uses them."""
        if not self._is_prefix_aware:
            return [0] * len(self._replicas)
        prompt = PromptKeys(request.prompt_token_ids, (request.children[0].cache_salt or "",))
        return [replica.num_cached(prompt) for replica in self._replicas]

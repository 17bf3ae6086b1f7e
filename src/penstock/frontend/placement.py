"""Chooses the replica that a request runs on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.frontend.input_processor import ProcessedRequest
from penstock.frontend.replica import Replica
from penstock.utils.errors import RequestError
from penstock.utils.held_blocks import PromptKeys, adapter_salt
from penstock.utils.placement import least_loaded


@dataclass(frozen=True, slots=True)
class Place:
    """`num_cached`: tokens of the request's prompt that the replica is expected to have cached."""

    replica: Replica
    num_cached: int


class Placement:
    """Chooses the serving replica with the least work, from which `is_prefix_aware` subtracts the cached tokens."""

    def __init__(self, replicas: Sequence[Replica], is_prefix_aware: bool) -> None:
        self._replicas = replicas
        self._is_prefix_aware = is_prefix_aware
        self._num_chosen = 0

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
            serving = [each for each in self._replicas if each.outage is None]
            chosen = least_loaded(serving or self._replicas, cached.__getitem__)
        else:
            chosen = self._replicas[rank]
        self._num_chosen += 1
        chosen.last_chosen = self._num_chosen
        return Place(chosen, cached[chosen])

    def _num_cached(self, request: ProcessedRequest) -> Mapping[Replica, int]:
        """Returns the cached tokens of each replica; 0 unless the policy uses them."""
        if not self._is_prefix_aware:
            return dict.fromkeys(self._replicas, 0)
        child = request.children[0]
        salt = adapter_salt(None if child.adapter is None else child.adapter.name, child.cache_salt)
        prompt = PromptKeys(request.prompt_token_ids, (salt or "",))
        return {replica: replica.num_cached(prompt) for replica in self._replicas}

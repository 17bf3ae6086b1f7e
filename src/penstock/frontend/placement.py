"""Which replica a request runs on."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from penstock.frontend.replica import Replica
from penstock.utils.errors import RequestError


class Placement:
    """Chooses the replica that has the least work of those that serve; of equal ones, the one chosen longest ago."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas
        self._turns = itertools.count(1)
        self._last_turn = [0] * len(replicas)

    def choose(self, rank: int | None) -> Replica:
        """The replica `rank` if it is given. Where none serves, a replica that says why.

        Raises RequestError when there is no such rank.
        """
        count = len(self._replicas)
        if rank is None:
            serving = [each for each in range(count) if self._replicas[each].outage is None]
            rank = min(serving or range(count), key=lambda each: (self._replicas[each].load, self._last_turn[each]))
        elif not 0 <= rank < count:
            raise RequestError(
                f"data_parallel_rank must be from 0 to {count - 1}, the server's data_parallel_size is {count}: got "
                f"{rank}",
                "data_parallel_rank",
            )
        self._last_turn[rank] = next(self._turns)
        return self._replicas[rank]

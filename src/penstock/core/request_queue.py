"""Requests in the order in which they are served: `fcfs` by arrival, `priority` by priority (low first), then arrival.

The waiting requests are admitted from the front of such a queue, and the running ones are preempted from the back of
another, so that the first request in line is the last to be preempted. A preempted request keeps its arrival time and
therefore returns to its former position.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from penstock.core.request import Request

_Rank = tuple[int, int]


def _by_arrival(request: Request) -> _Rank:
    return (0, request.arrival_index)


def _by_priority(request: Request) -> _Rank:
    return (request.data.priority, request.arrival_index)


RANKS: dict[str, Callable[[Request], _Rank]] = {"fcfs": _by_arrival, "priority": _by_priority}


class RequestQueue:
    """A sorted list of requests; adding and removing take O(log n) comparisons."""

    def __init__(self, policy: str) -> None:
        self._rank = RANKS[policy]
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def snapshot(self) -> list[Request]:
        """Returns a copy to iterate over while the queue changes."""
        return self._requests.copy()

    def __getitem__(self, index: int) -> Request:
        return self._requests[index]

    def last(self) -> Request:
        return self._requests[-1]

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=self._rank)

    def remove(self, request: Request) -> None:
        index = bisect_left(self._requests, self._rank(request), key=self._rank)
        assert self._requests[index] is request, request.request_id
        del self._requests[index]

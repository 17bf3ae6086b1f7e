"""The requests that wait for an instance, in a fair order: the clients take turns, and a client's requests keep theirs.

A client is known by its API key; those without one count as one client.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar


class Waiting(Protocol):
    @property
    def client(self) -> str: ...


_Request = TypeVar("_Request", bound=Waiting)


class FairQueue(Generic[_Request]):
    def __init__(self) -> None:
        # By client, the one whose turn it is first. No lane is empty.
        self._lanes: OrderedDict[str, OrderedDict[_Request, None]] = OrderedDict()
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[_Request]:
        """All requests, client by client."""
        for lane in self._lanes.values():
            yield from lane

    def heads(self) -> list[_Request]:
        """Returns each client's first request, in the order of their turns."""
        return [next(iter(lane)) for lane in self._lanes.values()]

    def add(self, request: _Request, *, is_first: bool = False) -> None:
        """Adds a request after its client's others, or before them and before the other clients' turns."""
        lane = self._lanes.setdefault(request.client, OrderedDict())
        lane[request] = None
        if is_first:
            lane.move_to_end(request, last=False)
            self._lanes.move_to_end(request.client, last=False)
        self._length += 1

    def take(self, request: _Request) -> None:
        """Removes a request that need not wait any more; its client's next turn comes after all others'."""
        self.remove(request)
        if request.client in self._lanes:
            self._lanes.move_to_end(request.client)

    def remove(self, request: _Request) -> bool:
        """Removes a request. Returns False if it does not wait."""
        lane = self._lanes.get(request.client)
        if lane is None or request not in lane:
            return False
        del lane[request]
        self._length -= 1
        if not lane:
            del self._lanes[request.client]
        return True

    def pop_for(self, client: str) -> _Request | None:
        """Removes the last request of the client that has the most, to make room for one of another client; None if
        this client would have the most.
        """
        longest = max(self._lanes.values(), key=len)
        if len(longest) <= len(self._lanes.get(client, ())) + 1:
            return None
        request = next(reversed(longest))
        self.remove(request)
        return request

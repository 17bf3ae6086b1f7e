"""The requests that wait for an instance, in a fair order: the clients take turns, and a client's requests keep theirs.

A client is known by its API key; those without one count as one client. Of a client's requests, those that may not go
to the same instances are in different lanes, so that one without an instance does not hold up the others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, Protocol, TypeVar


class Waiting(Protocol):
    @property
    def lane(self) -> Hashable: ...


_Request = TypeVar("_Request", bound=Waiting)


class FairQueue(Generic[_Request]):
    def __init__(self) -> None:
        # The one whose turn it is first. No lane is empty.
        self._lanes: OrderedDict[Hashable, OrderedDict[_Request, None]] = OrderedDict()
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[_Request]:
        """All requests, lane by lane."""
        for lane in self._lanes.values():
            yield from lane

    def heads(self) -> list[_Request]:
        """Returns each lane's first request, in the order of their turns."""
        return [next(iter(lane)) for lane in self._lanes.values()]

    def add(self, request: _Request, *, is_first: bool = False) -> None:
        """Adds a request after the others of its lane, or before them and before the other lanes' turns."""
        lane = self._lanes.setdefault(request.lane, OrderedDict())
        lane[request] = None
        if is_first:
            lane.move_to_end(request, last=False)
            self._lanes.move_to_end(request.lane, last=False)
        self._length += 1

    def take(self, request: _Request) -> None:
        """Removes a request that need not wait any more; its lane's next turn comes after all others'."""
        self.remove(request)
        if request.lane in self._lanes:
            self._lanes.move_to_end(request.lane)

    def remove(self, request: _Request) -> bool:
        """Removes a request. Returns False if it does not wait."""
        lane = self._lanes.get(request.lane)
        if lane is None or request not in lane:
            return False
        del lane[request]
        self._length -= 1
        if not lane:
            del self._lanes[request.lane]
        return True

    def pop_for(self, lane: Hashable) -> _Request | None:
        """Removes the last request of the longest lane, to make room for one of another lane; None if this lane would
        be the longest.
        """
        longest = max(self._lanes.values(), key=len)
        if len(longest) <= len(self._lanes.get(lane, ())) + 1:
            return None
        request = next(reversed(longest))
        self.remove(request)
        return request

"""Which adapters the workers have, each in a slot.

A running request keeps its adapter's slot. A slot that no running request uses keeps its adapter until another one
needs it: of these, the one unused for the longest time is taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from penstock.config.lora import LoraConfig
from penstock.core.request import Request, RequestStatus
from penstock.messages.adapters import NO_SLOT, AdapterLoad


class AdapterSlots:
    """Not thread-safe: it belongs to the scheduler."""

    def __init__(self, config: LoraConfig | None) -> None:
        """`config` is None if the engine has no adapters."""
        self._max_running = 0 if config is None else config.max_running
        self._num_slots = 0 if config is None else config.num_slots
        self._free = list(reversed(range(self._num_slots)))
        # Slots by the digest of their adapter, the one whose last request began the longest ago first.
        self._slots: dict[bytes, int] = {}
        self._full_in: object = None  # the plan
        self._num_requests: Counter[bytes] = Counter()
        self._num_running: Counter[bytes] = Counter()

    def add(self, request: Request) -> None:
        """Counts a request, which waits."""
        if request.data.adapter is not None:
            self._num_requests[request.data.adapter.digest] += 1

    def remove(self, request: Request) -> None:
        """Counts a request that has ended, and does not run any more."""
        if request.data.adapter is not None:
            _count_down(self._num_requests, request.data.adapter.digest)

    def has_room(self, request: Request, plan: object) -> bool:
        """Returns whether the request could begin in this plan as far as adapters are concerned. If one has to wait, so
        have all with adapters that are asked about after it: else it would wait as long as others keep coming.

        Every plan is an object of its own: one that is not carried out has the number of the next one, and says nothing
        about that.
        """
        adapter = request.data.adapter
        if adapter is None:
            return True
        if adapter.digest not in self._num_running and len(self._num_running) == self._max_running:
            self._full_in = plan
        return self._full_in is not plan

    def acquire(self, request: Request, loads: list[AdapterLoad]) -> int:
        """Returns the slot of a request that begins to run; what the workers must load for it is added to `loads`."""
        adapter = request.data.adapter
        if adapter is None:
            return NO_SLOT
        slot = self._slots.pop(adapter.digest, None)
        if slot is None:
            slot = self._free_slot()
            loads.append(AdapterLoad(slot, adapter))
        self._slots[adapter.digest] = slot
        self._num_running[adapter.digest] += 1
        return slot

    def release(self, request: Request) -> None:
        """Counts a request that stops running."""
        if request.data.adapter is not None:
            _count_down(self._num_running, request.data.adapter.digest)

    def forget(self, digest: bytes) -> bool:
        """Frees the slot of an adapter that was unloaded. Returns False while a request has it."""
        if digest in self._num_requests:
            return False
        if digest in self._slots:
            self._free.append(self._slots.pop(digest))
        return True

    def _free_slot(self) -> int:
        if self._free:
            return self._free.pop()
        return self._slots.pop(next(digest for digest in self._slots if digest not in self._num_running))

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Checks the counts, and that each running request has a slot that no other adapter has."""
        having = [(each, each.data.adapter.digest) for each in requests if each.data.adapter is not None]
        running = Counter(digest for request, digest in having if request.status is RequestStatus.RUNNING)
        assert running == self._num_running, (running, self._num_running)
        assert Counter(digest for _, digest in having) == self._num_requests, self._num_requests
        assert len(running) <= self._max_running, (len(running), self._max_running)
        assert running.keys() <= self._slots.keys(), "a running request's adapter has no slot"
        slots = [*self._slots.values(), *self._free]
        assert sorted(slots) == list(range(self._num_slots)), f"a slot is lost, or in two places: {slots}"


def _count_down(counts: Counter[bytes], digest: bytes) -> None:
    counts[digest] -= 1
    if not counts[digest]:
        del counts[digest]

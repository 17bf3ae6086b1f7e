"""Which adapters the workers have, each in a slot.

A running request keeps its adapter's slot. A slot that no running request uses keeps its adapter until another one
needs it: of these, the one unused for the longest time is taken.
"""

from __future__ import annotations

from collections import Counter

from penstock.config.lora import LoraConfig
from penstock.core.request import Request
from penstock.messages.adapters import NO_SLOT, AdapterLoad


class AdapterSlots:
    """Not thread-safe: it belongs to the scheduler."""

    def __init__(self, config: LoraConfig | None) -> None:
        self._max_running = 0 if config is None else config.max_running
        self._free = list(reversed(range(0 if config is None else config.num_slots)))
        # Slots by the digest of their adapter, the one whose last request began the longest ago first.
        self._slots: dict[bytes, int] = {}
        self._num_users: Counter[bytes] = Counter()

    def has_room(self, request: Request) -> bool:
        """Returns whether the request could run as far as adapters are concerned."""
        adapter = request.data.adapter
        return adapter is None or adapter.digest in self._num_users or len(self._num_users) < self._max_running

    def acquire(self, request: Request) -> tuple[int, AdapterLoad | None]:
        """Returns the slot of a request that begins to run, and what the workers must load for it."""
        adapter = request.data.adapter
        if adapter is None:
            return NO_SLOT, None
        load: AdapterLoad | None = None
        slot = self._slots.pop(adapter.digest, None)
        if slot is None:
            slot = self._free_slot()
            load = AdapterLoad(slot, adapter)
        self._slots[adapter.digest] = slot
        self._num_users[adapter.digest] += 1
        return slot, load

    def release(self, request: Request) -> None:
        """Ends the use by a request that ran."""
        adapter = request.data.adapter
        if adapter is None:
            return
        self._num_users[adapter.digest] -= 1
        if not self._num_users[adapter.digest]:
            del self._num_users[adapter.digest]

    def forget(self, digest: bytes) -> None:
        """Frees the slot of an adapter that no request has."""
        assert digest not in self._num_users, "a running request has the adapter"
        if digest in self._slots:
            self._free.append(self._slots.pop(digest))

    def _free_slot(self) -> int:
        if self._free:
            return self._free.pop()
        return self._slots.pop(next(digest for digest in self._slots if digest not in self._num_users))

    def check_integrity(self, running: list[Request]) -> None:
        """Checks that each running request has a slot of its adapter's own, and that no other one is counted."""
        used = Counter(request.data.adapter.digest for request in running if request.data.adapter is not None)
        assert used == self._num_users, (used, self._num_users)
        assert len(used) <= self._max_running, (len(used), self._max_running)
        assert used.keys() <= self._slots.keys(), "a running request's adapter has no slot"
        slots = [*self._slots.values(), *self._free]
        assert len(set(slots)) == len(slots), f"a slot is in two places: {slots}"

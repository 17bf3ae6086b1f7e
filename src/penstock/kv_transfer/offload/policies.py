"""Policies that choose which chunks leave the CPU tier when it is full.

A policy knows the stored keys, but not their chunks. Every key has the *moment* of its last use and its *place* in its
prompt. Of keys used at the same moment the one with the highest place is the oldest, so a tail is evicted before its
head: a head without its tail can still give a hit, but not the reverse. A pinned key stays a member, ages like the
others, and cannot be evicted. Every operation takes O(log n) per key; `evict` also takes it for every moment whose keys
are all protected.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import islice

from penstock.kv_transfer.offload import OffloadKey


@dataclass(slots=True)
class _Member:
    moment: int
    place: int
    is_pinned: bool


class _ByAge:
    """Members from the oldest to the youngest: a heap of moments, and for each a heap of its members, last place first.

    A changed member's old entry stays, and is skipped later.
    """

    def __init__(self) -> None:
        self._members: dict[OffloadKey, _Member] = {}
        self._moments: list[int] = []
        self._entries: dict[int, list[tuple[int, OffloadKey]]] = {}
        self._num_entries = 0
        self._num_pinned = 0

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, key: OffloadKey) -> bool:
        return key in self._members

    def pinned(self) -> dict[OffloadKey, bool]:
        return {key: member.is_pinned for key, member in self._members.items()}

    def add(self, key: OffloadKey, member: _Member) -> None:
        assert key not in self._members, key
        self._members[key] = member
        self._num_pinned += member.is_pinned
        self._push(key, member)

    def remove(self, key: OffloadKey) -> _Member:
        member = self._members.pop(key)
        self._num_pinned -= member.is_pinned
        return member

    def set_moment(self, key: OffloadKey, moment: int) -> None:
        member = self._members[key]
        member.moment = moment
        self._push(key, member)

    def keep_with(self, key: OffloadKey, moment: int) -> None:
        if self._members[key].moment < moment:
            self.set_moment(key, moment)

    def set_pinned(self, key: OffloadKey, is_pinned: bool) -> None:
        member = self._members[key]
        assert member.is_pinned != is_pinned, (key, member)
        member.is_pinned = is_pinned
        self._num_pinned += 1 if is_pinned else -1
        self._push(key, member)

    @property
    def num_unpinned(self) -> int:
        return len(self._members) - self._num_pinned

    def pop_oldest(self, protected: Collection[OffloadKey]) -> OffloadKey | None:
        skipped: list[int] = []
        victim = None
        while self._moments and victim is None:
            key = self._last_of(self._moments[0])
            if key is None:
                del self._entries[heapq.heappop(self._moments)]
            elif key in protected:
                skipped.append(heapq.heappop(self._moments))
            else:
                victim = key
                self.remove(victim)
        for moment in skipped:
            heapq.heappush(self._moments, moment)
        return victim

    def _last_of(self, moment: int) -> OffloadKey | None:
        """Returns the unpinned member of this moment with the highest place, or None."""
        entries = self._entries[moment]
        while entries:
            place, key = -entries[0][0], entries[0][1]
            if self._members.get(key) == _Member(moment, place, is_pinned=False):
                return key
            heapq.heappop(entries)
            self._num_entries -= 1
        return None

    def _push(self, key: OffloadKey, member: _Member) -> None:
        if member.is_pinned:
            return
        if member.moment not in self._entries:
            self._entries[member.moment] = []
            heapq.heappush(self._moments, member.moment)
        heapq.heappush(self._entries[member.moment], (-member.place, key))
        self._num_entries += 1
        if self._num_entries > 2 * len(self._members) + 16:
            self._drop_old_entries()

    def _drop_old_entries(self) -> None:
        self._moments, self._entries, self._num_entries = [], {}, 0
        for key, member in self._members.items():
            self._push(key, member)


class CachePolicy:
    """Belongs to one thread. Members are added by `insert`, and removed by `evict`, `remove` or `clear`."""

    _moment = 0
    _lists: tuple[_ByAge, ...]
    """Every member is in one of these."""

    def insert(self, key: OffloadKey, moment: int, place: int) -> None:
        """Adds a stored key; `moment` is the value that `refresh` returned when its room was made."""
        raise NotImplementedError

    def touch(self, keys: Iterable[OffloadKey]) -> None:
        """Marks these members as used again, all at one moment."""
        self.refresh(keys)

    def refresh(self, keys: Iterable[OffloadKey]) -> int:
        """Makes these members as young as keys inserted with the returned moment. It does not count as a use."""
        self._moment += 1
        for key in keys:
            self._home(key).set_moment(key, self._moment)
        return self._moment

    def keep_with(self, key: OffloadKey, moment: int) -> None:
        """Makes the member at least as young as keys inserted with that moment. It does not count as a use."""
        self._home(key).keep_with(key, moment)

    def pin(self, key: OffloadKey) -> None:
        self._home(key).set_pinned(key, True)

    def unpin(self, key: OffloadKey) -> None:
        self._home(key).set_pinned(key, False)

    def remove(self, key: OffloadKey) -> None:
        """Removes the key, whose content is gone, and its history."""
        self._home(key).remove(key)

    @property
    def num_unpinned(self) -> int:
        return sum(each.num_unpinned for each in self._lists)

    def evict(self, num_keys: int, protected: Collection[OffloadKey]) -> list[OffloadKey]:
        """Removes the oldest members that are neither pinned nor protected, at most `num_keys`, and returns them.

        A key in `protected` also protects the younger keys of the same moment: its head.
        """
        return list(islice(iter(lambda: self._evict_oldest(protected), None), num_keys))

    def _evict_oldest(self, protected: Collection[OffloadKey]) -> OffloadKey | None:
        raise NotImplementedError

    def clear(self) -> None:
        raise NotImplementedError

    def members(self) -> dict[OffloadKey, bool]:
        """Returns every member, and whether it is pinned: for `check_integrity`."""
        return {key: is_pinned for each in self._lists for key, is_pinned in each.pinned().items()}

    def _home(self, key: OffloadKey) -> _ByAge:
        """Returns the list that has the member."""
        return next((each for each in self._lists if key in each), self._lists[-1])


class LRUPolicy(CachePolicy):
    """Evicts the least recently used key first."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._lists = (_ByAge(),)

    def insert(self, key: OffloadKey, moment: int, place: int) -> None:
        self._lists[0].add(key, _Member(moment, place, is_pinned=False))

    def _evict_oldest(self, protected: Collection[OffloadKey]) -> OffloadKey | None:
        return self._lists[0].pop_oldest(protected)


class ARCPolicy(CachePolicy):
    """Adaptive replacement (Megiddo and Modha, "ARC: a self-tuning, low overhead replacement cache", FAST 2003).

    T1 holds keys used once, T2 keys used again; B1 and B2 remember keys that were evicted from them. A key that comes
    back moves `target`, the desired size of T1, towards the list that evicted it too early. With c chunks

        |T1| + |T2| <= c,  |T1| + |B1| <= c,  |T1| + |T2| + |B1| + |B2| <= 2c,  0 <= target <= c

    The paper's tie rule of REPLACE for a key in B2 is omitted, because room is made before the new key is known.
    """

    def __init__(self, num_chunks: int) -> None:
        assert num_chunks > 0, num_chunks
        self._capacity = num_chunks
        self.clear()

    def clear(self) -> None:
        self._target = 0.0
        self._lists = self._t1, self._t2 = _ByAge(), _ByAge()
        self._b1: OrderedDict[OffloadKey, None] = OrderedDict()
        self._b2: OrderedDict[OffloadKey, None] = OrderedDict()

    def insert(self, key: OffloadKey, moment: int, place: int) -> None:
        assert len(self._t1) + len(self._t2) < self._capacity, self._capacity
        home = self._t2 if key in self._b1 or key in self._b2 else self._t1
        if key in self._b1:
            self._target = min(float(self._capacity), self._target + max(1.0, len(self._b2) / len(self._b1)))
            del self._b1[key]
        elif key in self._b2:
            self._target = max(0.0, self._target - max(1.0, len(self._b1) / len(self._b2)))
            del self._b2[key]
        home.add(key, _Member(moment, place, is_pinned=False))
        self._forget_oldest_ghosts()

    def touch(self, keys: Iterable[OffloadKey]) -> None:
        self._moment += 1
        for key in keys:
            member = self._home(key).remove(key)
            member.moment = self._moment
            self._t2.add(key, member)

    def _evict_oldest(self, protected: Collection[OffloadKey]) -> OffloadKey | None:
        # REPLACE: from T1 while it is above its target, and from the other list if one is exhausted.
        lists = [(self._t1, self._b1), (self._t2, self._b2)]
        for home, ghosts in lists if len(self._t1) > self._target else reversed(lists):
            key = home.pop_oldest(protected)
            if key is not None:
                ghosts[key] = None
                return key
        return None

    def _forget_oldest_ghosts(self) -> None:
        while len(self._t1) + len(self._b1) > self._capacity:
            self._b1.popitem(last=False)
        while len(self._t1) + len(self._t2) + len(self._b1) + len(self._b2) > 2 * self._capacity:
            self._b2.popitem(last=False)

    def check_integrity(self) -> None:
        """Asserts the bounds of the paper, and that a key is in one list at most."""
        sizes = [len(self._t1), len(self._t2), len(self._b1), len(self._b2)]
        assert sizes[0] + sizes[1] <= self._capacity, sizes
        assert sizes[0] + sizes[2] <= self._capacity, sizes
        assert sum(sizes) <= 2 * self._capacity, sizes
        assert 0 <= self._target <= self._capacity, self._target
        keys = self.members().keys() | self._b1.keys() | self._b2.keys()
        assert len(keys) == sum(sizes), sizes

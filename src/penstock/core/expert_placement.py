"""Where the experts of a layer should be, given their load (DeepSeek-AI 2025, github.com/deepseek-ai/EPLB).

The experts with the highest load per copy get the redundant copies, and the copies are packed so that the ranks have
equal load. With several nodes whose experts the router chooses by groups, whole groups are packed to nodes first.

A placement is the expert of every buffer, rank after rank, or SPARE (`ExpertParallelConfig`). A target is only the set
of experts of every rank: an expert that stays on a rank keeps its buffer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.config.expert_parallel import SPARE

Target = tuple[frozenset[int], ...]
"""The experts of every rank."""

# A placement is not changed for less.
MIN_GAIN = 0.05


@dataclass(frozen=True, slots=True)
class Copy:
    """An expert of buffer `source` is copied to the spare buffer `target`."""

    expert: int
    source: int
    target: int


def experts_of(placement: Sequence[int], num_ranks: int) -> Target:
    """Returns which experts each rank has."""
    size = len(placement) // num_ranks
    ranks = (placement[first : first + size] for first in range(0, len(placement), size))
    return tuple(frozenset(expert for expert in rank if expert != SPARE) for rank in ranks)


def rank_loads(loads: Sequence[float], ranks: Target) -> list[float]:
    """Returns the load of every rank, if the copies of an expert share its load equally."""
    copies = Counter(expert for rank in ranks for expert in rank)
    return [sum(loads[expert] / copies[expert] for expert in rank) for rank in ranks]


def plan_target(loads: Sequence[float], current: Target, num_groups: int = 1, num_nodes: int = 1) -> Target | None:
    """Returns a better target for experts with these loads, or None if the largest load of a rank would fall by less
    than MIN_GAIN. With one node, or if the nodes cannot divide the groups, the groups have no effect.
    """
    if num_groups % num_nodes:
        num_nodes = 1
    groups = num_groups if num_nodes > 1 else 1
    size, ranks_of_node = len(loads) // groups, len(current) // num_nodes
    members = [range(group * size, (group + 1) * size) for group in range(groups)]
    of_node = pack([sum(loads[expert] for expert in each) for each in members], list(range(groups)), num_nodes)
    target: list[frozenset[int]] = []
    for node, chosen in enumerate(of_node):
        experts = [expert for group in sorted(chosen) for expert in members[group]]
        here = current[node * ranks_of_node : (node + 1) * ranks_of_node]
        target += _place_in_node(loads, experts, here)
    old, new = (max(rank_loads(loads, ranks)) for ranks in (current, tuple(target)))
    return tuple(target) if new <= (1 - MIN_GAIN) * old and old > 0 else None


def _place_in_node(loads: Sequence[float], experts: Sequence[int], current: Target) -> list[frozenset[int]]:
    """Returns the experts of every rank of a node, each rank as similar as possible to what it has."""
    counts = replicate([loads[expert] for expert in experts], sum(map(len, current)), len(current))
    items = [
        (loads[expert] / count, expert) for expert, count in zip(experts, counts, strict=True) for _ in range(count)
    ]
    packs = pack([load for load, _ in items], [expert for _, expert in items], len(current))
    pairs = sorted((-len(pack & rank), i, j) for i, pack in enumerate(packs) for j, rank in enumerate(current))
    pack_of: dict[int, int] = {}
    for _, i, j in pairs:
        if j not in pack_of and i not in pack_of.values():
            pack_of[j] = i
    return [packs[pack_of[rank]] for rank in range(len(current))]


def replicate(loads: Sequence[float], num_slots: int, num_ranks: int) -> list[int]:
    """Returns the number of copies of every expert: further slots go to the highest load per copy, one after another,
    and no expert gets more copies than there are ranks.
    """
    counts = [1] * len(loads)
    assert len(loads) <= num_slots <= len(loads) * num_ranks, f"{num_slots} slots of {num_ranks} ranks, {len(loads)}"
    for _ in range(num_slots - len(loads)):
        able = (expert for expert, count in enumerate(counts) if count < num_ranks)
        counts[max(able, key=lambda expert: loads[expert] / counts[expert])] += 1
    return counts


def pack(loads: Sequence[float], keys: Sequence[int], num_packs: int) -> list[frozenset[int]]:
    """Packs items equally: in order of descending load, each goes to the lightest pack that is not full. Returns the
    keys in every pack; equal keys are in different packs, and there are at most `num_packs` of them.
    """
    capacity, rest = divmod(len(loads), num_packs)
    assert rest == 0, f"{len(loads)} items in {num_packs} packs"
    packs: list[dict[int, float]] = [{} for _ in range(num_packs)]
    for item in sorted(range(len(loads)), key=lambda item: (-loads[item], keys[item])):
        key = keys[item]
        open_packs = [each for each in packs if len(each) < capacity]
        lightest = min((each for each in open_packs if key not in each), key=_total, default=None)
        if lightest is None:
            # All packs that lack the key are full. One of them gives an item to an open pack that lacks that item.
            lightest = min((each for each in packs if key not in each), key=_total)
            moved = min(lightest.keys() - open_packs[0].keys())
            open_packs[0][moved] = lightest.pop(moved)
        lightest[key] = loads[item]
    return [frozenset(each) for each in packs]


def _total(pack: dict[int, float]) -> float:
    return sum(pack.values())


def next_round(placement: Sequence[int], target: Target) -> tuple[tuple[int, ...], list[Copy]]:
    """Returns a placement nearer to the target and the copies that it needs, into buffers that are spare now.

    Every expert keeps a copy in the new placement, and no rank has two. Empty if the target is reached.
    """
    return _Round(placement, target).run()


class _Round:
    """Chooses swaps: a rank gains an expert in a spare buffer, and the buffer of one that it loses becomes spare."""

    def __init__(self, placement: Sequence[int], target: Target) -> None:
        self._before = placement
        self._after = list(placement)
        self._copies = Counter(expert for expert in placement if expert != SPARE)
        self._size = len(placement) // len(target)
        current = experts_of(placement, len(target))
        self._losses = [sorted(have - want) for have, want in zip(current, target, strict=True)]
        self._gains = [sorted(want - have) for have, want in zip(current, target, strict=True)]
        self._spares = [
            [buffer for buffer in self._buffers(rank) if placement[buffer] == SPARE] for rank in range(len(target))
        ]
        self._made: list[Copy] = []

    def run(self) -> tuple[tuple[int, ...], list[Copy]]:
        while self._swap_one() or self._swap_in_circle():
            pass
        return tuple(self._after), self._made

    def _buffers(self, rank: int) -> range:
        return range(rank * self._size, (rank + 1) * self._size)

    def _able(self) -> list[int]:
        """Returns the ranks that can take part in a further swap."""
        return [rank for rank, losses in enumerate(self._losses) if losses and self._spares[rank]]

    def _swap_one(self) -> bool:
        """Swaps an expert that has another copy."""
        for rank in self._able():
            for expert in self._losses[rank]:
                if self._copies[expert] > 1:
                    self._swap(rank, expert, self._gains[rank][0])
                    return True
        return False

    def _swap_in_circle(self) -> bool:
        """Swaps experts with a single copy: each rank of a circle gains what the rank before it loses."""
        able = self._able()
        for rank in able:
            path = [rank]
            while True:
                lost = self._losses[path[-1]][0]
                following = next((each for each in able if lost in self._gains[each]), None)
                if following is None:
                    break
                if following in path:
                    circle = path[path.index(following) :]
                    swaps = [(each, self._losses[each][0]) for each in circle]
                    for place, (each, expert) in enumerate(swaps):
                        self._swap(each, expert, swaps[place - 1][1])
                    return True
                path.append(following)
        return False

    def _swap(self, rank: int, lost: int, gained: int) -> None:
        freed = next(buffer for buffer in self._buffers(rank) if self._after[buffer] == lost)
        buffer = self._spares[rank].pop(0)
        self._after[freed], self._after[buffer] = SPARE, gained
        self._losses[rank].remove(lost)
        self._gains[rank].remove(gained)
        self._copies[lost] -= 1
        self._copies[gained] += 1
        self._made.append(Copy(gained, self._before.index(gained), buffer))

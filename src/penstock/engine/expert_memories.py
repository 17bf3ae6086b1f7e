"""The experts that move between ranks, from what the ranks report."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.core.expert_balancer import BalancedLayer
from penstock.worker.messages import WorkerFacts


def expert_memories(engines: Sequence[Sequence[WorkerFacts]]) -> dict[str, tuple[tuple[str, ...], ...]]:
    """Returns, by layer, the names of the memory of all ranks that have it, engine after engine in their order."""
    found: dict[str, dict[tuple[int, int], tuple[str, ...]]] = {}
    for dp_rank, facts in enumerate(engines):
        for each in facts:
            for layer, names in each.expert_memories.items():
                found.setdefault(layer, {})[dp_rank, each.shard[1]] = names
    return {layer: tuple(names for _, names in sorted(of_rank.items())) for layer, of_rank in found.items()}


def balanced_layers(facts: Sequence[WorkerFacts]) -> list[BalancedLayer]:
    """Returns the layers of all stages, which may have none."""
    firsts = (each for each in facts if each.shard[1] == 0)
    return [BalancedLayer(layer, each.shard[0]) for each in firsts for layer in each.expert_memories]

"""Building blocks of the catalogue's scenarios."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from penstock.simulation.setup import Setup

Draw = Callable[[random.Random], Setup]


@dataclass(frozen=True, slots=True)
class Scenario:
    """`origin` describes the failure in one line; `draw` makes a world's setup from a seeded random generator."""

    name: str
    origin: str
    draw: Draw


class Catalogue(dict[str, Scenario]):
    """Scenarios by name."""

    def add(self, name: str, origin: str) -> Callable[[Draw], Draw]:
        """Decorator that adds the function that draws a scenario's setup to the catalogue."""

        def add(draw: Draw) -> Draw:
            self[name] = Scenario(name, origin, draw)
            return draw

        return add


def base(rng: random.Random) -> Setup:
    """Draws what every scenario varies: depth, token budget, pool size, attention, split."""
    return Setup(
        topologies=(rng.choice([(1, 1), (1, 1), (2, 1), (1, 2), (2, 2)]),),
        windows=rng.choice([(0,), (0,), (0, 9), (6,)]),
        depth=rng.choice([1, 2, 2, 3]),
        runs_ahead=rng.random() < 0.5,
        max_num_batched_tokens=rng.choice([3, 8, 16, 40]),
        max_num_seqs=rng.choice([2, 6]),
        spare_blocks=rng.choice([0, 4, 30]),
        policy=rng.choice(["fcfs", "fcfs", "priority"]),
    )


def speculating(setup: Setup, rng: random.Random) -> Setup:
    drafts = rng.choice([1, 2, 4])
    return replace(
        setup,
        drafts=drafts,
        drafts_under_load=rng.choice([drafts, drafts - 1]),
        has_drafter=rng.random() < 0.8,
        acceptance=rng.choice([0.0, 0.5, 0.9, 1.0]),
        tells_gaps=rng.random() < 0.5,
    )


def faulty(setup: Setup, **rates: float) -> Setup:
    return replace(setup, faults=replace(setup.faults, **rates))


def traffic(setup: Setup, **changes: object) -> Setup:
    return replace(setup, traffic=replace(setup.traffic, **changes))  # pyright: ignore[reportArgumentType]

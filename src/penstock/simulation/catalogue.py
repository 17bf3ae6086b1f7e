"""Building blocks of the catalogue's scenarios."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from penstock.simulation.oracle import RECURRENT
from penstock.simulation.routing import RoutingSetup
from penstock.simulation.setup import Disaggregation, Setup

Draw = Callable[[random.Random], Setup | RoutingSetup]
_Draw = TypeVar("_Draw", bound=Draw)


@dataclass(frozen=True, slots=True)
class Scenario:
    """`origin` describes the failure in one line; `draw` makes a world's setup from a seeded random generator."""

    name: str
    origin: str
    draw: Draw


class Catalogue(dict[str, Scenario]):
    """Scenarios by name."""

    def add(self, name: str, origin: str) -> Callable[[_Draw], _Draw]:
        """Decorator that adds the function that draws a scenario's setup to the catalogue."""

        def add(draw: _Draw) -> _Draw:
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


def tiers(setup: Setup, rng: random.Random) -> Setup:
    """Gives the engines tiers of various sizes, and prefix caches, which are sometimes reset: tiers need them."""
    setup = traffic(setup, arrival=rng.choice([0.1, 0.3]), reset=rng.choice([0.0, 0.2]))
    return replace(setup, backing="tiers", prefix_caching=True, memory_chunks=rng.choice([4, 16, 64]))


def two(rng: random.Random) -> Setup:
    """Two engines that share a disk, with the same or different splits."""
    setup = tiers(base(rng), rng)
    other = rng.choice([setup.topologies[0], (1, 1), (2, 1), (1, 2)])
    return replace(setup, topologies=(*setup.topologies, other))


def with_states(setup: Setup, rng: random.Random) -> Setup:
    """Gives the engines recurrent layers beside those with attention."""
    return replace(
        setup,
        windows=rng.choice([(0, RECURRENT), (6, RECURRENT), (0, 5, RECURRENT)]),
        checkpoint_interval=rng.choice([4, 8, 16, 100]),
        spare_states=rng.choice([0, 2, 20]),
    )


def with_sizes(setup: Setup, rng: random.Random) -> Setup:
    """Gives the engines groups whose blocks have different numbers of bytes."""
    windows = rng.choice([(0, 9), (6, 0), (5, 11), (0, 5, 9), (0, 5, RECURRENT)])
    return replace(setup, windows=windows, wide_groups=rng.choice([(0,), (1,)]))


def pair(rng: random.Random) -> Setup:
    """One prefill engine and one decode engine, with the same or different splits."""
    setup = base(rng)
    first = setup.topologies[0]
    setup = replace(setup, topologies=(first, rng.choice([first, (1, 1), (2, 1), (1, 2)])), backing="p2p")
    setup = replace(setup, disaggregation=Disaggregation(is_attested=rng.random() < 0.7))
    return traffic(setup, arrival=rng.choice([0.1, 0.3]), abort=0.0, max_suffix=8)


def mixed(rng: random.Random) -> Setup:
    """The same, driven by proxies of both styles."""
    return pairs(pair(rng), style="mixed")


def pairs(setup: Setup, **changes: object) -> Setup:
    assert setup.disaggregation is not None
    return replace(
        setup,
        disaggregation=replace(setup.disaggregation, **changes),  # pyright: ignore[reportArgumentType]
    )

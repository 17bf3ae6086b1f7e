"""The catalogue's worlds in which some engines prefill for others; see `scenarios.py`."""

from __future__ import annotations

import random
from dataclasses import replace

from penstock.simulation.catalogue import Catalogue, base, traffic
from penstock.simulation.setup import Disaggregation, Setup

PD_SCENARIOS = Catalogue()
_scenario = PD_SCENARIOS.add


def _pairs(setup: Setup, **changes: object) -> Setup:
    assert setup.disaggregation is not None
    return replace(
        setup,
        disaggregation=replace(setup.disaggregation, **changes),  # pyright: ignore[reportArgumentType]
    )


def _pair(rng: random.Random) -> Setup:
    """One engine that prefills, one that decodes, each split in its own way or both alike."""
    setup = base(rng)
    first = setup.topologies[0]
    setup = replace(setup, topologies=(first, rng.choice([first, (1, 1), (2, 1), (1, 2)])), backing="p2p")
    setup = replace(setup, disaggregation=Disaggregation(is_attested=rng.random() < 0.7))
    return traffic(setup, arrival=rng.choice([0.1, 0.3]), abort=0.0, max_suffix=8)


@_scenario("pd_serial", "prefill here, decode there, as a proxy in the NIXL style drives it")
def _serial(rng: random.Random) -> Setup:
    return _pair(rng)


@_scenario("pd_concurrent", "C7: both engines get the request at once, and D may ask long before P has begun")
def _concurrent(rng: random.Random) -> Setup:
    return _pairs(_pair(rng), style="concurrent")

"""States of recurrent layers in tiers: loads within a step, and blocks that are offered long after they were found."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from penstock.kv_transfer.offload import scheduler
from penstock.kv_transfer.offload.scheduler import OffloadPolicy
from penstock.simulation.catalogue import traffic, with_states
from penstock.simulation.scenarios import SCENARIOS
from penstock.simulation.setup import Setup
from penstock.simulation.tiers import OffloadBacking
from penstock.simulation.world import World


def draw(rng: random.Random) -> Setup:
    setup = SCENARIOS["offload"].draw(rng)
    assert isinstance(setup, Setup)
    return with_states(setup, rng)


def test_a_step_loads_the_state_that_it_begins_with() -> None:
    happened = Counter[str]()
    for seed in range(10):
        setup = replace(draw(random.Random(seed)), sync_share=1.0)
        result = World(setup, f"{seed}").run()
        assert not result.violation, f"{result.violation}\n" + "\n".join(result.trace)
        happened.update(result.counters)
    assert happened["loaded_tokens"]


def test_a_state_is_not_offered_when_its_block_has_another_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are long in comparison to what a step may copy, and few states fit into the engine."""
    monkeypatch.setattr(scheduler, "_OLD_BYTES", 1)
    for seed in range(4):
        rng = random.Random(seed)
        setup = replace(draw(rng), topologies=((1, 1),), checkpoint_interval=100, max_model_len=96, max_num_seqs=6)
        setup = replace(setup, spare_states=rng.choice([0, 1]), spare_blocks=30)
        setup = replace(setup, memory_chunks=rng.choice([1, 2, 4]), disk_chunks=0)
        setup = traffic(setup, num_requests=30, max_output=40, arrival=0.5, num_stems=2, max_stem=24, reset=0.0)
        world = World(setup, f"{seed}")
        assert isinstance(world._backing, OffloadBacking)
        world._backing._policy = OffloadPolicy.REQUEST_LEVEL
        result = world.run()
        assert not result.violation, f"{result.violation}\n" + "\n".join(result.trace)

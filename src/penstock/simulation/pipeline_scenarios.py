"""Scenarios of pipeline stages and tensor parallel ranks: micro-batches, and results in flight."""

from __future__ import annotations

import random
from dataclasses import replace

from penstock.simulation.catalogue import Catalogue, base, faulty, speculating, tiers, traffic
from penstock.simulation.setup import Setup

PIPELINE_SCENARIOS = Catalogue()
_scenario = PIPELINE_SCENARIOS.add


def _pipeline(rng: random.Random) -> Setup:
    """One engine of two or three stages with unequal parts of the layers, under steady traffic."""
    stages = rng.choice([(1, 1), (2, 1), (1, 2), (1, 1, 1), (1, 2, 1), (3, 1, 1)])
    setup = replace(base(rng), backing="none", prefix_caching=rng.random() < 0.5, stage_layers=stages)
    setup = replace(setup, topologies=((len(stages), rng.choice([1, 1, 2])),), depth=rng.choice([1, 1, 2, 3]))
    setup = replace(setup, max_num_seqs=rng.choice([3, 8]), max_num_batched_tokens=rng.choice([6, 16, 40]))
    return traffic(setup, arrival=rng.choice([0.4, 0.9]), num_requests=20)


@_scenario("pipeline", "F33: stages of unequal size compute different micro-batches of requests")
def _plain(rng: random.Random) -> Setup:
    return _pipeline(rng)


@_scenario("pipeline_row_reuse", "F33: a row is reassigned while its last owner's results are in flight to a stage")
def _row_reuse(rng: random.Random) -> Setup:
    setup = traffic(_pipeline(rng), num_requests=60, arrival=0.9, abort=0.6, reuse=0.9, max_output=8, max_stem=10)
    return replace(setup, max_num_seqs=rng.choice([2, 3]), spare_blocks=30)


@_scenario("pipeline_aborts", "F11, F33: clients disconnect at every stage, with drafts in flight")
def _aborts(rng: random.Random) -> Setup:
    return traffic(speculating(_pipeline(rng), rng), abort=0.9, reuse=0.5, num_requests=40, max_output=18)


@_scenario("pipeline_preemption", "F12, F33: several micro-batches compete for a pool that holds one request")
def _preemption(rng: random.Random) -> Setup:
    setup = traffic(_pipeline(rng), arrival=0.9, abort=0.2, max_output=20, max_stem=12)
    return replace(setup, spare_blocks=rng.choice([0, 1]), max_num_seqs=8)


@_scenario("pipeline_drafts", "F22, F33: earlier stages learn late how many drafts were rejected")
def _drafts(rng: random.Random) -> Setup:
    return speculating(_pipeline(rng), rng)


@_scenario("pipeline_long_prompts", "F33: prompts in many chunks that run in the steps of all micro-batches")
def _long_prompts(rng: random.Random) -> Setup:
    setup = replace(_pipeline(rng), max_num_batched_tokens=rng.choice([3, 5]), spare_blocks=30)
    return traffic(setup, max_stem=40, max_output=10)


@_scenario("pipeline_shared_heads", "F27: more ranks than KV heads, so that several ranks hold the same head")
def _shared_heads(rng: random.Random) -> Setup:
    setup = speculating(_pipeline(rng), rng)
    return replace(setup, topologies=((setup.topologies[0][0], rng.choice([3, 4])),))


@_scenario("pipeline_dying_rank", "F18: a rank of any stage raises an exception during a step")
def _dying_rank(rng: random.Random) -> Setup:
    return faulty(_drafts(rng), worker_error=0.05)


@_scenario("pipeline_store", "F27, F14: three stages load from the disk what two stages stored, and the reverse")
def _store(rng: random.Random) -> Setup:
    setup = speculating(tiers(_pipeline(rng), rng), rng)
    setup = replace(setup, topologies=((3, rng.choice([1, 2])), (2, rng.choice([1, 2]))), stage_layers=(1, 2, 1))
    return replace(faulty(setup, corrupt=0.1, slow=0.4), sync_share=rng.choice([0.0, 0.5, 1.0]))

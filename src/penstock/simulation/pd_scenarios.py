"""Scenarios in which some engines prefill for others; see `scenarios.py`."""

from __future__ import annotations

import random
from dataclasses import replace

from penstock.simulation.catalogue import (
    Catalogue,
    faulty,
    mixed,
    pair,
    pairs,
    speculating,
    traffic,
    with_sizes,
    with_states,
)
from penstock.simulation.setup import Setup

PD_SCENARIOS = Catalogue()
_scenario = PD_SCENARIOS.add


def _many(rng: random.Random) -> Setup:
    """Two or three engines of each kind."""
    splits = [(1, 1), (1, 1), (2, 1), (1, 2)]
    num_prefill, num_decode = rng.choice([2, 3]), rng.choice([2, 3])
    setup = replace(mixed(rng), topologies=tuple(rng.choice(splits) for _ in range(num_prefill + num_decode)))
    return traffic(pairs(setup, num_prefill=num_prefill), num_requests=14, arrival=0.5)


def _attested(setup: Setup) -> Setup:
    """Enables digests, which alone detect wrong bytes."""
    return pairs(setup, is_attested=True)


def _patient(setup: Setup) -> Setup:
    """Sets deadlines that outlast every delay of messages and transfers, and gives room for all holds."""
    setup = pairs(setup, lease_seconds=2.0, hold_seconds=8.0, park_seconds=8.0)
    return replace(setup, load_timeout=6.0, spare_blocks=200)


@_scenario("pd_serial", "prefill and decode instances, driven by a proxy in the NIXL style")
def _serial(rng: random.Random) -> Setup:
    return pair(rng)


@_scenario("pd_concurrent", "C7: both engines receive the request at once, and D may ask long before P has begun")
def _concurrent(rng: random.Random) -> Setup:
    return pairs(pair(rng), style="concurrent")


@_scenario("pd_prefix_hits", "C1: prefixes that P, D, both or neither has; P must free unneeded blocks at once")
def _prefix_hits(rng: random.Random) -> Setup:
    setup = pairs(_patient(mixed(rng)), expects_no_expiry=True)
    return traffic(setup, num_stems=rng.choice([1, 3]), reset=rng.choice([0.0, 0.1, 0.3]), num_requests=14, reuse=0.7)


@_scenario("pd_shared_prefix", "P shares the beginning of a prompt, often from its cache, and D computes the rest")
def _shared_prefix(rng: random.Random) -> Setup:
    setup = pairs(_patient(pair(rng)), shared=0.8)
    setup = rng.choice([lambda: setup, lambda: with_states(setup, rng), lambda: speculating(setup, rng)])()
    # Every load must succeed. With a sliding window P may lack a block that D needs.
    setup = replace(setup, load_failure_policy="fail", loads_must_succeed=True, windows=(0,))
    return traffic(setup, num_stems=rng.choice([1, 3]), num_requests=14, reuse=0.6)


@_scenario("pd_multi_turn", "conversations through P and D: each reuses its own KV, and loads get shorter")
def _multi_turn(rng: random.Random) -> Setup:
    setup = replace(pairs(mixed(rng), turns=3, hold_seconds=8.0), max_model_len=96, spare_blocks=80)
    return traffic(setup, num_requests=5, max_stem=24, max_output=9, reuse=0.0)


@_scenario("pd_block_sizes", "F27: the two engines have different block sizes")
def _block_sizes(rng: random.Random) -> Setup:
    sizes = rng.choice([(4, 8), (8, 4), (4, 6), (6, 4), (2, 8), (3, 8), (8, 3)])
    return faulty(replace(mixed(rng), block_sizes=sizes), die=rng.choice([0.0, 0.1]))


@_scenario("pd_splits", "F27: different numbers of stages and ranks, including stages with unequal numbers of layers")
def _splits(rng: random.Random) -> Setup:
    splits = [(1, 1), (2, 1), (3, 1), (1, 2), (2, 2), (3, 2)]
    return replace(mixed(rng), topologies=(rng.choice(splits), rng.choice(splits)))


@_scenario("pd_drafts", "C9: the drafter's KV is transferred with the target's")
def _drafts(rng: random.Random) -> Setup:
    setup = speculating(mixed(rng), rng)
    return replace(setup, has_drafter=True, block_sizes=rng.choice([(), (), (4, 8), (6, 4)]))


@_scenario("pd_windows", "C6: P may have freed a block behind its window that D still needs")
def _windows(rng: random.Random) -> Setup:
    return replace(mixed(rng), windows=rng.choice([(6,), (0, 9), (0, 5), (4, 11)]))


@_scenario("pd_sizes", "groups of several sizes: D reads blocks of every size, from other splits and block sizes")
def _sizes(rng: random.Random) -> Setup:
    setup = with_sizes(mixed(rng), rng)
    setup = setup if rng.random() < 0.5 else speculating(setup, rng)
    return faulty(traffic(setup, reuse=0.4), die=rng.choice([0.0, 0.1]))


@_scenario(
    "pd_recurrent", "states: D continues from the state at the end of the last whole block, and loads what it needs"
)
def _recurrent(rng: random.Random) -> Setup:
    setup = with_states(mixed(rng), rng)
    setup = setup if rng.random() < 0.5 else speculating(setup, rng)
    return faulty(traffic(setup, reset=rng.choice([0.0, 0.2]), reuse=0.4), die=rng.choice([0.0, 0.1]))


@_scenario("pd_tiny_pools", "F12, F14: preemption during loads and holds, in pools that hold one request")
def _tiny_pools(rng: random.Random) -> Setup:
    setup = traffic(mixed(rng), arrival=0.9, num_requests=14, max_output=20)
    setup = pairs(setup, hold_share=rng.choice([0.5, 1.0]))
    return faulty(replace(setup, spare_blocks=rng.choice([0, 1]), max_num_seqs=6), slow=0.5, die=0.1)


@_scenario("pd_many", "several engines of each kind, fully connected")
def _several(rng: random.Random) -> Setup:
    return faulty(_many(rng), slow=0.3, slow_messages=0.3)


@_scenario("pd_connections", "F4, F9: connections break before, within and after every message, or cannot be opened")
def _connections(rng: random.Random) -> Setup:
    setup = faulty(mixed(rng), broken=rng.choice([0.05, 0.3]), refused=0.2, slow=0.5, slow_messages=0.3)
    setup = pairs(setup, digest_bytes_per_tick=rng.choice([16, 256]))
    return replace(setup, load_failure_policy=rng.choice(["recompute", "recompute", "fail"]))


@_scenario("pd_partition", "C7: messages between two engines are delayed for longer than a lease")
def _partition(rng: random.Random) -> Setup:
    setup = faulty(_many(rng), partition=0.1, slow=0.5, max_delay=0.2)
    return pairs(setup, lease_seconds=rng.choice([0.06, 0.2]))


@_scenario("pd_crash", "F1, F4: P or D dies at any moment, during reads of its memory")
def _crash(rng: random.Random) -> Setup:
    setup = faulty(_many(rng), crash=0.01, slow=0.6, max_delay=0.2)
    return replace(setup, load_failure_policy=rng.choice(["recompute", "recompute", "fail"]))


@_scenario("pd_restart_same_address", "F2, F9: P restarts under its name and address with other blocks")
def _restart(rng: random.Random) -> Setup:
    setup = faulty(mixed(rng), crash=0.015, slow=0.5, repeated=0.4, late=0.1, slow_messages=0.2)
    return pairs(traffic(setup, num_requests=14, reuse=0.6), answer_late=0.4)


@_scenario("pd_stopped", "F5, C7: a process is stopped for longer than a lease and then continues")
def _stopped(rng: random.Random) -> Setup:
    setup = faulty(mixed(rng), stop=0.04, slow=0.7, max_delay=0.2, drop=rng.choice([0.0, 0.2]))
    setup = replace(setup, load_timeout=rng.choice([0.1, 0.6]))
    return pairs(setup, is_attested=rng.random() < 0.3, lease_seconds=rng.choice([0.06, 0.15]))


@_scenario("pd_lease_ends_while_reading", "F5: the lease ends, P reallocates the blocks, and D still reads them")
def _lease_ends(rng: random.Random) -> Setup:
    setup = faulty(mixed(rng), slow=0.8, max_delay=0.4, slow_messages=0.6, partition=0.03)
    setup = pairs(setup, is_attested=False, lease_seconds=rng.choice([0.03, 0.08, 0.15]))
    # Each prompt may have to wait for the holds of the previous ones.
    setup = replace(setup, spare_blocks=0, request_ticks=4000, recovery_ticks=4000)
    return traffic(setup, num_requests=20, num_stems=6, arrival=0.8, abort=0.0)


@_scenario("pd_late_bytes", "F3, F6, F15: reads that fail but still arrive, are not reported, or deliver wrong bytes")
def _late_bytes(rng: random.Random) -> Setup:
    setup = faulty(mixed(rng), die_unsettled=0.2, corrupt=0.1, lost_completion=0.1, drop=0.1, slow=0.5)
    setup = replace(setup, load_timeout=rng.choice([0.1, 0.3]), drain=rng.choice([0.0, 0.1]), spare_blocks=4)
    return replace(_attested(setup), load_failure_policy=rng.choice(["recompute", "recompute", "fail"]))


@_scenario("pd_late_reports", "F7, F8: ranks report late, twice, out of order, or inconsistently")
def _late_reports(rng: random.Random) -> Setup:
    setup = faulty(mixed(rng), late=0.3, repeated=0.4, contradicted=0.5, die=0.1, slow=0.5)
    return replace(setup, topologies=(rng.choice([(2, 1), (1, 2)]), rng.choice([(2, 2), (1, 2)])))


@_scenario("pd_tickets", "F2: tickets that are forged, expired, reused, or for another prompt, engine or cluster")
def _tickets(rng: random.Random) -> Setup:
    setup = pairs(_many(rng), style="mixed", altered=0.4, replayed=0.3, answer_late=0.3, answer_lost=0.1)
    setup = faulty(setup, crash=rng.choice([0.0, 0.01]))
    return replace(setup, load_failure_policy=rng.choice(["recompute", "recompute", "fail"]))


@_scenario("pd_parked", "C7: D waits for a request that P never receives, or loses, and leaves while others wait")
def _parked(rng: random.Random) -> Setup:
    setup = traffic(pair(rng), num_requests=14, reuse=0.5, abort=rng.choice([0.0, 0.3]))
    setup = replace(setup, topologies=(*setup.topologies, setup.topologies[1]))
    setup = pairs(setup, style="concurrent", prefill_missing=0.3, replayed=0.5, max_parked=rng.choice([1, 64, 64]))
    return replace(setup, load_timeout=rng.choice([0.3, 0.3, 1.0]))


@_scenario("pd_no_prefill_left", "C7: all prefill engines die for good, and the decode engines prefill themselves")
def _no_prefill(rng: random.Random) -> Setup:
    return pairs(_many(rng), dead_from=rng.randrange(5, 60))


@_scenario("pd_aborts", "F8, F11: clients disconnect from P or D at every stage")
def _aborts(rng: random.Random) -> Setup:
    setup = traffic(mixed(rng), abort=0.6, abort_loading=0.03, reuse=0.5, num_requests=18, arrival=0.6)
    setup = pairs(setup, digest_bytes_per_tick=rng.choice([16, 256]))
    if rng.random() < 0.6:
        return faulty(setup, slow=0.6, slow_messages=0.4, late=0.1)
    # Only loads are aborted. Many run at once, and all others must succeed. With a sliding window P may lack a block
    # that D needs.
    setup = replace(_patient(setup), load_failure_policy="fail", loads_must_succeed=True, windows=(0,))
    setup = traffic(setup, abort=0.0, abort_loading=0.02, num_requests=30, num_stems=8, arrival=0.9)
    return faulty(setup, slow=0.9, max_delay=0.6, late=0.1)


@_scenario("pd_garbage", "P6: a peer with the cluster key sends messages that no engine sends, or runs another model")
def _garbage(rng: random.Random) -> Setup:
    setup = _attested(pairs(pair(rng), misled=0.5, replayed=0.2))
    return faulty(traffic(setup, num_requests=14), garbage=0.5, slow=0.4)


@_scenario("pd_everything", "all of the above at once")
def _everything(rng: random.Random) -> Setup:
    setup = _attested(pairs(speculating(_many(rng), rng), turns=2, altered=0.1, replayed=0.1, misled=0.05))
    setup = pairs(setup, answer_late=0.1, answer_lost=0.05, lease_seconds=0.15)
    setup = replace(setup, windows=rng.choice([(0,), (0, 9)]), block_sizes=())
    setup = traffic(setup, abort=0.1, abort_loading=0.01, reset=0.05, salts=(None, "a"))
    rates = {"drop": 0.02, "lost_completion": 0.02, "die": 0.02, "die_unsettled": 0.02, "corrupt": 0.03}
    setup = faulty(setup, slow=0.2, late=0.05, repeated=0.2, crash=0.002, **rates)
    setup = faulty(setup, slow_messages=0.2, broken=0.01, refused=0.02, partition=0.01, stop=0.003, garbage=0.05)
    # Prompts whose readers have gone are held one after another if the pool has room for one.
    return replace(setup, request_ticks=4000, recovery_ticks=4000)

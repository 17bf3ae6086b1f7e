"""The catalogue of scenarios: their setup, and the reported failures that they reproduce.

The labels F1 to F35, C1 to C15 name reports and classes of bugs collected from the public issue trackers of serving
engines; docs/SIMULATION.md has the list.
"""

from __future__ import annotations

import random
from dataclasses import replace

from penstock.config.lora import LoraConfig
from penstock.messages.adapters import Adapter
from penstock.simulation.catalogue import (
    Catalogue,
    base,
    faulty,
    mixed,
    pairs,
    speculating,
    tiers,
    traffic,
    two,
    with_sizes,
    with_states,
)
from penstock.simulation.pd_scenarios import PD_SCENARIOS
from penstock.simulation.pipeline_scenarios import PIPELINE_SCENARIOS
from penstock.simulation.routing import RoutingSetup, RoutingWorld
from penstock.simulation.setup import Setup
from penstock.simulation.world import RunResult, World

SCENARIOS = Catalogue()
_scenario = SCENARIOS.add


def run_scenario(name: str, seed: int) -> RunResult:
    """Runs the world of this scenario and seed to its end."""
    rng = random.Random(f"{name} {seed}")
    setup = SCENARIOS[name].draw(rng)
    world_seed = f"{name} {seed} world"
    world = RoutingWorld(setup, world_seed) if isinstance(setup, RoutingSetup) else World(setup, world_seed)
    return world.run()


def replay_line(name: str, seed: int) -> str:
    """Returns the command that runs the same world again."""
    return f"penstock simulate --scenario {name} --seed {seed}"


@_scenario("plain", "C2: the host's counts run ahead of the device's; chunked prefill, prefix hits and preemption")
def _plain(rng: random.Random) -> Setup:
    return replace(base(rng), backing="none", prefix_caching=rng.random() < 0.7)


@_scenario("drafts", "C9, F21: drafts at stops and at the last token, and counts that include rejected drafts")
def _spec_plain(rng: random.Random) -> Setup:
    return speculating(_plain(rng), rng)


@_scenario("rejections_of_every_length", "C2, F22: the host counts rejected drafts as computed")
def _reject_all(rng: random.Random) -> Setup:
    return replace(
        _spec_plain(rng), acceptance=rng.choice([0.0, 0.3]), depth=rng.choice([2, 3]), drafts=4, has_drafter=True
    )


@_scenario("changing_draft_depth", "F22, F34: the number of drafts changes between steps, down to none")
def _depth_of_drafts(rng: random.Random) -> Setup:
    return replace(_spec_plain(rng), drafts=rng.choice([2, 4]), drafts_under_load=0, depth=rng.choice([1, 2, 3]))


@_scenario("tiny_pool", "F12: aborts and preemptions in a pool that holds one request; no livelock")
def _tiny_pool(rng: random.Random) -> Setup:
    setup = traffic(_plain(rng), num_requests=14, arrival=0.8, abort=0.3, max_output=20)
    return replace(setup, spare_blocks=rng.choice([0, 1]), max_num_seqs=6)


@_scenario("full_prefix_hits", "F24: prompts of whole blocks whose every token is in the prefix cache")
def _full_hits(rng: random.Random) -> Setup:
    return traffic(replace(base(rng), backing="none"), num_stems=1, max_suffix=1, num_requests=14)


@_scenario("tenants", "F25: a prompt with another salt must not match in the prefix cache or in the tiers")
def _tenants(rng: random.Random) -> Setup:
    return traffic(two(rng), salts=(None, "a", "b"), num_stems=1)


@_scenario("adapters", "vllm: a prompt with another adapter matches in a cache; a slot changes its adapter too early")
def _adapters(rng: random.Random) -> Setup:
    adapters = tuple(Adapter(name, name.encode() * 32, "") for name in "abc")
    setup = traffic(two(rng), adapters=(None, *adapters), num_stems=1, arrival=0.5, num_requests=16)
    lora = LoraConfig(num_slots=rng.choice([2, 3]), max_running=rng.choice([1, 2]), max_rank=8)
    return replace(setup, lora=lora, depth=rng.choice([1, 2, 3]))


@_scenario("id_reuse", "F8, F23: a request reuses the id of one whose results and saves are still in flight")
def _reuse(rng: random.Random) -> Setup:
    setup = traffic(speculating(two(rng), rng), reuse=0.9, abort=0.5, arrival=0.6, num_requests=14)
    return replace(faulty(setup, slow=0.6), runs_ahead=True, depth=rng.choice([2, 3]))


@_scenario("row_reuse", "F33: a row is reassigned while stages still run steps of its previous request")
def _rows(rng: random.Random) -> Setup:
    setup = traffic(_plain(rng), reuse=0.9, abort=0.5, arrival=0.8, num_requests=16, max_output=8)
    return replace(setup, topologies=((2, rng.choice([1, 2])),), depth=rng.choice([2, 3]), max_num_seqs=2)


@_scenario("shared_store", "prefill in one engine, a prefix hit in another, through a disk that they share")
def _share(rng: random.Random) -> Setup:
    return two(rng)


@_scenario("shared_store_with_drafts", "C9: the drafter's KV must be transferred with the target's")
def _spec_share(rng: random.Random) -> Setup:
    return speculating(two(rng), rng)


@_scenario("handoff", "prefill in one engine, decode in another, drafts in both")
def _handoff(rng: random.Random) -> Setup:
    return traffic(_spec_share(rng), handoff=True, num_requests=8)


@_scenario("synchronous_loads", "F14: KV is loaded in the step that attends to it")
def _sync(rng: random.Random) -> Setup:
    return replace(_spec_share(rng), sync_share=rng.choice([0.5, 1.0]))


@_scenario("failing_loads", "F14: the first, middle or last blocks fail to load; the request computes them")
def _bad_loads(rng: random.Random) -> Setup:
    setup = faulty(_spec_share(rng), corrupt=0.3, slow=0.3)
    return replace(setup, sync_share=rng.choice([0.0, 0.5, 1.0]), max_num_batched_tokens=rng.choice([3, 16]))


@_scenario("failing_loads_policy_fail", "F14: the same with the policy `fail`: the request ends without a wrong token")
def _bad_loads_fail(rng: random.Random) -> Setup:
    return replace(_bad_loads(rng), load_failure_policy="fail")


@_scenario("common_prefix_fails", "F14: many requests wait for one prefix whose owner is aborted")
def _common_prefix(rng: random.Random) -> Setup:
    return traffic(faulty(mixed(rng), die=0.3, slow=0.4), num_stems=1, arrival=0.9, abort=0.4, num_requests=14)


@_scenario("wrong_bytes", "F15: the transport reports success although a byte is wrong")
def _wrong_bytes(rng: random.Random) -> Setup:
    return pairs(faulty(speculating(mixed(rng), rng), corrupt=0.4), is_attested=True)


@_scenario("unsettled_failures", "F3, F6, F10: bytes of a failed transfer still arrive")
def _unsettled(rng: random.Random) -> Setup:
    setup = faulty(mixed(rng), die_unsettled=0.3, slow=0.5)
    return replace(setup, load_timeout=rng.choice([0.05, 0.2]), drain=rng.choice([0.0, 0.1]), spare_blocks=4)


@_scenario("lost_completions", "F6: the completion of a transfer is never reported")
def _lost(rng: random.Random) -> Setup:
    return replace(faulty(mixed(rng), drop=0.15, lost_completion=0.15), load_timeout=rng.choice([0.05, 0.2, 0.6]))


@_scenario("stuck_transfers", "C7, F6: a transfer takes very long; other requests do not wait for it")
def _stuck(rng: random.Random) -> Setup:
    setup = faulty(mixed(rng), drop=0.3, lost_completion=0.2)
    return replace(setup, load_timeout=0.3, request_ticks=250, spare_blocks=150)


@_scenario("late_completions", "F8: completions are late and out of order")
def _late(rng: random.Random) -> Setup:
    return faulty(_spec_share(rng), late=0.4, slow=0.6, max_delay=0.3)


@_scenario("overdue_loads", "F5, C7: KV arrives after its deadline, when the request has already continued")
def _overdue(rng: random.Random) -> Setup:
    setup = faulty(mixed(rng), late=0.3, slow=0.8, max_delay=0.4)
    return replace(setup, load_timeout=rng.choice([0.05, 0.3]), drain=0.2, spare_blocks=rng.choice([0, 4]))


@_scenario("repeated_completions", "F7, F9: completions are repeated, also for ids that have ended")
def _repeated(rng: random.Random) -> Setup:
    return traffic(faulty(_spec_share(rng), repeated=0.4, late=0.2, slow=0.4), reuse=0.7)


@_scenario("one_of_n_shards", "F10: one rank's part fails or never completes while others succeed")
def _one_shard(rng: random.Random) -> Setup:
    setup = faulty(mixed(rng), die=0.1, drop=0.05, late=0.2, contradicted=0.5)
    topology = rng.choice([(2, 1), (1, 2), (2, 2)])
    return replace(setup, topologies=(topology, topology))


@_scenario("abort_while_loading", "F8, F11: the client disconnects during a load")
def _abort_loading(rng: random.Random) -> Setup:
    setup = traffic(faulty(two(rng), slow=0.9, late=0.2), abort_loading=0.15, reuse=0.5, num_requests=14)
    return replace(setup, runs_ahead=True, spare_blocks=rng.choice([0, 4]))


@_scenario("abort_storm", "F11, F12: clients disconnect at every stage")
def _abort_storm(rng: random.Random) -> Setup:
    setup = traffic(faulty(_spec_share(rng), slow=0.4), abort=0.9, arrival=0.9, num_requests=24, max_output=18)
    return replace(setup, spare_blocks=rng.choice([0, 4]), sync_share=rng.choice([0.0, 1.0, 1.0]))


@_scenario("preemption_during_loads", "F12, F14: the pool is too small for the loads and the running requests together")
def _preempt_loading(rng: random.Random) -> Setup:
    setup = faulty(two(rng), slow=0.6, corrupt=0.1)
    setup = traffic(setup, arrival=0.8, num_requests=20, max_output=20, num_stems=1)
    return replace(setup, runs_ahead=True, spare_blocks=rng.choice([0, 1]), sync_share=rng.choice([0.0, 0.5, 1.0]))


@_scenario("preemption_during_saves", "F13: a saved block is reused at once; the store must not save the new content")
def _preempt_saving(rng: random.Random) -> Setup:
    setup = traffic(faulty(two(rng), slow=0.9), arrival=0.8, num_requests=14, max_output=20, abort=0.3)
    return replace(setup, spare_blocks=0)


@_scenario("held_blocks", "C1: a finished request's blocks are read after it has ended")
def _held(rng: random.Random) -> Setup:
    setup = faulty(speculating(mixed(rng), rng), slow=0.8, max_delay=0.2, die_unsettled=0.1)
    return replace(traffic(setup, abort=0.3, reuse=0.5), spare_blocks=rng.choice([0, 4]))


@_scenario("full_store", "F16: the disk or the memory tier is full; saves are dropped, serving continues")
def _full_store(rng: random.Random) -> Setup:
    setup = replace(two(rng), disk_chunks=rng.choice([1, 3, 6]), memory_chunks=rng.choice([1, 2, 4]))
    return faulty(setup, slow=0.9, max_delay=0.2)


@_scenario("slow_directory", "C7: a lookup is pending for a while, or forever, as the disk is slow")
def _slow_directory(rng: random.Random) -> Setup:
    setup = faulty(traffic(two(rng), num_stems=1), lost_completion=0.3, slow=0.6, max_delay=0.4)
    return replace(setup, memory_chunks=rng.choice([2, 6]), load_timeout=0.3, request_ticks=400, fault_ticks=800)


@_scenario("crash", "F1, F4: an engine dies at any moment while its writes to the disk are still in flight")
def _crash(rng: random.Random) -> Setup:
    return faulty(_spec_share(rng), crash=0.02, slow=0.5, die=0.1)


@_scenario("reports_of_an_old_life", "F2, F9: a new engine receives reports of its predecessor's workers")
def _old_life(rng: random.Random) -> Setup:
    return traffic(faulty(two(rng), crash=0.04, repeated=0.5, late=0.2, slow=0.6), reuse=0.7)


@_scenario("migrated_streams", "answers that are lost with their engine go on at another one, with given output")
def _migrated(rng: random.Random) -> Setup:
    setup = faulty(two(rng), crash=0.03, slow=0.3)
    setup = setup if rng.random() < 0.5 else speculating(setup, rng)
    return traffic(setup, continues=True, grammars=0.0 if setup.drafts else 0.5, max_output=20, abort=0.0, stop=0.3)


@_scenario("worker_error", "F18: a rank raises an exception during a step")
def _worker_error(rng: random.Random) -> Setup:
    return faulty(_spec_share(rng), worker_error=0.03, slow=0.3)


@_scenario("store_restart", "F2: the disk loses its files while engines load them")
def _store_restart(rng: random.Random) -> Setup:
    setup = replace(faulty(two(rng), disk_loss=0.05, slow=0.6), memory_chunks=rng.choice([2, 6]))
    return replace(setup, sync_share=rng.choice([0.0, 0.5]))


@_scenario("other_split", "F27: engines with different numbers of stages and ranks share the disk")
def _mixed_split(rng: random.Random) -> Setup:
    return replace(_spec_share(rng), topologies=(rng.choice([(1, 1), (2, 2)]), rng.choice([(2, 1), (1, 2)])))


@_scenario("sliding_windows", "C6, F14: KV groups that need only part of the prefix")
def _windows(rng: random.Random) -> Setup:
    setup = replace(two(rng), windows=rng.choice([(6,), (0, 9), (0, 5), (4, 11)]), sync_share=rng.choice([0.0, 0.5]))
    return faulty(setup, corrupt=0.1)


@_scenario("recurrent", "states: checkpoints, preemption and rejected drafts, without transfers")
def _recurrent(rng: random.Random) -> Setup:
    setup = with_states(replace(base(rng), backing="none"), rng)
    return traffic(setup if rng.random() < 0.5 else speculating(setup, rng), reuse=0.5)


@_scenario("offload_recurrent", "states: KV is in a tier with the state at its end, or is computed again")
def _recurrent_tiers(rng: random.Random) -> Setup:
    return traffic(replace(with_states(_tiers_with_drafts(rng), rng), sync_share=rng.choice([0.0, 0.5])), reuse=0.5)


@_scenario("sizes", "groups of several sizes: preemption, drafts and prefix hits, without transfers")
def _sizes(rng: random.Random) -> Setup:
    setup = with_sizes(replace(base(rng), backing="none"), rng)
    return traffic(setup if rng.random() < 0.5 else speculating(setup, rng), reuse=0.5)


@_scenario("offload_sizes", "groups of several sizes: a tier's chunks have room for a block of any group")
def _sizes_in_tiers(rng: random.Random) -> Setup:
    return traffic(with_sizes(_tiers_with_drafts(rng), rng), reuse=0.5)


@_scenario("loads_behind_steps", "F12, F14: KV is loaded into blocks that steps in flight wrote for preempted requests")
def _behind(rng: random.Random) -> Setup:
    setup = replace(_windows(rng), topologies=((1, 1),), memory_chunks=64, depth=3, runs_ahead=True)
    setup = replace(setup, sync_share=0.5, spare_blocks=rng.choice([0, 1]), max_num_seqs=6)
    return traffic(setup, num_stems=1, num_requests=40, arrival=0.9, max_output=20, abort=0.3, reset=0.0)


@_scenario("offload", "KV is offloaded to memory and disk, and loaded again")
def _tiers(rng: random.Random) -> Setup:
    """One engine with tiers."""
    setup = traffic(tiers(base(rng), rng), num_requests=14)
    setup = replace(setup, topologies=(rng.choice([(1, 1), (1, 2), (2, 1), (2, 2)]),))
    return replace(setup, memory_chunks=rng.choice([2, 8, 64]), disk_chunks=rng.choice([4, 200]))


@_scenario("offload_with_drafts", "C9, F13: the same with a drafter's layers and with preemption")
def _tiers_with_drafts(rng: random.Random) -> Setup:
    return speculating(_tiers(rng), rng)


@_scenario("offload_small", "F12, F16: a very small memory tier and a slow disk")
def _small_tiers(rng: random.Random) -> Setup:
    setup = replace(_tiers_with_drafts(rng), memory_chunks=rng.choice([1, 2, 3]), spare_blocks=0)
    return faulty(setup, slow=0.6, max_delay=0.3)


@_scenario("offload_hungry", "F12: loads compete with the only running request, which needs their blocks")
def _hungry(rng: random.Random) -> Setup:
    """One request fills the pool in chunks of three tokens, and the prompts of the others are in the tiers."""
    setup = replace(_tiers_with_drafts(rng), windows=(rng.choice([0, 6]),), depth=3, max_num_batched_tokens=3)
    setup = replace(setup, max_num_seqs=2, spare_blocks=0, memory_chunks=64, disk_chunks=200)
    return faulty(traffic(setup, arrival=0.9, num_stems=1, max_output=18), slow=0.0)


@_scenario("offload_wrong_bytes", "F15: bits flip in memory, in transit and on disk")
def _wrong_tiers(rng: random.Random) -> Setup:
    policy = rng.choice(["recompute", "fail"])
    return replace(faulty(_tiers_with_drafts(rng), corrupt=0.3), load_failure_policy=policy)


@_scenario("offload_failing_disk", "F16: disk jobs fail partially, late or twice, or never end")
def _failing_disk(rng: random.Random) -> Setup:
    setup = replace(_tiers_with_drafts(rng), memory_chunks=rng.choice([2, 8]), load_timeout=0.3)
    return faulty(setup, drop=0.2, die=0.1, lost_completion=0.1, slow=0.5, max_delay=0.5, late=0.2, repeated=0.3)


@_scenario("offload_crash", "F2, F9: after a crash, memory is lost and the disk is found again, or is empty")
def _tiers_crash(rng: random.Random) -> Setup:
    setup = faulty(_tiers_with_drafts(rng), crash=0.03, slow=0.5, disk_loss=0.02, repeated=0.3, late=0.2)
    return traffic(setup, reuse=0.6, abort=0.3, abort_loading=0.05)


@_scenario("layerwise_loads", "F14: layers load one by one while the step runs, or fail to load")
def _layerwise(rng: random.Random) -> Setup:
    setup = faulty(_spec_share(rng), corrupt=0.1, slow=0.4)
    setup = replace(setup, sync_share=rng.choice([0.5, 1.0]), layerwise=True, runs_ahead=False)
    return replace(setup, load_failure_policy=rng.choice(["recompute", "fail"]))


@_scenario("several_connectors", "one connector loads and all of them save; their ids do not collide")
def _several(rng: random.Random) -> Setup:
    """A prefill engine and a decode engine, each also with tiers."""
    setup = traffic(speculating(mixed(rng), rng), reset=rng.choice([0.0, 0.2]), num_requests=14)
    setup = replace(setup, backing="several", memory_chunks=rng.choice([2, 16]))
    return replace(setup, sync_share=rng.choice([0.0, 0.5]))


@_scenario("several_connectors_fail", "C1, F7, F9: the same, with different faults in each connector")
def _failing_several(rng: random.Random) -> Setup:
    faults = {"die": 0.1, "die_unsettled": 0.1, "corrupt": 0.1, "drop": 0.05, "slow": 0.4, "max_delay": 0.2}
    setup = faulty(pairs(_several(rng), is_attested=True), late=0.2, repeated=0.3, crash=0.01, **faults)
    return traffic(replace(setup, load_timeout=0.3), reuse=0.5, abort=0.3, abort_loading=0.05)


@_scenario("everything", "all of the above at once")
def _everything(rng: random.Random) -> Setup:
    setup = traffic(_spec_share(rng), abort=0.3, abort_loading=0.05, reuse=0.5, salts=(None, "a"), num_requests=16)
    setup = traffic(setup, handoff=rng.random() < 0.5)
    rates = {"drop": 0.05, "lost_completion": 0.05, "die": 0.1, "corrupt": 0.1, "late": 0.2, "repeated": 0.2}
    setup = faulty(setup, slow=0.4, max_delay=0.2, crash=0.005, disk_loss=0.005, **rates)
    return replace(setup, sync_share=rng.choice([0.0, 0.3]), disk_chunks=rng.choice([4, 64]))


def _routing(rng: random.Random, *, has_halves: bool) -> RoutingSetup:
    return RoutingSetup(
        has_halves=has_halves,
        num_instances=rng.choice([2, 3]),
        num_requests=500,
        pause=rng.choice([0.1, 1.0, 3.0]),
        max_tokens=rng.choice([300, 3000]),
        num_changes=rng.choice([0, 1, 3]),
    )


@_scenario("routing_of_halves", "where a router lets prompts be computed, of instances whose speeds change")
def _routing_halves(rng: random.Random) -> RoutingSetup:
    return _routing(rng, has_halves=True)


@_scenario("routing_with_siblings", "when a router lets a prompt's beginning be loaded from an instance that has it")
def _routing_siblings(rng: random.Random) -> RoutingSetup:
    return _routing(rng, has_halves=False)


SCENARIOS.update(PIPELINE_SCENARIOS)
SCENARIOS.update(PD_SCENARIOS)

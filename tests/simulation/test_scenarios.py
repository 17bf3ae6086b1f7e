"""Every scenario passes and does what its name says, and a seed alone determines a run."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter

import pytest

from penstock.simulation.backing import Parts, Site
from penstock.simulation.routing import RoutingSetup
from penstock.simulation.scenarios import SCENARIOS, replay_line, run_scenario
from penstock.simulation.tiers import OffloadBacking
from penstock.utils.errors import ConfigError
from tests.grids import exhaustive

# Seeds per scenario here; `penstock simulate` runs as many as are requested.
NUM_SEEDS = 10
# Worlds of several connected engines take four times as long.
NUM_PAIR_SEEDS = 5
# Up to this many times as many seeds, until everything in HAPPENS has happened.
MOST = 3

# What must happen at least once over the seeds of a scenario, as it would test nothing otherwise.
HAPPENS = {
    "plain": {"preemptions", "prefix_hit_tokens"},
    "drafts": {"accepted_drafts"},
    "rejections_of_every_length": {"drafts", "preemptions"},
    "changing_draft_depth": {"accepted_drafts"},
    "tiny_pool": {"preemptions", "aborts"},
    "full_prefix_hits": {"prefix_hit_tokens"},
    "tenants": {"loaded_tokens"},
    "adapters": {"loaded_tokens", "prefix_hit_tokens"},
    "migrated_streams": {"crashes", "continued", "loaded_tokens", "prefix_hit_tokens"},
    "routing_of_halves": {"decode", "prefill", "changes", "good", "learning"},
    "routing_with_siblings": {"sibling", "whole", "changes", "good", "learning"},
    "id_reuse": {"aborts", "loaded_tokens"},
    "row_reuse": {"aborts", "foreign_results"},
    "shared_store": {"loaded_tokens", "num_promoted"},
    "shared_store_with_drafts": {"loaded_tokens", "accepted_drafts", "num_promoted"},
    "handoff": {"loaded_tokens", "accepted_drafts", "num_promoted"},
    "synchronous_loads": {"loaded_tokens"},
    "failing_loads": {"failed_loads", "loaded_tokens"},
    "failing_loads_policy_fail": {"failed_loads", "failed"},
    "common_prefix_fails": {"failed_loads", "aborts", "loaded_tokens"},
    "wrong_bytes": {"p2p_consumer_bad_ranges", "failed_loads", "loaded_tokens"},
    "unsettled_failures": {"failed_loads", "load_timeouts", "loaded_tokens"},
    "lost_completions": {"failed_loads", "load_timeouts", "loaded_tokens"},
    "stuck_transfers": {"load_timeouts", "p2p_consumer_cancelled", "loaded_tokens"},
    "late_completions": {"late_reports", "loaded_tokens"},
    "overdue_loads": {"load_timeouts", "p2p_consumer_cancelled", "late_reports", "loaded_tokens"},
    "repeated_completions": {"old_reports", "late_reports", "loaded_tokens"},
    "one_of_n_shards": {"failed_loads", "late_reports", "loaded_tokens"},
    "abort_while_loading": {"aborts", "loaded_tokens"},
    "abort_storm": {"aborts", "loaded_tokens"},
    "preemption_during_loads": {"preemptions", "loaded_tokens", "failed_loads"},
    "preemption_during_saves": {"preemptions", "loaded_tokens"},
    "held_blocks": {"p2p_consumer_completed", "preemptions", "aborts"},
    "full_store": {"num_stores_without_room", "num_cascades_failed", "loaded_tokens"},
    "slow_directory": {"load_timeouts", "loaded_tokens"},
    "crash": {"crashes", "loaded_tokens", "num_promoted"},
    "reports_of_an_old_life": {"crashes", "old_reports", "loaded_tokens"},
    "worker_error": {"crashes", "loaded_tokens"},
    "store_restart": {"disk_losses", "num_promotions_failed", "loaded_tokens"},
    "other_split": {"loaded_tokens", "accepted_drafts", "num_promoted"},
    "sliding_windows": {"loaded_tokens", "failed_loads"},
    "loads_behind_steps": {"preemptions", "loaded_tokens", "failed_loads"},
    "recurrent": {"preemptions", "accepted_drafts", "prefix_hit_tokens"},
    "offload_recurrent": {"loaded_tokens", "accepted_drafts", "num_promoted"},
    "offload": {"loaded_tokens", "num_promoted"},
    "offload_with_drafts": {"preemptions", "loaded_tokens", "accepted_drafts"},
    "offload_small": {"preemptions", "num_promoted"},
    "offload_hungry": {"preemptions", "loaded_tokens"},
    "offload_wrong_bytes": {"num_corrupted", "loaded_tokens"},
    "offload_failing_disk": {
        "num_promotions_failed",
        "num_cascades_failed",
        "num_unknown_results",
        "late_reports",
    },
    "offload_crash": {"crashes", "disk_losses", "old_reports", "loaded_tokens"},
    "layerwise_loads": {"loaded_tokens", "failed_loads", "accepted_drafts"},
    "several_connectors": {"loaded_tokens", "tiers.num_loads", "tiers.num_promoted", "p2p.p2p_consumer_completed"},
    "several_connectors_fail": {
        "failed_loads",
        "loaded_tokens",
        "crashes",
        "tiers.num_corrupted",
        "p2p.p2p_consumer_bad_ranges",
    },
    "pipeline": {"preemptions", "prefix_hit_tokens"},
    "pipeline_row_reuse": {"aborts", "foreign_results"},
    "pipeline_aborts": {"aborts", "foreign_results", "accepted_drafts"},
    "pipeline_preemption": {"preemptions", "foreign_results"},
    "pipeline_drafts": {"accepted_drafts", "foreign_results"},
    "pipeline_long_prompts": {"aborts", "foreign_results"},
    "pipeline_shared_heads": {"accepted_drafts", "foreign_results"},
    "pipeline_dying_rank": {"crashes", "foreign_results"},
    "pipeline_store": {"loaded_tokens", "failed_loads", "accepted_drafts"},
    "pd_serial": {"loaded_tokens", "p2p_consumer_not_needed"},
    "pd_concurrent": {"loaded_tokens", "failed_loads", "p2p_consumer_not_needed"},
    "pd_prefix_hits": {"loaded_tokens", "prefix_hit_tokens", "p2p_producer_not_needed"},
    "pd_shared_prefix": {"shared", "prefix_hit_tokens", "loaded_tokens"},
    "pd_multi_turn": {"turn2_asked_tokens", "turn3_asked_tokens", "prefix_hit_tokens"},
    "pd_block_sizes": {"loaded_tokens", "failed_loads"},
    "pd_splits": {"loaded_tokens"},
    "pd_drafts": {"loaded_tokens", "accepted_drafts"},
    "pd_windows": {"loaded_tokens", "failed_loads"},
    "pd_recurrent": {"loaded_tokens", "failed_loads", "prefix_hit_tokens"},
    "pd_tiny_pools": {"loaded_tokens", "preemptions"},
    "pd_many": {"loaded_tokens"},
    "pd_connections": {
        "connections_broken",
        "connections_refused",
        "retried",
        "begun_again",
        "loaded_tokens",
        "p2p_consumer_cancelled",
    },
    "sizes": {"preemptions", "accepted_drafts", "prefix_hit_tokens"},
    "offload_sizes": {"preemptions", "accepted_drafts", "loaded_tokens", "num_cascaded"},
    "pd_sizes": {"preemptions", "accepted_drafts", "loaded_tokens", "failed_loads"},
    "pd_partition": {"partitions", "p2p_consumer_unconfirmed", "loaded_tokens"},
    "pd_crash": {"crashes", "retried", "begun_again", "loaded_tokens", "failed_loads"},
    "pd_restart_same_address": {"crashes", "loaded_tokens", "p2p_consumer_refused", "p2p_unknown_reports"},
    "pd_stopped": {"stops", "p2p_consumer_unconfirmed", "p2p_consumer_cancelled", "loaded_tokens"},
    "pd_lease_ends_while_reading": {"p2p_consumer_unconfirmed", "p2p_producer_expired", "loaded_tokens"},
    "pd_late_bytes": {"p2p_consumer_bad_ranges", "p2p_consumer_cancelled", "load_timeouts", "loaded_tokens"},
    "pd_late_reports": {"p2p_duplicate_reports", "p2p_unknown_reports", "loaded_tokens"},
    "pd_tickets": {"altered", "replayed", "answers_late", "answers_lost", "p2p_producer_refused", "loaded_tokens"},
    "pd_parked": {"prefills_missing", "replayed", "p2p_consumer_refused", "loaded_tokens"},
    "pd_no_prefill_left": {"connections_refused", "loaded_tokens"},
    "pd_aborts": {"aborts", "p2p_consumer_cancelled", "loaded_tokens"},
    "pd_garbage": {"garbage", "misled", "loaded_tokens"},
    "pd_everything": {"crashes", "garbage", "stops", "loaded_tokens", "accepted_drafts", "p2p_consumer_cancelled"},
    "everything": {
        "crashes",
        "failed_loads",
        "loaded_tokens",
        "preemptions",
        "accepted_drafts",
        "aborts",
        "disk_losses",
    },
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_engines_with_a_connector_have_a_prefix_cache(name: str) -> None:
    """Others are refused at the start, see `engine/transfer.py`."""
    for seed in range(50):
        setup = SCENARIOS[name].draw(random.Random(seed))
        assert isinstance(setup, RoutingSetup) or setup.backing == "none" or setup.prefix_caching


def test_an_engine_that_cannot_start_again_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A world is refused only as a whole: later its configuration is known to be right."""
    attach, lives = OffloadBacking.attach, Counter[str]()

    def refuse(self: OffloadBacking, site: Site) -> Parts:
        lives[site.name] += 1
        if lives[site.name] > 1:
            raise ConfigError("it does not fit")
        return attach(self, site)

    monkeypatch.setattr(OffloadBacking, "attach", refuse)
    found = [run_scenario("migrated_streams", seed) for seed in range(5)]
    assert any(result.violation == "ConfigError: it does not fit" for result in found)
    lives.update(dict.fromkeys(lives, 1))
    result = run_scenario("migrated_streams", 0)
    assert (result.violation, result.counters["refused"]) == ("", 1)


@pytest.mark.spread(6)
@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name: str) -> None:
    happened: Counter[str] = Counter()
    missing = HAPPENS[name]
    num_seeds = NUM_PAIR_SEEDS if name.startswith("pd_") else NUM_SEEDS
    for seed in range(num_seeds * MOST):
        if seed >= num_seeds and not missing:
            break
        result = run_scenario(name, seed)
        trace = "\n".join(result.trace)
        assert not result.violation, f"{result.violation}\n{trace}\n{replay_line(name, seed)}"
        happened.update(result.counters)
        missing = {what for what in missing if not happened[what]}
    assert happened["finished"] > num_seeds
    assert not missing, f"{name} tests nothing: {missing} never happened"


@pytest.mark.long
def test_ten_thousand_steps_of_row_reuse_give_no_foreign_token() -> None:
    """Stages reassign rows all the time, while results of the previous owners are still in transit."""
    happened: Counter[str] = Counter()
    seed = NUM_SEEDS
    while happened["steps"] < 10_000:
        result = run_scenario("pipeline_row_reuse", seed)
        assert not result.violation, f"{result.violation}\n{replay_line('pipeline_row_reuse', seed)}"
        happened.update(result.counters)
        seed += 1
    assert happened["foreign_results"] > 1000
    assert happened["aborts"] > 1000


def test_loads_get_shorter_from_turn_to_turn() -> None:
    """In each turn an engine finds what it computed or loaded for the turn before in its own cache."""
    counts: Counter[str] = Counter()
    for seed in range(NUM_PAIR_SEEDS):
        counts.update(run_scenario("pd_multi_turn", seed).counters)
    shares = [counts[f"turn{turn}_asked_tokens"] / counts[f"turn{turn}_prompt_tokens"] for turn in (1, 2, 3)]
    assert shares[1] < shares[0] / 2
    assert shares[2] < shares[0] / 2


_DIGESTS = """
from penstock.simulation.scenarios import run_scenario
print([run_scenario(name, seed).digest for name in ("everything", "tiny_pool", "crash") for seed in range(3)])
"""


@pytest.mark.parametrize(("name", "seed"), [("routing_of_halves", 1069469394537), ("routing_with_siblings", 500466)])
def test_a_router_that_forgot_a_speed_or_whose_instance_changed_may_learn_again(name: str, seed: int) -> None:
    result = run_scenario(name, seed)
    assert not result.violation, f"{result.violation}\n{replay_line(name, seed)}"


def test_a_seed_determines_a_run() -> None:
    digests = set()
    for hash_seed in ("0", "1", "4711"):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed}
        digests.add(subprocess.run([sys.executable, "-c", _DIGESTS], env=env, check=True, capture_output=True).stdout)
    assert len(digests) == 1
    assert run_scenario("everything", 0).digest != run_scenario("everything", 1).digest


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("first_seed", "count"),
    [exhaustive(1000, 80), (random.SystemRandom().randrange(1 << 40), 5)],
    ids=["fixed", "fresh"],
)
def test_the_whole_catalogue(first_seed: int, count: int) -> None:
    """Runs the command as a user does, with several processes; the output names a fresh seed that finds a violation."""
    command = ["simulate", "--scenario", "all", "--seed", str(first_seed), "--count", str(count), "--jobs", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "penstock.cli.main", *command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"penstock {' '.join(command)}\n{done.stdout}{done.stderr}"

"""`penstock simulate`: its output and exit codes, and its report of a violation."""

from __future__ import annotations

import pytest

from penstock.cli.main import main
from penstock.core.kv_cache_manager import KVCacheManager
from penstock.core.request import Request
from penstock.router.dispatcher import Dispatcher
from penstock.simulation.scenarios import SCENARIOS
from tests.architecture.sources import ROOT


def test_the_list_has_every_scenario(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(SCENARIOS)
    assert all(len(line.split()) > 4 for line in lines), "a scenario without its origin"


@pytest.mark.long
def test_all_scenarios_with_two_processes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--seed", "7", "--jobs", "2"]) == 0
    several = capsys.readouterr().out
    assert several.startswith(f"{len(SCENARIOS)} worlds, ")
    assert main(["simulate", "--seed", "7"]) == 0
    assert capsys.readouterr().out == several, "the number of processes changes the result"


def test_an_unknown_scenario_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--scenario", "crush"]) == 2
    error = capsys.readouterr().err
    assert "'crush'" in error
    assert "'crash'" in error
    assert "--list" in error


def test_a_pattern_selects_several_scenarios(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--scenario", "tiny_*"]) == 0
    assert capsys.readouterr().out.startswith("1 worlds, ")
    assert main(["simulate", "--scenario", "offload*s*"]) == 0
    expected = sum(name.startswith("offload") and "s" in name[7:] for name in SCENARIOS)
    assert expected > 1
    assert capsys.readouterr().out.startswith(f"{expected} worlds, ")


@pytest.mark.parametrize("option", ["--count", "--jobs"])
def test_counts_below_one_are_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["simulate", option, "0"])
    assert stop.value.code == 2
    assert option in capsys.readouterr().err


def test_a_violation_ends_with_the_command_that_replays_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def publish_too_much(self: KVCacheManager, request: Request) -> tuple[int, int]:
        holding = self._holdings[request.request_id]
        first = holding.num_published
        end = min(request.num_computed_tokens // self.block_size, len(request.block_hashes))
        if self._enable_prefix_caching and end > first:
            self._publish(holding, end, [range(first, end) for _ in holding.tables])
        return first, max(first, end)

    monkeypatch.setattr(KVCacheManager, "publish", publish_too_much)
    assert main(["simulate", "--scenario", "plain", "--count", "20"]) == 1
    *report, replay = capsys.readouterr().out.splitlines()
    assert "is published with wrong KV in layer." in report[0]
    assert 1 < len(report) <= 32
    words = replay.split()
    assert words[:4] == ["penstock", "simulate", "--scenario", "plain"]
    assert main(words[1:]) == 1
    assert capsys.readouterr().out.splitlines() == [*report, replay], "the replay differs"


def test_a_failed_assertion_of_the_router_ends_with_the_command_that_replays_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Dispatcher) -> None:
        raise AssertionError("the counts differ")

    monkeypatch.setattr(Dispatcher, "check_integrity", fail)
    assert main(["simulate", "--scenario", "routing_of_halves", "--seed", "5"]) == 1
    report = capsys.readouterr().out.splitlines()
    assert report[0] == "tick 0: an assertion failed: the counts differ"
    assert report[-1] == "penstock simulate --scenario routing_of_halves --seed 5"


def test_more_processes_than_the_system_allows_are_not_started(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--scenario", "routing_of_halves", "--jobs", str((1 << 63) - 1)]) == 0
    assert capsys.readouterr().out.startswith("1 worlds, ")


def test_the_documentation_has_every_scenario() -> None:
    text = (ROOT / "docs/SIMULATION.md").read_text(encoding="utf-8")
    missing = [name for name in SCENARIOS if f"`{name}`" not in text]
    assert not missing, missing

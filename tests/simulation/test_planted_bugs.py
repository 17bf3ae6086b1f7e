"""The simulation can fail: every planted bug is caught by a scenario, within a bounded number of seeds."""

from __future__ import annotations

import pytest

from penstock.simulation.scenarios import replay_line, run_scenario
from tests.simulation.patches import Bug
from tests.simulation.planted import BUGS, ROUTING_BUGS
from tests.simulation.planted_pd import PD_BUGS

MAX_SEEDS = 60


@pytest.mark.spread(12)
@pytest.mark.parametrize("bug", [*BUGS, *PD_BUGS, *ROUTING_BUGS], ids=lambda bug: bug.name.replace(" ", "_"))
def test_planted_bug_is_caught(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    for patch in bug.patches:
        patch.apply(monkeypatch)
    for seed in range(MAX_SEEDS):
        result = run_scenario(bug.scenario, seed)
        if result.violation:
            print(f"{replay_line(bug.scenario, seed)}: {result.violation}")  # noqa: T201 - the seed is the result
            assert result.trace
            slips = ("NameError", "AttributeError", "TypeError", "UnboundLocalError", "StopIteration", "WireError")
            assert not any(slip in result.violation for slip in slips), "the patch does not run"
            return
    pytest.fail(f"{MAX_SEEDS} seeds of {bug.scenario} do not catch: {bug.name}")

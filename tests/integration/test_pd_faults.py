"""Processes of a disaggregated service are killed, stopped and restarted under load: `bench/pd_faults.py`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.mark.long
@pytest.mark.alone
def test_no_fault_gives_a_wrong_token_or_leaves_anything_behind(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCH / "pd_faults.py"), "--rounds", "12", "--logs", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-3000:]}"
    assert "| all (12 rounds) |" in done.stdout
    assert "Nothing was wrong." in done.stdout


@pytest.mark.parametrize(
    ("tokens", "is_done", "error", "outcome", "may_fail", "is_problem"),
    [
        ([5, 6, 7], True, "", "right", False, False),
        ([5, 6, 8], True, "", "wrong", True, True),
        ([5, 7], False, "", "wrong", True, True),
        ([5, 7], False, "broken", "wrong", True, True),
        ([5, 6], True, "", "wrong", True, True),
        ([5, 6], False, "", "cut", False, True),
        ([5, 6], False, "", "cut", True, False),
        ([], False, "503", "error", False, True),
        ([], False, "503", "error", True, False),
    ],
)
def test_an_answer_is_judged_by_every_token_and_by_its_end(
    monkeypatch: pytest.MonkeyPatch,
    tokens: Sequence[int],
    is_done: bool,
    error: str,
    outcome: str,
    may_fail: bool,
    is_problem: bool,
) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    from pd_faults import Row
    from pd_parts.load import Answer, Case, judge

    found, detail = judge(Case((1, 2), (5, 6, 7)), tokens, is_done, error)
    assert found == outcome
    row = Row("round")
    row.add([Answer(found, 1.0, detail=detail)], may_fail)
    assert bool(row.problems) == is_problem

"""Tests that are long, or run alone, are in files in which the `Makefile` finds their marks."""

from __future__ import annotations

import re

from tests.architecture.sources import ROOT

MARK = re.compile(r"mark\.(alone|long|spread)\b")
# They apply a mark where another one stands in the test's own file.
APPLY_MARKS = {"conftest.py", "grids.py"}


def test_no_helper_marks_the_tests_of_a_file() -> None:
    helpers = {path for path in (ROOT / "tests").rglob("*.py") if not path.name.startswith("test_")}
    assert [path.name for path in helpers if MARK.search(path.read_text()) and path.name not in APPLY_MARKS] == []

"""`--within SECONDS`: what has not begun by then is skipped, and the commit determines where a run begins."""

from __future__ import annotations

import subprocess
import time

import pytest


class Within:
    """The plugin of a run that may not take longer than that by much. Runs of other commits leave out other tests."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until = time.monotonic() + seconds

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if items:
            first = int(commit(), 16) % len(items)
            items[:] = items[first:] + items[:first]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        if time.monotonic() >= self._until:
            pytest.skip(f"the {self._seconds:g} seconds of --within are over")


def commit() -> str:
    """Returns the commit's name, or 0 outside of a repository."""
    found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "0"

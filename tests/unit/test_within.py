"""A test run that is limited by `--within` skips what has not begun in time."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests import within
from tests.within import Within


def test_what_has_not_begun_in_time_is_skipped() -> None:
    Within(1000).pytest_runtest_setup()
    with pytest.raises(pytest.skip.Exception, match="the 0 seconds of --within are over"):
        Within(0).pytest_runtest_setup()


def test_each_commit_begins_elsewhere_and_leaves_out_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, expected in (("0", "abcde"), ("7", "cdeab"), ("f" * 40, "abcde")):
        monkeypatch.setattr(within, "commit", lambda name=name: name)
        items = list("abcde")
        Within(1).pytest_collection_modifyitems(items)  # pyright: ignore[reportArgumentType]
        assert "".join(items) == expected
    Within(1).pytest_collection_modifyitems([])


@pytest.mark.long
def test_the_option() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-m", "not long"]
    for seconds, expected in (("0", "2 skipped"), ("1000", "2 passed")):
        done = subprocess.run([*command, "--within", seconds], capture_output=True, text=True, check=False)
        assert (done.returncode, expected in done.stdout) == (0, True), done.stdout

"""`examples/disaggregation/two_namespaces.sh`: prefill and decode across a network, and the refusals there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "disaggregation" / "two_namespaces.sh"
NO_NAMESPACES = 77


@pytest.mark.long
def test_two_network_namespaces_give_the_answers_of_one_engine() -> None:
    env = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run([str(SCRIPT)], capture_output=True, text=True, check=False, env=env)
    if done.returncode == NO_NAMESPACES:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "(1.0 transferred)" in done.stdout
    assert "set peers" in done.stdout
    assert "not in the list of peers" in done.stdout
    assert "does not belong to this cluster" in done.stdout

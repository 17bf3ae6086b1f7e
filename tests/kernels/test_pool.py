"""How many threads a call uses: `penstock_useful_threads` of `kernels/native/pool.h`."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable

import pytest

from penstock.kernels import native

LONG = 10**9  # nanoseconds
SHORT = 40_000  # worth two threads that are awake, and not always waking one


@pytest.fixture
def useful_threads() -> Callable[..., int]:
    library = native.library()
    if library is None:
        pytest.skip("needs the native kernels")
    return library.common_function("useful_threads", "nn")


def test_long_calls_use_all_threads_and_the_shortest_only_their_own(useful_threads: Callable[..., int]) -> None:
    assert [useful_threads(LONG, threads) for threads in (1, 2, 64)] == [1, 2, 64]
    assert [useful_threads(work, 64) for work in (0, 1_000, 30_000)] == [1, 1, 1]
    assert useful_threads(LONG // 10, 10**6) == LONG // 10 // 16384, "each thread has work for some microseconds"


def test_threads_are_woken_when_calls_in_a_row_have_taken_as_long_alone(useful_threads: Callable[..., int]) -> None:
    found = [useful_threads(SHORT, 2) for _ in range(100)]
    assert set(found) <= {1, 2}
    assert 2 in found, "the calls together are worth it"


def test_calls_that_take_longer_than_estimated_are_in_a_row_too(useful_threads: Callable[..., int]) -> None:
    """A slow machine would never use a second thread if each call alone is worth less than waking one."""
    code = """
        import time
        from penstock.kernels import native

        useful_threads, work = native.library().common_function("useful_threads", "nn"), 60_000
        for _ in range(100):
            print(useful_threads(work, 2))
            end = time.perf_counter_ns() + 3 * work
            while time.perf_counter_ns() < end:
                pass
    """
    # No thread is woken there, so the cost of waking one remains the first estimate.
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, capture_output=True, text=True)
    first, *others = done.stdout.split()
    assert first == "1"
    assert "2" in others

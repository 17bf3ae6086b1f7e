"""How many threads a call uses: `penstock_useful_threads` of `kernels/native/pool.h`."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.kernels import native
from penstock.utils import machine

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


# A call that is worth four threads, also if they have to be woken.
CALL = """
    import os, resource, torch
    from penstock.kernels import native

    gate_up, alone, out = torch.randn(64, 8192), torch.empty(64, 4096), torch.empty(64, 4096)
    silu_and_mul = native.library().function("silu_and_mul", "ppnnni")

    def call(out, threads):
        silu_and_mul(gate_up.data_ptr(), out.data_ptr(), 64, 4096, threads, 0)

    def num_threads():
        return len(os.listdir("/proc/self/task"))

    call(alone, 1)
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    code = textwrap.dedent(CALL) + textwrap.dedent(code)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.skipif(native.library() is None, reason="needs the native kernels")
def test_a_system_that_allows_no_more_threads_ends_no_process() -> None:
    """Memory for a thread's stack is refused here; a limit on threads is not for everyone."""
    done = run("""
        before, limits = num_threads(), resource.getrlimit(resource.RLIMIT_AS)
        pages = int(open("/proc/self/statm").read().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 20), limits[1]))
        call(out, 4)
        call(out, 4)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        useful_threads = native.library().common_function("useful_threads", "nn")
        print(num_threads() - before, useful_threads(10**9, 4), torch.equal(out, alone))
    """)
    assert (done.returncode, done.stdout) == (0, "0 1 True\n"), done.stderr
    assert done.stderr.count("have 1 of 4 threads from now on: the system allows no more") == 1


@pytest.mark.skipif(native.library() is None, reason="needs the native kernels")
def test_a_forked_process_has_threads_of_its_own() -> None:
    done = run("""
        call(out, 4)
        if (child := os.fork()) == 0:
            before = num_threads()
            call(out, 4)
            os._exit(0 if num_threads() > before and torch.equal(out, alone) else 1)
        print(os.waitpid(child, 0)[1])
    """)
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


def test_a_quota_that_cannot_be_read_for_now_fails_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a process has too many open files."""
    for name, value in (("_MOST_THREADS", sys.maxsize), ("_num_threads", 0), ("_num_sharers", 0), ("_next_look", 0.0)):
        monkeypatch.setattr(native, name, value)
    quota = tmp_path / "cpu.max"
    quota.write_text("300000 100000\n")
    monkeypatch.setattr(machine, "CGROUP_QUOTA", quota)
    monkeypatch.setattr(machine, "allowed_cores", lambda: set(range(8)))
    assert native.share_cores(1) == 3
    monkeypatch.setattr(machine, "CGROUP_QUOTA", tmp_path)
    native.look_at_cores()
    assert native.num_threads() == 3
    # Looks follow.
    quota.write_text("200000 100000\n")
    monkeypatch.setattr(machine, "CGROUP_QUOTA", quota)
    monkeypatch.setattr(native, "_next_look", 0.0)
    native.look_at_cores()
    assert native.num_threads() == 2

"""The native library's build and its threads: a compiler's error is not swallowed, and limits are respected."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from penstock import LLM, SamplingParams
from penstock.config.engine import ExecutionConfig
from penstock.kernels import native
from penstock.runner.cpu import parts
from penstock.utils import machine
from tests.architecture.sources import ROOT


def build(folder: Path, compiler: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the build with `compiler` as the first C++ compiler on the path; the sources are copies."""
    shutil.copytree(ROOT / "src/penstock/kernels/native", folder / "src/penstock/kernels/native")
    shutil.copy(ROOT / "setup.py", folder)
    (folder / "bin").mkdir()
    (folder / "bin/c++").write_text(f"#!/bin/sh\n{compiler}\n")
    (folder / "bin/c++").chmod(0o755)
    variables = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", **environment}
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=300)


def test_a_failing_compiler_fails_the_installation(tmp_path: Path) -> None:
    done = build(tmp_path, "echo 'attention.cpp: no such instruction' >&2; exit 1")
    assert done.returncode != 0
    assert "no such instruction" in done.stderr
    assert "PENSTOCK_NATIVE=0" in done.stderr
    assert not list(tmp_path.rglob("libpenstock_native*"))


def test_the_library_can_be_left_out(tmp_path: Path) -> None:
    done = build(tmp_path, "exit 1", PENSTOCK_NATIVE="0")
    assert done.returncode == 0, done.stderr
    assert "10 times slower" in done.stderr + done.stdout


@pytest.mark.parametrize(("quota", "expected"), [("max 100000", 8), ("150000 100000", 2), ("50000 100000", 1)])
def test_threads_respect_the_cgroup(quota: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpu.max").write_text(f"{quota}\n")
    monkeypatch.setattr(native, "_MOST_THREADS", 8)
    monkeypatch.setattr(machine, "allowed_cores", lambda: set(range(16)))
    monkeypatch.setattr(machine, "CGROUP_QUOTA", tmp_path / "cpu.max")
    assert native.default_num_threads() == expected


def test_threads_follow_the_cores_of_a_running_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quota, cores = tmp_path / "cpu.max", set(range(8))
    monkeypatch.setattr(native, "_MOST_THREADS", sys.maxsize)
    monkeypatch.setattr(machine, "allowed_cores", lambda: cores)
    monkeypatch.setattr(machine, "CGROUP_QUOTA", quota)
    llm = LLM(device="cpu", num_gpu_blocks_override=64)
    params = SamplingParams(temperature=0.0, max_tokens=16)

    def answer() -> list[int]:
        monkeypatch.setattr(native, "_next_look", 0.0)
        return llm.generate("Once upon a time", params, use_tqdm=False)[0].outputs[0].token_ids

    expected = answer()
    assert native.num_threads() == 8
    quota.write_text("250000 100000\n")
    assert (answer(), native.num_threads()) == (expected, 3)
    cores.clear()
    cores.update({0, 5})
    assert (answer(), native.num_threads()) == (expected, 2)
    llm.shutdown()
    # A number that was given stays, and so does one within a second.
    native.set_num_threads(1)
    monkeypatch.setattr(native, "_next_look", 0.0)
    native.look_at_cores()
    assert native.num_threads() == 1
    native.share_cores(1)
    native.look_at_cores()
    cores.update(range(6))
    native.look_at_cores()
    assert native.num_threads() == 2
    native.set_num_threads(native.default_num_threads())


@pytest.mark.parametrize(("nodes", "wanted"), [([{0}, {1}], True), ([{0, 1}], False), ([], False)])
def test_an_engine_across_numa_nodes_says_so(
    nodes: list[set[int]], wanted: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(parts, "numa_nodes", lambda: nodes)
    parts.cpu_parts().set_up(ExecutionConfig(num_threads=1), 1)
    assert ("--data-parallel-size 2 runs an engine on each node" in caplog.text) is wanted
    native.set_num_threads(native.default_num_threads())


def test_an_engine_uses_the_configured_number_of_threads() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=16)
    answers: list[list[int]] = []
    for count in (1, 3):
        llm = LLM(device="cpu", num_threads=count, num_gpu_blocks_override=64)
        assert native.num_threads() == count
        answers.append(llm.generate("Once upon a time", params, use_tqdm=False)[0].outputs[0].token_ids)
        llm.shutdown()
    native.set_num_threads(native.default_num_threads())
    assert answers[0] == answers[1]

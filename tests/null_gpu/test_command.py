"""The reports of `bench/null_gpu.py`, and its messages when it cannot run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.null_gpu.library import BENCH, INVALIDATED, LEGACY, OK, UNSUPPORTED, Gpu

pytestmark = pytest.mark.exhaustive


def test_the_engine_core_counts_the_null_gpu(library: Path) -> None:
    # In a process of its own, because the library stays loaded.
    code = "import sys; from penstock.utils.machine import count_gpus; print(count_gpus(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", code, str(library)], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"


def test_a_refusal_is_logged_once_by_name(load: Callable[..., Gpu], capfd: pytest.CaptureFixture[str]) -> None:
    gpu = load()
    stream = gpu.stream()
    for _ in range(3):
        assert gpu.begin(stream) == OK
        assert gpu.cudaDeviceSynchronize() == UNSUPPORTED
        assert gpu.end(stream)[0] == INVALIDATED
    assert gpu.cudaGetLastError() == INVALIDATED
    logged = capfd.readouterr().err
    assert logged.count("cudaDeviceSynchronize refused: cudaErrorStreamCaptureUnsupported (900): ") == 1
    assert logged.count("cudaStreamEndCapture refused: cudaErrorStreamCaptureInvalidated (901): ") == 1
    assert gpu.count("refusals") == 6
    quiet = load(strict=0)
    assert quiet.begin(LEGACY) == UNSUPPORTED
    assert not capfd.readouterr().err


def test_a_process_reports_when_it_ends(library: Path) -> None:
    code = "import ctypes; ctypes.CDLL(None).cudaDeviceSynchronize(); ctypes.CDLL(None).cudaMemset(None, 0, 0)"
    settings = {"LD_PRELOAD": str(library), "NULL_GPU_REPORT": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, check=True)
    assert "kernels 0, " in done.stderr
    assert "device_waits 1 (0." in done.stderr
    idle = [sys.executable, "-c", ""]
    done = subprocess.run(idle, env={**os.environ, **settings}, capture_output=True, text=True, check=True)
    assert not done.stderr


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, str(BENCH / "null_gpu.py"), *arguments]
    return subprocess.run(line, capture_output=True, text=True, check=False)


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch is a CUDA build")
def test_torch_must_be_a_cuda_build() -> None:
    done = command("--", "true")
    assert done.returncode == 1
    assert f"torch {torch.__version__} is not a CUDA build" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [([], "no command"), (["--kernel-us", "-1", "true"], "positive"), (["--memory-gib", "0", "true"], "positive")],
)
def test_bad_arguments_are_named(arguments: list[str], named: str) -> None:
    done = command(*arguments)
    assert done.returncode == 2
    assert named in done.stderr


def test_headers_match_the_major_version_of_torchs_cuda(null_gpu: ModuleType, headers: Any) -> None:
    major = int(headers.version.split(".")[0])
    found = null_gpu.find_headers(major)
    assert found.version.split(".")[0] == str(major)
    with pytest.raises(null_gpu.CannotRunError, match="torch is built with CUDA 99, and the headers here are of"):
        null_gpu.find_headers(99)


def test_a_missing_or_failing_compiler_is_reported(
    null_gpu: ModuleType, headers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(null_gpu.CannotRunError, match="does not compile"):
        null_gpu.build(null_gpu.Headers((tmp_path,), "0.0"), tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(null_gpu.CannotRunError, match="no C compiler"):
        null_gpu.build(headers, tmp_path)


def test_a_real_gpu_or_a_broken_torch_is_refused(null_gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(null_gpu, "PROBE", 'print(\'["2.11.0", "13.0", 1]\')')
    with pytest.raises(null_gpu.CannotRunError, match="a GPU is visible here"):
        null_gpu.look_at_torch()
    monkeypatch.setattr(null_gpu, "PROBE", "raise ImportError('no torch')")
    with pytest.raises(null_gpu.CannotRunError, match="cannot import torch: ImportError: no torch"):
        null_gpu.look_at_torch()


def test_the_library_is_compiled_once_without_warnings(
    null_gpu: ModuleType, headers: Any, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(null_gpu, "FLAGS", (*null_gpu.FLAGS, "-Werror"))
    null_gpu.build(headers, tmp_path)
    monkeypatch.undo()
    made = library.stat().st_mtime_ns
    assert null_gpu.build(headers, library.parents[1]) == library
    assert library.stat().st_mtime_ns == made
    assert (library.parent / "libcuda.so").resolve() == library
    assert [path.name for path in library.parents[1].iterdir()] == [library.parent.name]

"""The null GPU, compiled with the headers that Triton brings, whatever torch is, and loaded beside it.

Nothing here needs a CUDA build of torch.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.null_gpu.library import BENCH, Gpu


@pytest.fixture(scope="session")
def null_gpu() -> ModuleType:
    """bench/null_gpu.py, imported."""
    spec = importlib.util.spec_from_file_location("null_gpu", BENCH / "null_gpu.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["null_gpu"] = module  # its dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def headers(null_gpu: ModuleType) -> Any:
    triton = pytest.importorskip("triton")
    folder = Path(triton.__file__).parent / "backends/nvidia/include"
    return null_gpu.Headers((folder,), null_gpu._header_version(folder))


@pytest.fixture(scope="session")
def library(null_gpu: ModuleType, headers: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return null_gpu.build(headers, tmp_path_factory.mktemp("null-gpu"))


@pytest.fixture
def load(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Gpu]:
    """A null GPU of the test's own: a copy of the library, with settings without their NULL_GPU_."""

    def make(**settings: object) -> Gpu:
        for name, value in settings.items():
            monkeypatch.setenv(f"NULL_GPU_{name.upper()}", str(value))
        copy = tmp_path / f"null-gpu-{len(list(tmp_path.iterdir()))}.so"
        shutil.copy(library, copy)
        return Gpu(copy)

    return make


@pytest.fixture
def gpu(load: Callable[..., Gpu]) -> Gpu:
    """One whose work takes no time."""
    return load()

"""Compiles the null GPU with the CUDA headers that Triton includes, and loads it into the process of the tests.

Nothing here needs a CUDA build of torch.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.null_gpu.library import BENCH, Gpu


@pytest.fixture(scope="session")
def null_gpu() -> ModuleType:
    """Imports bench/null_gpu.py."""
    spec = importlib.util.spec_from_file_location("null_gpu", BENCH / "null_gpu.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["null_gpu"] = module  # where its dataclasses look it up
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
def load(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Gpu]]:
    """Loads a copy of the library for this test; settings are NULL_GPU_ variables, named without the prefix.

    The copies are unloaded afterwards, because they have the name of CUDA's driver: engines of later tests in this
    process would find a GPU.
    """
    loaded: list[Gpu] = []

    def make(**settings: object) -> Gpu:
        for name, value in settings.items():
            monkeypatch.setenv(f"NULL_GPU_{name.upper()}", str(value))
        copy = tmp_path / f"null-gpu-{len(list(tmp_path.iterdir()))}.so"
        shutil.copy(library, copy)
        loaded.append(Gpu(copy))
        return loaded[-1]

    yield make
    for gpu in loaded:
        gpu.unload()


@pytest.fixture
def gpu(load: Callable[..., Gpu]) -> Gpu:
    """A null GPU whose work takes no time."""
    return load()

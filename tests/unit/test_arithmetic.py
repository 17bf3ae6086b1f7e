"""The names of kernels in the KV fingerprint differ whenever the last bits of their results may."""

from __future__ import annotations

import itertools
import os
import runpy
import shutil
import subprocess
import sys
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import setuptools
import torch

from penstock.attention.select import attention_library
from penstock.config.engine import ExecutionConfig
from penstock.kernels import identity, native
from penstock.runner.gpu.parts import arithmetic

_PRINT = "from penstock.kernels.identity import cpu_kernels; print(cpu_kernels())"


def name_in_a_process(**environment: str) -> str:
    variables = {**os.environ, "PENSTOCK_CPU_ISA": "torch", "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(
        [sys.executable, "-c", _PRINT], env=variables, check=True, capture_output=True, text=True, timeout=60
    )
    return done.stdout.strip()


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="torch has one instruction set here")
def test_torchs_kernels_are_named_by_their_instruction_set_and_their_results() -> None:
    usual, other = name_in_a_process(), name_in_a_process(ATEN_CPU_CAPABILITY="default")
    assert usual.startswith(f"torch {torch.__version__} {torch.backends.cpu.get_cpu_capability()} ")
    assert other.startswith(f"torch {torch.__version__} DEFAULT ")
    assert usual.split()[-1] != other.split()[-1], "the results differ, so their digests must"


def test_torchs_kernels_have_the_same_name_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda: None)
    assert identity.cpu_kernels() == identity.cpu_kernels()


def test_another_result_gives_torchs_kernels_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda: None)
    usual, softmax = identity.cpu_kernels(), torch.softmax
    one_bit = torch.tensor(torch.finfo(torch.float32).eps)
    monkeypatch.setattr(torch, "softmax", lambda rows, axis: softmax(rows, axis) * (1 + one_bit))
    assert identity.cpu_kernels() != usual


@pytest.mark.skipif(native.library() is None, reason="the native kernels are not installed")
def test_native_kernels_are_named_by_their_arithmetic_and_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    def name_of(library: native.NativeLibrary) -> str:
        monkeypatch.setattr(native, "library", lambda: library)
        return identity.cpu_kernels()

    names = {isa: name_of(native.library_for(isa)) for isa in native.instruction_sets()}
    for one, other in itertools.combinations(names, 2):
        assert (names[one] == names[other]) == (native.ARITHMETIC[one] == native.ARITHMETIC[other]), names
    changed = native.library_for(next(iter(names)))
    assert name_of(changed) in names.values()
    changed.sources += b"0"
    assert name_of(changed) not in names.values()


@pytest.mark.skipif(native.library() is None, reason="the native kernels are not installed")
@pytest.mark.parametrize("function", ["cos", "sin", "__rpow__"])
def test_another_rotation_gives_native_kernels_another_name(monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    usual, original = identity.cpu_kernels(), getattr(torch.Tensor, function)
    one_bit = 1 + torch.finfo(torch.float32).eps
    monkeypatch.setattr(torch.Tensor, function, lambda *values: original(*values) * one_bit)
    assert identity.cpu_kernels() != usual


def test_sources_are_digested_with_the_options_of_the_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[2]
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    made = runpy.run_path(str(root / "setup.py"))
    digest_sources, compile_native = made["digest_sources"], made["compile_native"]
    folder = Path("src/penstock/kernels/native")
    shutil.copytree(root / folder, tmp_path / folder)
    monkeypatch.chdir(tmp_path)
    names = [digest_sources()]
    for source in (folder / "vec.h", folder / "linear.cpp"):
        source.write_text(source.read_text() + "\n")
        names.append(digest_sources())
    digest_sources.__globals__["COMMON"].append("-ffast-math")
    names.append(digest_sources())
    digest_sources.__globals__["INSTRUCTION_SETS"]["x86_64"]["avx2"].append("-mxop")
    names.append(digest_sources())
    assert len(set(names)) == 5, names
    # What is made of other sources, or for another processor, is compiled again, and nothing else is.
    library, target = folder.with_name("libpenstock_native.so"), tmp_path / "new" / "library.so"
    for name in names:
        library.write_bytes(b"\0" + name.encode() + b"\0")
        with nullcontext() if name == names[-1] else pytest.raises(FileNotFoundError):
            compile_native("no-compiler", target)
        assert target.is_file() == (name == names[-1])
    compile_native("no-compiler", library)
    assert target.read_bytes() == library.read_bytes() == b"\0" + names[-1].encode() + b"\0"
    with pytest.raises(FileNotFoundError):
        compile_native("no-compiler", target, "another machine")


def gpu_name(backend: str = "auto", *, deterministic: bool = False) -> str:
    return arithmetic(torch.device("cpu"), ExecutionConfig(attention_backend=backend, deterministic=deterministic))


def test_a_gpus_kernels_are_named_by_their_sources_and_triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = gpu_name()
    assert gpu_name("triton") == usual, "auto is triton"
    copy = tmp_path / "triton"
    shutil.copytree(identity._TRITON_SOURCES, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(identity, "_TRITON_SOURCES", copy)
    assert gpu_name() == usual
    changed = copy / "attention" / "tiles.py"
    changed.write_text(changed.read_text() + "\n")
    names = {usual, gpu_name(), gpu_name(deterministic=True)}
    monkeypatch.setattr(sys.modules["triton"], "__version__", "3.0")
    names.add(gpu_name())
    assert len(names) == 4, names


def test_attention_is_named_by_its_library_and_release(monkeypatch: pytest.MonkeyPatch) -> None:
    release = {"version": "3.0", "compiled": "a", "python": "b"}

    def distribution(package: str) -> SimpleNamespace:
        files: list[metadata.PackagePath] = []
        for name, value in {"kernels.so": release["compiled"], "py.py": release["python"], "no_hash.so": None}.items():
            files.append(metadata.PackagePath(package, name))
            files[-1].hash = None if value is None else metadata.FileHash(f"sha256={value}")
        return SimpleNamespace(version=release["version"], files=files)

    modules = {"flashinfer": ["flashinfer-python"], "flash_attn_interface": ["flash_attn_3"]}
    monkeypatch.setattr(metadata, "packages_distributions", lambda: modules)
    monkeypatch.setattr(metadata, "distribution", distribution)

    def name_of(backend: str = "flash_attention") -> str:
        return attention_library(ExecutionConfig(attention_backend=backend))

    names = [name_of(), name_of("flashinfer"), name_of("triton")]
    assert names[0].startswith("flash_attention 3.0 ")
    assert names[0] in gpu_name("flash_attention")
    for changed in ({"version": "3.1"}, {"compiled": "c"}):
        release.update(changed)
        names.append(name_of())
    assert len(set(names)) == 5, names
    release["python"] = "d"
    assert name_of() == names[-1]

"""Builds the native CPU kernels: one shared library with a plain C interface, loaded by `penstock.kernels.native`.

Every source in `src/penstock/kernels/native` is compiled once per instruction set, with the macro `ISA` naming the
set, but for `cpu.cpp`, which tells at run time which of them this processor has, `pool.cpp`, the threads, and
`ranks.cpp`, the memory that ranks share. The library links to nothing but the C++ runtime.

A compiler that fails, fails the installation. Without any compiler, or with PENSTOCK_NATIVE=0, the package is installed
without the library and computes with its torch reference kernels, which are about ten times slower.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

NATIVE = Path("src/penstock/kernels/native")
LIBRARY = NATIVE.with_name("libpenstock_native.so")
COMMON = ["-O3", "-std=c++17", "-fPIC", "-pthread", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden"]
# Products and sums are fused where the source says so and nowhere else: a result's bits are not the compiler's choice.
COMMON += ["-ffp-contract=off"]
# gcc 12 takes its own AVX512 intrinsics for uses of uninitialized registers.
COMMON += ["-Wall", "-Wno-maybe-uninitialized"]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]
AVX512_BF16 = [*AVX512, "-mavx512bf16"]
# By what `platform.machine()` calls the processor; any other one has the set `generic`, of portable C++.
INSTRUCTION_SETS = {
    "x86_64": {
        "avx2": AVX2,
        "avx512": AVX512,
        "avx512_bf16": AVX512_BF16,
        "amx": [*AVX512_BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"],
    },
    "aarch64": {"neon": ["-march=armv8-a"], "neon_bf16": ["-march=armv8.2-a+bf16+i8mm"]},
}


class BuildNative(build_ext):
    """Compiles the kernels with the system's C++ compiler, where there is one."""

    def get_ext_filename(self, fullname: str) -> str:
        """The library's plain name: it is no Python module, so it carries no interpreter's suffix."""
        return str(Path(*fullname.split(".")).with_suffix(".so"))

    def run(self) -> None:
        if find_compiler() is None or os.environ.get("PENSTOCK_NATIVE") == "0":
            self.warn("installing without the native CPU kernels: generation will be about 10 times slower on a CPU")
            self.extensions = []
        super().run()

    def build_extension(self, ext: Extension) -> None:
        compiler = find_compiler()
        assert compiler is not None, "see run()"
        try:
            compile_native(compiler, Path(self.get_ext_fullpath(ext.name)))
        except subprocess.CalledProcessError as error:
            raise CompileError(
                f"{compiler} cannot compile the native CPU kernels:\n{error.stderr}\n"
                "Use a newer compiler (g++ 12 and clang++ 16 work), or set PENSTOCK_NATIVE=0 to install without them."
            ) from None

    def get_outputs(self) -> list[str]:
        return []


class PlatformWheel(bdist_wheel):
    """One wheel for every version of Python: the library is plain C and is no extension module."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


def find_compiler() -> str | None:
    return shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


def compile_native(compiler: str, target: Path, machine: str = platform.machine()) -> None:
    """Takes the source tree's library if it was made of the same sources, as when an installation gets extras: pip
    builds each installation in a new folder.
    """
    is_here = machine == platform.machine() and LIBRARY.is_file()
    if is_here and digest_sources().encode() in LIBRARY.read_bytes():
        if target.resolve() != LIBRARY.resolve():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(LIBRARY, target)
        return
    sets = INSTRUCTION_SETS.get(machine, {"generic": []})
    shared = [NATIVE / "cpu.cpp", NATIVE / "pool.cpp", NATIVE / "ranks.cpp"]
    sources = sorted(set(NATIVE.glob("*.cpp")) - set(shared))
    with tempfile.TemporaryDirectory() as scratch:
        named = f'-DPENSTOCK_SOURCES="{digest_sources()}"'
        jobs = [(source, [named], f"{scratch}/{source.stem}.o") for source in shared]
        for isa, flags in sets.items():
            jobs += [(source, [*flags, f"-DISA={isa}"], f"{scratch}/{source.stem}_{isa}.o") for source in sources]
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda job: run([compiler, *COMMON, *job[1], "-c", str(job[0]), "-o", job[2]]), jobs))
        target.parent.mkdir(parents=True, exist_ok=True)
        # Under another name first: a process that starts meanwhile must not load half a library.
        unfinished = target.with_name(f"{target.name}.{os.getpid()}")
        run([compiler, "-shared", "-pthread", *[job[2] for job in jobs], "-o", str(unfinished)])
        unfinished.replace(target)


def digest_sources() -> str:
    """The digest of everything but the processor that the bits of a result depend on."""
    files = sorted([*NATIVE.glob("*.cpp"), *NATIVE.glob("*.h")])
    parts = [part for file in files for part in (file.name.encode(), file.read_bytes())]
    return hashlib.sha256(b"\0".join([*parts, repr((COMMON, INSTRUCTION_SETS)).encode()])).hexdigest()


def run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


setup(
    ext_modules=[Extension("penstock.kernels.libpenstock_native", sources=[])],
    cmdclass={"build_ext": BuildNative, "bdist_wheel": PlatformWheel},
)

"""Loads the native CPU kernels and selects the best instruction set that this processor has.

The library is plain C, called through ctypes with addresses and sizes. `library()` is None if it was not built or the
processor has none of the compiled sets; every wrapper in this folder then uses its torch reference. `PENSTOCK_CPU_ISA`
forces a set (or `torch` for the references): see `penstock.config.env`.

    python -m penstock.kernels.native

prints the available sets, and fails if a compiler is available but the library was not built.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from penstock.config import env
from penstock.utils import logging
from penstock.utils.errors import ConfigError
from penstock.utils.machine import usable_cores

# What determines the bits of a result, by instruction set: sets with the same name compute the same bits. `fma` rounds
# every product and sum to float32, fused where the kernels say so, in the same order however wide the registers are.
ARITHMETIC = {
    "amx": "amx",
    "avx512_bf16": "avx512_bf16",
    "avx512": "fma",
    "avx2": "fma",
    "neon_bf16": "neon_bf16",
    "neon": "fma",
    "generic": "fma",
}
PREFERENCE = tuple(ARITHMETIC)
_WITH_PAIRS = ("amx", "avx512_bf16")
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_TYPES = {"p": ctypes.c_void_p, "n": ctypes.c_int64, "i": ctypes.c_int32, "f": ctypes.c_float}
logger = logging.get_logger(__name__)

_MISSING = (
    "the native CPU kernels are not installed: the torch kernels are about 10 times slower and choose other tokens at "
    "near ties. Install a C++ compiler (apt install g++), then install Penstock again"
)
_UNSUPPORTED = "this processor has none of the native kernels' instruction sets: the torch kernels are about 10x slower"
_LIBRARY_PATH = Path(__file__).with_name("libpenstock_native.so")


# OMP_NUM_THREADS, or the cores that this process may run on: read before anything changes it.
_TORCH_THREADS = torch.get_num_threads()
# A process with fewer threads than cores has been told their number; another may get more cores while it runs.
_MOST_THREADS = _TORCH_THREADS if usable_cores() > _TORCH_THREADS else sys.maxsize
_SECONDS_BETWEEN_LOOKS = 1.0
_num_threads = 0
_num_sharers = 0
_next_look = 0.0


def default_num_threads() -> int:
    """Returns OMP_NUM_THREADS, or the number of cores of this process, limited by its cgroup's quota."""
    return min(_MOST_THREADS, usable_cores())


def num_threads() -> int:
    """Returns the maximum number of threads of this process's kernels."""
    return _num_threads or set_num_threads(default_num_threads())


def set_num_threads(count: int) -> int:
    """Sets the number of threads from the next call on. Results do not depend on it."""
    global _num_threads, _num_sharers
    _num_threads, _num_sharers = count, 0
    return count


def share_cores(num_sharers: int) -> int:
    """Sets the number of threads to this process's share of its cores, and has `look_at_cores` follow it."""
    global _num_sharers
    count = set_num_threads(max(1, default_num_threads() // num_sharers))
    _num_sharers = num_sharers
    return count


def look_at_cores() -> None:
    """Follows changes of the process's affinity and of its cgroup's quota, after `share_cores`. Looks once a second."""
    global _next_look
    now = time.monotonic()
    if not _num_sharers or now < _next_look:
        return
    _next_look, before = now + _SECONDS_BETWEEN_LOOKS, _num_threads
    # Too many open files, for one, are no reason to fail a step: the threads remain as they are until the next look.
    with contextlib.suppress(OSError):
        if (count := share_cores(_num_sharers)) != before:
            logger.info("The kernels use %d threads from now on, not %d: this process's cores changed", count, before)


class CallRecorder(Protocol):
    def add(self, library: NativeLibrary, name: str, arguments: str, values: Sequence[Any]) -> None:
        """Called before a function is called: its full name, the letters of its arguments, and their values."""
        ...


class _Thread(threading.local):
    recorder: CallRecorder | None = None


_thread = _Thread()


@contextlib.contextmanager
def recorded_by(recorder: CallRecorder) -> Iterator[None]:
    """Tells the recorder of every call of this thread."""
    assert _thread.recorder is None, "calls are being recorded already"
    _thread.recorder = recorder
    try:
        yield
    finally:
        _thread.recorder = None


class NativeLibrary:
    """The loaded library bound to one instruction set."""

    def __init__(self, handle: ctypes.CDLL, isa: str) -> None:
        self.isa = isa
        self.arithmetic = ARITHMETIC[isa]
        self.has_pairs = isa in _WITH_PAIRS  # products of pairs of bfloat16: see `kernels.kv_rows`
        self.path = _LIBRARY_PATH
        # The digest of the sources and options of the compiler.
        self.sources: bytes = handle.penstock_sources()
        self._handle = handle
        self._functions: dict[str, Callable[..., Any]] = {}

    def function(self, name: str, arguments: str, result: str | None = None) -> Callable[..., Any]:
        """Returns the C function `penstock_<name>_<isa>`.

        `arguments` has a letter for each: p is a pointer, n an int64, i an int32, f a float; `result` is one, or None.
        ctypes releases the GIL during the call; pass tensors as `tensor.data_ptr()`.
        """
        return self._declare(f"{name}_{self.isa}", arguments, result)

    def common_function(self, name: str, arguments: str) -> Callable[..., int]:
        """Does the same for `penstock_<name>`, compiled once for all instruction sets, which returns an int32."""
        return self._declare(name, arguments, "i")

    def recordable(self, name: str) -> int | None:
        """Returns the address of the form of `penstock_<name>`, a full name, that takes its arguments from an array."""
        function = getattr(self._handle, f"penstock_{name.removesuffix(f'_{self.isa}')}_recorded_{self.isa}", None)
        return ctypes.cast(function, ctypes.c_void_p).value if function is not None else None

    def _declare(self, name: str, arguments: str, result: str | None) -> Callable[..., Any]:
        if name not in self._functions:
            function = getattr(self._handle, f"penstock_{name}")
            function.argtypes = [_TYPES[letter] for letter in arguments]
            function.restype = result and _TYPES[result]

            def call(*values: Any) -> Any:
                if _thread.recorder is not None:
                    _thread.recorder.add(self, name, arguments, values)
                return function(*values)

            self._functions[name] = call
        return self._functions[name]


@functools.cache
def library() -> NativeLibrary | None:
    """Returns the library with the set that this process uses, or None for the torch references.

    Raises `ConfigError` if `PENSTOCK_CPU_ISA` forces a set that is not available.
    """
    forced = env.cpu_isa()
    if forced in ("torch", "triton"):
        return None
    sets = instruction_sets()
    if forced and forced not in sets:
        raise ConfigError(
            f"PENSTOCK_CPU_ISA={forced} is not available here; choose one of: {', '.join(('torch', 'triton', *sets))}"
        )
    if not sets:
        logger.warning(_UNSUPPORTED if _LIBRARY_PATH.exists() else _MISSING)
        return None
    return library_for(forced or sets[0])


def library_for(isa: str) -> NativeLibrary:
    """Returns the library with one of `instruction_sets()`, whatever this process uses."""
    handle = _handle()
    assert handle is not None and isa in instruction_sets(), f"{isa} is not among {instruction_sets()}"
    return NativeLibrary(handle, isa)


@functools.cache
def instruction_sets() -> tuple[str, ...]:
    """Returns the compiled sets that this processor supports, best first; empty if the library was not built."""
    handle = _handle()
    if handle is None:
        return ()
    compiled = [isa for isa in PREFERENCE if hasattr(handle, f"penstock_linear_{isa}")]
    return tuple(isa for isa in compiled if handle.penstock_supports(isa.encode()))


@functools.cache
def _handle() -> ctypes.CDLL | None:
    if not _LIBRARY_PATH.exists():
        return None
    handle = ctypes.CDLL(str(_LIBRARY_PATH))
    handle.penstock_sources.restype = ctypes.c_char_p
    return handle


def main() -> int:
    if _LIBRARY_PATH.exists():
        sys.stdout.write(f"native kernels: {', '.join(instruction_sets()) or 'none that this processor can run'}\n")
        return 0
    sys.stderr.write(f"{_MISSING}\n")
    return 1 if shutil.which("c++") or shutil.which("g++") or shutil.which("clang++") else 0


if __name__ == "__main__":
    sys.exit(main())

"""The compiled null GPU as an object, CUDA's error numbers and constants, and helpers of the tests."""

from __future__ import annotations

import _ctypes
import ctypes
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BENCH = Path(__file__).parents[2] / "bench"
PAGE = 2 << 20  # bytes
MS = 1_000_000  # ns
LONG_MS = 500  # duration of a kernel that is still running when the next line queries it

OK, INVALID_VALUE, OUT_OF_MEMORY, INVALID_CONFIGURATION = 0, 1, 2, 9
INVALID_HANDLE, ILLEGAL_STATE, NOT_READY = 400, 401, 600
UNSUPPORTED, INVALIDATED, MERGE, UNMATCHED, UNJOINED = 900, 901, 902, 903, 904
ISOLATION, IMPLICIT, CAPTURED_EVENT, WRONG_THREAD = 905, 906, 907, 908
GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2
TO_DEVICE, TO_HOST, WITHIN_DEVICE = 1, 2, 3
LEGACY = None


class Attributes(ctypes.Structure):
    """cudaPointerAttributes, with space for the fields of later versions."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("device", ctypes.c_int),
        ("device_pointer", ctypes.c_void_p),
        ("host_pointer", ctypes.c_void_p),
        ("reserved", ctypes.c_long * 16),
    )


class Gpu:
    """Calls the library's functions by name, which return CUDA's error numbers, and has shortcuts for the tests."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))

    def unload(self) -> None:
        _ctypes.dlclose(self._library._handle)

    def __getattr__(self, name: str) -> Callable[..., int]:
        function = getattr(self._library, name)

        def call(*arguments: Any) -> int:
            # ctypes would truncate Python's integers to 32 bits.
            wide = [ctypes.c_void_p(a) if isinstance(a, int) and not isinstance(a, bool) else a for a in arguments]
            return function(*wide)

        return call

    def count(self, name: str) -> int:
        counter = self._library.null_gpu_count
        counter.restype = ctypes.c_int64
        return counter(name.encode())

    def _create(self, name: str, *arguments: Any) -> int:
        created = ctypes.c_void_p()
        assert getattr(self, name)(ctypes.byref(created), *arguments) == OK
        return created.value or 0

    def device_memory(self, size: int) -> int:
        return self._create("cudaMalloc", size)

    def pinned_memory(self, size: int) -> int:
        return self._create("cudaHostAlloc", size, 0)

    def free_bytes(self) -> int:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        assert self.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total)) == OK
        return free.value

    def stream(self, *, is_blocking: bool = False) -> int:
        return self._create("cudaStreamCreateWithFlags", 0 if is_blocking else 1)

    def event(self) -> int:
        return self._create("cudaEventCreate")

    def launch(self, stream: int | None, grid: int = 1) -> int:
        return self.cuLaunchKernel(8, grid, 1, 1, 32, 1, 1, 0, stream, None, None)

    def begin(self, stream: int | None, mode: int = GLOBAL) -> int:
        return self.cudaStreamBeginCapture(stream, mode)

    def end(self, stream: int | None) -> tuple[int, int]:
        """Ends the capture; returns (error, graph)."""
        graph = ctypes.c_void_p(8)
        error = self.cudaStreamEndCapture(stream, ctypes.byref(graph))
        return error, graph.value or 0

    def executable(self, graph: int) -> int:
        return self._create("cudaGraphInstantiateWithFlags", graph, 0)

    def graph(self, stream: int, num_nodes: int) -> int:
        assert self.begin(stream) == OK
        for _ in range(num_nodes):
            assert self.launch(stream) == OK
        error, graph = self.end(stream)
        assert error == OK
        return self.executable(graph)

    def thread_mode(self, mode: int) -> int:
        """Sets this thread's capture mode and returns the previous one."""
        value = ctypes.c_int(mode)
        assert self.cudaThreadExchangeStreamCaptureMode(ctypes.byref(value)) == OK
        return value.value


def milliseconds_of(function: Callable[[], object]) -> float:
    began = time.perf_counter()
    function()
    return 1e3 * (time.perf_counter() - began)


def in_thread(function: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]

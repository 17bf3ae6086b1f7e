"""Copies between memory that this process has mapped, without blocking other threads.

A copy by `memmove` releases the GIL and acquires it again, which is too expensive for a small run: beside a busy thread
it may take milliseconds each time. Small runs are copied up to 1024 at once, by `process_vm_readv` from this process
itself, if the system allows it. (64 MB in runs of 4 KB: 27 ms, by `memmove` 43 ms; in runs of 64 KB and more `memmove`
is faster.)
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator

import numpy as np

_MAX_RUNS = 1024  # in one system call (IOV_MAX)
_SMALL_BYTES = 32 << 10
_PIECE_BYTES = 8 << 20

_process_vm_readv = getattr(ctypes.CDLL(None), "process_vm_readv", None)
if _process_vm_readv is not None:
    _count = ctypes.c_ulong
    _process_vm_readv.argtypes = (ctypes.c_int, ctypes.c_void_p, _count, ctypes.c_void_p, _count, _count)
    _process_vm_readv.restype = ctypes.c_ssize_t


def copy_in_pieces(runs: np.ndarray) -> Iterator[None]:
    """Copies runs, [n, 3] int64 of destination address, source address, bytes. Yields between pieces of limited size.

    The memory must be mapped, and no run may overlap another's destination.
    """
    for first in range(0, len(runs), _MAX_RUNS):
        some = runs[first : first + _MAX_RUNS]
        if some[:, 2].sum() > len(some) * _SMALL_BYTES or not _copy_at_once(some):
            yield from _copy_each(some)
        yield


def _copy_at_once(runs: np.ndarray) -> bool:
    """Copies all runs in one system call. Returns False if the system does not allow it."""
    if _process_vm_readv is None:
        return False
    into, source = np.ascontiguousarray(runs[:, [0, 2]]), np.ascontiguousarray(runs[:, 1:])
    count = len(runs)
    copied = _process_vm_readv(os.getpid(), into.ctypes.data, count, source.ctypes.data, count, 0)
    return copied == runs[:, 2].sum()


def _copy_each(runs: np.ndarray) -> Iterator[None]:
    for into, source, num_bytes in runs.tolist():
        for done in range(0, num_bytes, _PIECE_BYTES):
            ctypes.memmove(into + done, source + done, min(_PIECE_BYTES, num_bytes - done))
            yield

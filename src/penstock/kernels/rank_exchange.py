"""Exchange between ranks through shared memory: gathers of columns, barriers and byte streams, including the waiting.

All functions work on addresses in one memory that every rank maps, whose layout `penstock.parallel.rank_memory` defines
and which is initially zero. They return a status and raise nothing. A wait returns PENDING after at most a tenth of a
second; `wait`, or repeating the call of `write` or `read`, continues it. The GIL is released meanwhile.

The reference follows the same protocol with separate words in the same memory, so all ranks of an engine must use the
same implementation: the native one and the reference are not interoperable.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import time
from collections.abc import Callable

import torch

from penstock.kernels.native import library

DONE, PENDING, LOST, DISAGREE = range(4)

_SLICE_S = 0.1
_CHUNK = 256 << 10
_GATHER = "ppnnnpn"  # arguments of the native function
_SHORTEST_NAP_S, _LONGEST_NAP_S = 20e-6, 1e-3

# Offsets in a group's and in a channel's control block, as in native/ranks.cpp; ARRIVALS is the reference's.
_GROUP_LEFT, _ARRIVALS, _ARRIVAL_BYTES = 384, 512, 128
_WRITTEN, _READ, _CHANNEL_LEFT = 0, 128, 512


class GroupSeat(ctypes.Structure):
    """One rank's place in a group. `calls` counts its calls; all ranks make the same calls."""

    _fields_ = (
        ("aborted", ctypes.c_void_p),
        ("control", ctypes.c_void_p),
        ("spin_nanoseconds", ctypes.c_int64),
        ("index", ctypes.c_uint32),
        ("count", ctypes.c_uint32),
        ("calls", ctypes.c_uint32),
    )


class ChannelEnd(ctypes.Structure):
    """One side of a byte stream. `size` is the ring's, a power of two."""

    _fields_ = (
        ("aborted", ctypes.c_void_p),
        ("control", ctypes.c_void_p),
        ("spin_nanoseconds", ctypes.c_int64),
        ("ring", ctypes.c_void_p),
        ("size", ctypes.c_uint32),
    )


class Pieces:
    """Bytes of several tensors that are written as one stream, and how many of them have been written."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        """`tensors` are contiguous, and are kept alive by this object."""
        count = len(tensors)
        self.tensors = tensors
        self.addresses = (ctypes.c_void_p * count)(*[tensor.data_ptr() for tensor in tensors])
        self.sizes = (ctypes.c_int64 * count)(*[tensor.nbytes for tensor in tensors])
        self.done = ctypes.c_int64(0)


def gather(seat: GroupSeat, part: torch.Tensor, out: torch.Tensor, first_column: int) -> int:
    """part [T, n] becomes columns [first_column, first_column + n) of `out` [T, N], which all ranks share.

    DONE: every rank has written its columns. DISAGREE: the ranks' shapes differ, which is a bug.
    """
    assert part.dim() == 2 and out.dim() == 2 and part.dtype == out.dtype, f"{part.dtype} into {out.dtype}"
    assert part.is_cpu and out.is_contiguous() and part.shape[0] == out.shape[0], f"{part.shape} into {out.shape}"
    assert 0 <= first_column <= out.shape[1] - part.shape[1], f"columns {first_column} + {part.shape[1]} of {out.shape}"
    if part.shape[1] > 1 and part.stride(1) != 1:
        part = part.contiguous()
    native = library()
    if native is None:
        out[:, first_column : first_column + part.shape[1]] = part
        return _arrive(seat, _shape(out))
    element, (rows, columns) = part.element_size(), part.shape
    address, row_bytes = out.data_ptr() + first_column * element, out.shape[1] * element
    run, stride = native.common_function("group_gather", _GATHER), part.stride(0) * element
    return run(ctypes.byref(seat), part.data_ptr(), rows, columns * element, stride, address, row_bytes)


def barrier(seat: GroupSeat) -> int:
    """Returns DONE when every rank has called this."""
    native = library()
    if native is None:
        return _arrive(seat, 0)
    return native.common_function("group_gather", _GATHER)(ctypes.byref(seat), None, 0, 0, 0, None, 0)


def wait(seat: GroupSeat) -> int:
    """Continues a gather or a barrier that was PENDING."""
    native = library()
    return _wait_for_arrivals(seat) if native is None else native.common_function("group_wait", "p")(ctypes.byref(seat))


def write(end: ChannelEnd, pieces: Pieces) -> int:
    """Appends all pieces, from `pieces.done` on. It waits only while the ring is full."""
    native = library()
    if native is None:
        return _write_reference(end, pieces)
    addresses, sizes, done = pieces.addresses, pieces.sizes, ctypes.byref(pieces.done)
    return native.common_function("channel_write", "pppnp")(ctypes.byref(end), addresses, sizes, len(sizes), done)


def read(end: ChannelEnd, data: torch.Tensor, done: ctypes.c_int64) -> int:
    """Fills `data`, from byte `done` on."""
    assert data.is_contiguous() and data.is_cpu, f"{tuple(data.shape)} with strides {data.stride()} on {data.device}"
    native = library()
    if native is None:
        return _read_reference(end, data, done)
    return native.common_function("channel_read", "ppnp")(
        ctypes.byref(end), data.data_ptr(), data.nbytes, ctypes.byref(done)
    )


def has_begun(end: ChannelEnd) -> bool:
    """Whether there is data to read."""
    return _word(end.control, _WRITTEN).value != _word(end.control, _READ).value


def leave_group(seat: GroupSeat) -> None:
    """From now on, waits of other ranks for this one return LOST."""
    _word(seat.control, _GROUP_LEFT).value = 1


def leave_channel(end: ChannelEnd) -> None:
    """Like `leave_group`; data already written can still be read."""
    _word(end.control, _CHANNEL_LEFT).value = 1


def _word(address: int, offset: int) -> ctypes.c_uint32:
    return ctypes.c_uint32.from_address(address + offset)


_fences = threading.local()


def _fence() -> None:
    """Orders this thread's earlier writes before its later ones, on processors that do not do so by themselves."""
    lock = _fences.__dict__.setdefault("lock", threading.Lock())
    for _ in range(2):
        with lock:
            pass


def _wait_until(ready: Callable[[], bool], aborted: int, left: ctypes.c_uint32) -> int:
    end, nap = time.monotonic() + _SLICE_S, _SHORTEST_NAP_S
    while True:
        lost = _word(aborted, 0).value or left.value
        if ready():
            _fence()
            return DONE
        if lost:
            return LOST
        if time.monotonic() >= end:
            return PENDING
        _naps().wait(nap)
        nap = min(2 * nap, _LONGEST_NAP_S)


@functools.cache
def _naps() -> threading.Event:
    """Returns an event that is never set: waiting for it sleeps."""
    return threading.Event()


def _shape(out: torch.Tensor) -> int:
    return (out.shape[0] * 0x9E3779B1 + out.shape[1] * out.element_size()) % 2**32


def _arrival(seat: GroupSeat, rank: int) -> tuple[ctypes.c_uint32, ctypes.c_uint32]:
    """Returns a rank's number of calls, and the shape of the current one. Two slots alternate: a rank is in call k + 2
    only if all have begun call k + 1, and so have compared the shapes of call k.
    """
    start = _ARRIVALS + rank * _ARRIVAL_BYTES
    return _word(seat.control, start), _word(seat.control, start + 4 + seat.calls % 2 * 4)


def _arrive(seat: GroupSeat, shape: int) -> int:
    if _word(seat.aborted, 0).value:
        return LOST
    seat.calls += 1
    calls, own_shape = _arrival(seat, seat.index)
    own_shape.value = shape
    _fence()
    calls.value = seat.calls
    return _wait_for_arrivals(seat)


def _wait_for_arrivals(seat: GroupSeat) -> int:
    ranks = [_arrival(seat, rank) for rank in range(seat.count)]
    # Numbers of calls are modulo 2^32: ranks that have arrived have this rank's number, or one more.
    ready = lambda: all((calls.value - seat.calls) % 2**32 <= 1 for calls, _ in ranks)  # noqa: E731
    status = _wait_until(ready, seat.aborted, _word(seat.control, _GROUP_LEFT))
    if status == DONE and len({shape.value for _, shape in ranks}) > 1:
        return DISAGREE
    return status


def _spans(end: ChannelEnd, position: int, count: int) -> list[tuple[int, int]]:
    """Returns addresses and sizes of `count` bytes of the ring."""
    start = position % end.size
    first = min(count, end.size - start)
    return [(end.ring + start, first), (end.ring, count - first)]


def _write_reference(end: ChannelEnd, pieces: Pieces) -> int:
    if _word(end.aborted, 0).value:
        return LOST
    written, taken = _word(end.control, _WRITTEN), _word(end.control, _READ)
    begin = 0
    for address, size in zip(pieces.addresses, pieces.sizes, strict=True):
        while pieces.done.value < begin + size:
            room = end.size - (written.value - taken.value) % 2**32
            if room == 0:
                ready = lambda: (written.value - taken.value) % 2**32 < end.size  # noqa: E731
                status = _wait_until(ready, end.aborted, _word(end.control, _CHANNEL_LEFT))
                if status != DONE:
                    return status
                continue
            offset = pieces.done.value - begin
            count = min(room, size - offset, _CHUNK)
            for target, length in _spans(end, written.value, count):
                ctypes.memmove(target, (address or 0) + offset, length)
                offset += length
            _fence()
            written.value += count
            pieces.done.value += count
        begin += size
    return DONE


def _read_reference(end: ChannelEnd, data: torch.Tensor, done: ctypes.c_int64) -> int:
    if _word(end.aborted, 0).value:
        return LOST
    written, taken = _word(end.control, _WRITTEN), _word(end.control, _READ)
    while done.value < data.nbytes:
        available = (written.value - taken.value) % 2**32
        if available == 0:
            ready = lambda: written.value != taken.value  # noqa: E731
            status = _wait_until(ready, end.aborted, _word(end.control, _CHANNEL_LEFT))
            if status != DONE:
                return status
            continue
        count = min(available, data.nbytes - done.value, _CHUNK)
        for source, length in _spans(end, taken.value, count):
            ctypes.memmove(data.data_ptr() + done.value, source, length)
            done.value += length
        _fence()
        taken.value += count
    return DONE

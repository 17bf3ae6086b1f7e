"""Allocations, attributes of pointers, and copies."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable

import pytest

from tests.null_gpu.library import (
    INVALID_VALUE,
    OK,
    OUT_OF_MEMORY,
    PAGE,
    TO_DEVICE,
    TO_HOST,
    WITHIN_DEVICE,
    Attributes,
    Gpu,
)

pytestmark = pytest.mark.exhaustive


def test_allocations_reduce_the_free_memory_until_they_are_freed(load: Callable[..., Gpu]) -> None:
    gpu = load(memory_gib=1)
    assert gpu.free_bytes() == 1 << 30
    small, large = gpu.device_memory(1), gpu.device_memory(3 * PAGE + 1)
    gpu.pinned_memory(PAGE)
    assert gpu.free_bytes() == (1 << 30) - 5 * PAGE
    assert gpu.cudaMalloc(ctypes.byref(ctypes.c_void_p()), 1 << 30) == OUT_OF_MEMORY
    assert gpu.cudaMalloc(ctypes.byref(ctypes.c_void_p()), 1 << 63) == OUT_OF_MEMORY
    assert gpu.cudaFree(large) == OK
    assert gpu.cudaFree(small) == OK
    assert gpu.free_bytes() == 1 << 30


def test_memory_is_freed_once_and_by_the_matching_call(gpu: Gpu) -> None:
    device, pinned = gpu.device_memory(PAGE), gpu.pinned_memory(PAGE)
    assert gpu.cudaFree(None) == OK
    assert gpu.cudaFree(pinned) == INVALID_VALUE
    assert gpu.cudaFree(device + 512) == INVALID_VALUE
    assert gpu.cudaFree(device) == OK
    assert gpu.cudaFree(device) == INVALID_VALUE
    assert gpu.cudaFreeHost(pinned) == OK


def test_attributes_tell_the_kind_of_memory_of_a_pointer(gpu: Gpu) -> None:
    def attributes(pointer: int) -> Attributes:
        found = Attributes()
        assert gpu.cudaPointerGetAttributes(ctypes.byref(found), pointer) == OK
        return found

    device, pinned = gpu.device_memory(PAGE), gpu.pinned_memory(4096)
    room = ctypes.create_string_buffer(4096)
    pageable = ctypes.addressof(room)
    last = attributes(device + PAGE - 1)
    assert (last.type, last.device_pointer, last.host_pointer) == (2, device + PAGE - 1, None)
    inside = attributes(pinned + 100)
    assert (inside.type, inside.device_pointer, inside.host_pointer) == (1, pinned + 100, pinned + 100)
    assert attributes(pageable).type == 0
    assert gpu.cudaHostRegister(pageable, 4096, 0) == OK
    assert gpu.cudaHostRegister(pageable + 1, 1, 0) == 712  # registered already
    assert attributes(pageable + 4095).type == 1
    assert gpu.cudaHostUnregister(pageable) == OK
    assert attributes(pageable).type == 0
    assert gpu.cudaHostUnregister(pageable) == 713  # not registered


def test_every_allocation_is_found_among_many(gpu: Gpu) -> None:
    rng = random.Random(0)
    allocations = [gpu.device_memory(PAGE * rng.randint(1, 3)) for _ in range(300)]
    rng.shuffle(allocations)
    freed, left = allocations[:150], allocations[150:]
    assert all(gpu.cudaFree(allocation) == OK for allocation in freed)
    value = ctypes.c_uint64()
    for allocation in left:
        assert gpu.cuPointerGetAttribute(ctypes.byref(value), 3, allocation + rng.randrange(PAGE)) == OK
    assert all(gpu.cuPointerGetAttribute(ctypes.byref(value), 3, allocation) == INVALID_VALUE for allocation in freed)


def test_copies_move_bytes_within_their_allocations_only(gpu: Gpu) -> None:
    stream, first, second = gpu.stream(), gpu.device_memory(PAGE), gpu.device_memory(PAGE)
    text = ctypes.create_string_buffer(b"bytes", 5)
    back = ctypes.create_string_buffer(5)
    at, back_at = ctypes.addressof(text), ctypes.addressof(back)
    assert gpu.cudaMemcpyAsync(first, at, 5, TO_DEVICE, stream) == OK
    assert gpu.cudaMemcpyAsync(second + PAGE - 5, first, 5, WITHIN_DEVICE, stream) == OK
    assert gpu.cudaMemcpyAsync(back_at, second + PAGE - 5, 5, TO_HOST, stream) == OK
    assert back.raw == b"bytes"
    assert gpu.cudaMemcpyAsync(second + PAGE - 4, first, 5, WITHIN_DEVICE, stream) == INVALID_VALUE
    assert gpu.cudaMemcpyAsync(at, first, 5, TO_DEVICE, stream) == INVALID_VALUE
    assert gpu.cudaFree(first) == OK
    assert gpu.cudaMemcpyAsync(back_at, first, 5, TO_HOST, stream) == INVALID_VALUE
    assert gpu.cudaMemset(second, 7, PAGE) == OK
    assert gpu.cudaMemcpy(back_at, second, 5, TO_HOST) == OK
    assert back.raw == bytes([7] * 5)

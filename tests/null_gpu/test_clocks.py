"""Streams, events and the waits between them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest

from tests.null_gpu.library import (
    INVALID_HANDLE,
    LEGACY,
    LONG_MS,
    MS,
    NOT_READY,
    OK,
    PAGE,
    TO_DEVICE,
    TO_HOST,
    WITHIN_DEVICE,
    Gpu,
    milliseconds_of,
)

pytestmark = pytest.mark.exhaustive


def test_a_wait_takes_as_long_as_the_work_before_it(load: Callable[..., Gpu]) -> None:
    gpu = load(kernel_ns=2 * MS)
    first, second, event = gpu.stream(), gpu.stream(), gpu.event()

    def run() -> None:
        assert gpu.launch(first) == OK
        assert gpu.cudaEventRecord(event, first) == OK
        assert gpu.cudaStreamWaitEvent(second, event, 0) == OK
        assert gpu.cudaStreamSynchronize(second) == OK

    assert milliseconds_of(run) >= 2
    assert gpu.cudaStreamQuery(first) == OK
    assert gpu.count("stream_waits") == 1
    assert gpu.count("kernels") == 1


def test_streams_run_concurrently_and_the_work_of_one_adds_up(load: Callable[..., Gpu]) -> None:
    gpu = load(kernel_ns=2 * MS)
    streams, start, end = [gpu.stream() for _ in range(4)], gpu.event(), gpu.event()
    assert gpu.cudaEventRecord(start, streams[0]) == OK
    for stream in streams * 3:
        assert gpu.launch(stream) == OK
    assert gpu.cudaEventRecord(end, streams[0]) == OK
    elapsed = ctypes.c_float()
    assert gpu.cudaEventElapsedTime(ctypes.byref(elapsed), start, end) == NOT_READY
    assert gpu.cudaEventSynchronize(end) == OK
    assert gpu.cudaEventElapsedTime(ctypes.byref(elapsed), start, end) == OK
    assert elapsed.value >= 6 - 1e-3


def test_waiting_for_an_unrecorded_event_returns_at_once(load: Callable[..., Gpu]) -> None:
    gpu = load(kernel_ns=LONG_MS * MS)
    busy, other, event = gpu.stream(), gpu.stream(), gpu.event()
    assert gpu.launch(busy) == OK
    assert gpu.cudaStreamQuery(busy) == NOT_READY
    assert gpu.cudaGetLastError() == NOT_READY
    assert gpu.cudaGetLastError() == OK
    assert gpu.cudaStreamWaitEvent(other, event, 0) == OK
    assert gpu.cudaStreamQuery(other) == OK
    assert gpu.cudaEventQuery(event) == OK
    assert gpu.cudaEventSynchronize(event) == OK
    assert gpu.cudaStreamQuery(busy) == NOT_READY


def test_synchronising_the_device_waits_for_destroyed_streams_too(load: Callable[..., Gpu]) -> None:
    gpu = load(kernel_ns=5 * MS)
    stream = gpu.stream()

    def run() -> None:
        assert gpu.launch(stream) == OK
        assert gpu.cudaStreamDestroy(stream) == OK
        assert gpu.cudaDeviceSynchronize() == OK

    assert milliseconds_of(run) >= 5
    assert gpu.launch(stream) == INVALID_HANDLE
    assert gpu.cudaStreamDestroy(stream) == INVALID_HANDLE


def test_the_legacy_stream_waits_for_blocking_streams_only(load: Callable[..., Gpu]) -> None:
    gpu = load(kernel_ns=LONG_MS * MS)
    free, blocking = gpu.stream(), gpu.stream(is_blocking=True)
    assert gpu.launch(free) == OK
    assert gpu.cudaStreamQuery(LEGACY) == OK
    assert gpu.launch(blocking) == OK
    assert gpu.cudaStreamQuery(LEGACY) == NOT_READY
    # Blocking streams wait for the legacy stream.
    other, event = gpu.stream(is_blocking=True), gpu.event()
    assert gpu.cudaStreamQuery(other) == OK
    assert gpu.launch(LEGACY) == OK
    assert gpu.cudaEventRecord(event, other) == OK
    assert gpu.cudaEventQuery(event) == NOT_READY


def test_a_copy_into_pageable_memory_is_synchronous(load: Callable[..., Gpu]) -> None:
    gpu = load(kernel_ns=2 * MS)
    stream, device, pinned = gpu.stream(), gpu.device_memory(PAGE), gpu.pinned_memory(4096)
    room = ctypes.create_string_buffer(4096)
    pageable = ctypes.addressof(room)
    assert gpu.cudaMemcpyAsync(pinned, device, 4096, TO_HOST, stream) == OK
    assert gpu.cudaMemcpyAsync(device, pageable, 4096, TO_DEVICE, stream) == OK
    assert gpu.count("copy_waits") == 0
    copy = lambda: gpu.cudaMemcpyAsync(pageable, device, 4096, TO_HOST, stream)  # noqa: E731
    assert milliseconds_of(copy) >= 2
    assert gpu.count("copy_waits") == 1
    assert gpu.cudaStreamQuery(stream) == OK


def test_copies_between_host_and_device_take_the_configured_time(load: Callable[..., Gpu]) -> None:
    gpu = load(copy_gb_s=1)
    stream, device, pinned = gpu.stream(), gpu.device_memory(4 * PAGE), gpu.pinned_memory(2 * PAGE)

    def run() -> None:
        assert gpu.cudaMemcpyAsync(device, pinned, 2 * PAGE, TO_DEVICE, stream) == OK
        assert gpu.cudaStreamSynchronize(stream) == OK

    assert milliseconds_of(run) >= 2 * PAGE / MS
    assert gpu.cudaMemcpyAsync(device, device + 2 * PAGE, 2 * PAGE, WITHIN_DEVICE, stream) == OK
    assert gpu.cudaStreamQuery(stream) == OK


def test_free_waits_for_all_streams(load: Callable[..., Gpu]) -> None:
    gpu = load(kernel_ns=2 * MS)
    memory, stream = gpu.device_memory(PAGE), gpu.stream()

    def run() -> None:
        assert gpu.launch(stream) == OK
        assert gpu.cudaFree(memory) == OK

    assert milliseconds_of(run) >= 2
    assert gpu.count("free_waits") == 1

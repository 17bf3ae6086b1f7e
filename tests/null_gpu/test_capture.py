"""Calls that CUDA forbids while a stream is captured are refused with CUDA's error and invalidate the capture."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

import pytest

from tests.null_gpu.library import (
    CAPTURED_EVENT,
    GLOBAL,
    ILLEGAL_STATE,
    IMPLICIT,
    INVALIDATED,
    ISOLATION,
    LEGACY,
    MERGE,
    OK,
    PAGE,
    RELAXED,
    THREAD_LOCAL,
    TO_DEVICE,
    UNJOINED,
    UNMATCHED,
    UNSUPPORTED,
    WITHIN_DEVICE,
    WRONG_THREAD,
    Gpu,
    in_thread,
)

pytestmark = pytest.mark.exhaustive


def unsafe_calls(gpu: Gpu, other: int, event: int, memory: int) -> dict[str, Callable[[], int]]:
    """Returns calls that a capture forbids, on a stream, an event and memory outside the capture."""
    pointer = ctypes.byref(ctypes.c_void_p())
    return {
        "cudaMalloc": lambda: gpu.cudaMalloc(pointer, 1),
        "cudaFree": lambda: gpu.cudaFree(memory),
        "cudaHostAlloc": lambda: gpu.cudaHostAlloc(pointer, 1, 0),
        "cudaMemcpy": lambda: gpu.cudaMemcpy(memory, memory, 1, WITHIN_DEVICE),
        "cudaStreamSynchronize": lambda: gpu.cudaStreamSynchronize(other),
        "cudaStreamQuery": lambda: gpu.cudaStreamQuery(other),
        "cudaEventSynchronize": lambda: gpu.cudaEventSynchronize(event),
        "cudaEventQuery": lambda: gpu.cudaEventQuery(event),
        "cuModuleLoadData": lambda: gpu.cuModuleLoadData(pointer, None),
    }


UNSAFE = (
    "cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaMemcpy", "cudaStreamSynchronize", "cudaStreamQuery",
    "cudaEventSynchronize", "cudaEventQuery", "cuModuleLoadData",
)  # fmt: skip


@pytest.mark.parametrize("name", UNSAFE)
@pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL, RELAXED])
def test_unsafe_calls_of_the_capturing_thread_are_refused(gpu: Gpu, name: str, mode: int) -> None:
    stream, memory = gpu.stream(), gpu.device_memory(PAGE)
    call = unsafe_calls(gpu, gpu.stream(), gpu.event(), memory)[name]
    assert gpu.begin(stream, mode) == OK
    if mode == RELAXED:
        assert call() == OK
        assert gpu.end(stream)[0] == OK
        return
    before = gpu.thread_mode(RELAXED)
    assert before == GLOBAL
    if name != "cudaFree":
        assert call() == OK
    gpu.thread_mode(before)
    assert call() == UNSUPPORTED
    assert gpu.launch(stream) == INVALIDATED
    assert gpu.end(stream) == (INVALIDATED, 0)
    # The capture has ended, and the stream can be captured again.
    assert call() == OK
    assert gpu.graph(stream, 1)


@pytest.mark.parametrize(
    ("mode", "thread_mode", "is_refused"),
    [
        (GLOBAL, GLOBAL, True),
        (GLOBAL, THREAD_LOCAL, False),
        (GLOBAL, RELAXED, False),
        (THREAD_LOCAL, GLOBAL, False),
        (RELAXED, GLOBAL, False),
    ],
)
def test_global_captures_restrict_other_threads(gpu: Gpu, mode: int, thread_mode: int, is_refused: bool) -> None:
    stream, event = gpu.stream(), gpu.event()

    def query() -> int:
        gpu.thread_mode(thread_mode)
        return gpu.cudaEventQuery(event)

    assert gpu.begin(stream, mode) == OK
    assert in_thread(query) == (UNSUPPORTED if is_refused else OK)
    assert gpu.end(stream)[0] == (INVALIDATED if is_refused else OK)


def test_threads_can_capture_concurrently(gpu: Gpu) -> None:
    counts: dict[int, int] = {}
    begun, launched = threading.Barrier(3), threading.Barrier(3)

    def capture(num_nodes: int) -> None:
        stream = gpu.stream()
        assert gpu.begin(stream, THREAD_LOCAL) == OK
        begun.wait(30)
        for _ in range(num_nodes):
            assert gpu.launch(stream) == OK
        launched.wait(30)
        error, graph = gpu.end(stream)
        assert error == OK
        found = ctypes.c_size_t()
        assert gpu.cudaGraphGetNodes(graph, None, ctypes.byref(found)) == OK
        counts[num_nodes] = found.value

    threads = [threading.Thread(target=capture, args=(n,)) for n in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == {1: 1, 2: 2, 3: 3}
    assert gpu.count("kernels") == 0
    assert gpu.count("captures") == 3


def test_waiting_for_captured_work_is_refused(gpu: Gpu) -> None:
    stream, event = gpu.stream(), gpu.event()
    for call, error in (
        (lambda: gpu.cudaStreamSynchronize(stream), UNSUPPORTED),
        (lambda: gpu.cudaStreamQuery(stream), UNSUPPORTED),
        (lambda: gpu.cudaDeviceSynchronize(), UNSUPPORTED),
        (lambda: gpu.cudaEventSynchronize(event), CAPTURED_EVENT),
        (lambda: gpu.cudaEventQuery(event), CAPTURED_EVENT),
        (lambda: gpu.cudaStreamDestroy(stream), UNSUPPORTED),
    ):
        assert gpu.begin(stream, RELAXED) == OK
        assert gpu.cudaEventRecord(event, stream) == OK
        assert call() == error
        assert gpu.end(stream) == (INVALIDATED, 0)
    # An event recorded in a capture never completes, not even after the capture has ended.
    assert gpu.cudaEventQuery(event) == CAPTURED_EVENT
    assert gpu.cudaStreamWaitEvent(gpu.stream(), event, 0) == CAPTURED_EVENT
    assert gpu.cudaEventRecord(event, stream) == OK
    assert gpu.cudaEventQuery(event) == OK


def test_streams_join_a_capture_by_events_and_must_be_joined_back(gpu: Gpu) -> None:
    first, second, event = gpu.stream(), gpu.stream(), gpu.event()

    def fork() -> None:
        assert gpu.begin(first) == OK
        assert gpu.launch(first) == OK
        assert gpu.cudaEventRecord(event, first) == OK
        assert gpu.cudaStreamWaitEvent(second, event, 0) == OK

    def status(stream: int) -> int:
        found = ctypes.c_int()
        assert gpu.cudaStreamIsCapturing(stream, ctypes.byref(found)) == OK
        return found.value

    fork()
    assert status(second) == 1
    assert gpu.launch(second) == OK
    assert gpu.end(first) == (UNJOINED, 0)
    assert status(second) == 0
    # Without work in between there is nothing to join.
    fork()
    assert gpu.end(first)[0] == OK
    fork()
    assert gpu.launch(second) == OK
    assert gpu.cudaEventRecord(event, second) == OK
    assert gpu.launch(second) == OK
    assert gpu.cudaStreamWaitEvent(first, event, 0) == OK
    assert gpu.end(first) == (UNJOINED, 0)
    fork()
    assert gpu.launch(second) == OK
    assert gpu.end(second)[0] == UNMATCHED
    assert gpu.end(first) == (INVALIDATED, 0)
    fork()
    assert gpu.launch(second) == OK
    assert gpu.cudaEventRecord(event, second) == OK
    assert gpu.cudaStreamWaitEvent(first, event, 0) == OK
    assert gpu.end(first)[0] == OK


def test_events_and_memory_from_outside_are_refused(gpu: Gpu) -> None:
    first, second, event = gpu.stream(), gpu.stream(), gpu.event()
    # An event of work outside; one that was never recorded is ignored.
    assert gpu.begin(first) == OK
    assert gpu.cudaStreamWaitEvent(first, event, 0) == OK
    assert gpu.cudaEventRecord(event, second) == OK
    assert gpu.cudaStreamWaitEvent(first, event, 0) == ISOLATION
    assert gpu.end(first) == (INVALIDATED, 0)
    # An event of another capture.
    assert gpu.begin(first, RELAXED) == OK
    assert gpu.begin(second, RELAXED) == OK
    assert gpu.cudaEventRecord(event, second) == OK
    assert gpu.cudaStreamWaitEvent(first, event, 0) == MERGE
    assert gpu.end(first) == (INVALIDATED, 0)
    assert gpu.end(second) == (INVALIDATED, 0)
    # Pageable memory.
    device, pinned = gpu.device_memory(PAGE), gpu.pinned_memory(4096)
    room = ctypes.create_string_buffer(8)
    assert gpu.begin(first) == OK
    assert gpu.cudaMemcpyAsync(device, pinned, 8, TO_DEVICE, first) == OK
    assert gpu.cudaMemcpyAsync(device, ctypes.addressof(room), 8, TO_DEVICE, first) == UNSUPPORTED
    assert gpu.end(first) == (INVALIDATED, 0)


def test_invalid_begins_and_ends_of_captures(gpu: Gpu) -> None:
    stream = gpu.stream()
    assert gpu.begin(LEGACY) == UNSUPPORTED
    assert gpu.end(stream) == (ILLEGAL_STATE, 0)
    assert gpu.begin(stream) == OK
    assert gpu.begin(stream) == ILLEGAL_STATE
    assert in_thread(lambda: gpu.end(stream)) == (WRONG_THREAD, 0)
    assert gpu.end(stream)[0] == OK
    assert gpu.begin(stream, RELAXED) == OK
    assert in_thread(lambda: gpu.end(stream))[0] == OK


@pytest.mark.parametrize("mode", [GLOBAL, RELAXED])
def test_the_legacy_stream_is_forbidden_while_a_blocking_one_is_captured(gpu: Gpu, mode: int) -> None:
    status = ctypes.byref(ctypes.c_int())
    free, blocking, event = gpu.stream(), gpu.stream(is_blocking=True), gpu.event()
    assert gpu.begin(free, mode) == OK
    assert gpu.launch(LEGACY) == OK
    assert gpu.cudaEventRecord(event, LEGACY) == OK
    assert gpu.cudaStreamIsCapturing(LEGACY, status) == OK
    assert gpu.end(free)[0] == OK
    assert gpu.begin(blocking, mode) == OK
    # A query does not invalidate the capture.
    assert gpu.cudaStreamIsCapturing(LEGACY, status) == IMPLICIT
    assert gpu.launch(blocking) == OK
    assert gpu.launch(LEGACY) == IMPLICIT
    assert gpu.end(blocking) == (INVALIDATED, 0)
    assert gpu.begin(blocking, mode) == OK
    assert gpu.cudaEventRecord(event, LEGACY) == IMPLICIT
    assert gpu.end(blocking) == (INVALIDATED, 0)
    assert gpu.launch(LEGACY) == OK

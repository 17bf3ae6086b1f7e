"""Graph replays, kernel launches and matrix products."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest

from tests.null_gpu.library import INVALID_VALUE, INVALIDATED, LONG_MS, MS, NOT_READY, OK, Gpu, milliseconds_of

pytestmark = pytest.mark.exhaustive


def test_a_replay_takes_the_time_of_all_its_nodes(load: Callable[..., Gpu]) -> None:
    gpu = load(node_ns=1 * MS)
    stream = gpu.stream()
    graph = gpu.graph(stream, 7)
    assert gpu.cudaStreamQuery(stream) == OK

    def run() -> None:
        assert gpu.cudaGraphLaunch(graph, stream) == OK
        assert gpu.cudaGraphLaunch(graph, stream) == OK
        assert gpu.cudaStreamSynchronize(stream) == OK

    assert milliseconds_of(run) >= 14
    assert [gpu.count(name) for name in ("captures", "graph_launches", "graph_nodes", "kernels")] == [1, 2, 14, 0]


def test_branches_of_a_graph_run_concurrently(load: Callable[..., Gpu]) -> None:
    gpu = load(node_ns=1 * MS)
    first, second, fork, join = gpu.stream(), gpu.stream(), gpu.event(), gpu.event()
    start, end = gpu.event(), gpu.event()
    assert gpu.begin(first) == OK
    assert gpu.cudaEventRecord(fork, first) == OK
    assert gpu.cudaStreamWaitEvent(second, fork, 0) == OK
    assert all(gpu.launch(first) == OK for _ in range(2))
    assert all(gpu.launch(second) == OK for _ in range(5))
    assert gpu.cudaEventRecord(join, second) == OK
    assert gpu.cudaStreamWaitEvent(first, join, 0) == OK
    assert gpu.launch(first) == OK
    graph = gpu.executable(gpu.end(first)[1])
    # Launched in two streams, the graph still runs once at a time.
    assert gpu.cudaEventRecord(start, first) == OK
    assert gpu.cudaGraphLaunch(graph, first) == OK
    assert gpu.cudaGraphLaunch(graph, second) == OK
    assert gpu.cudaEventRecord(end, second) == OK
    assert gpu.cudaEventSynchronize(end) == OK
    elapsed = ctypes.c_float()
    assert gpu.cudaEventElapsedTime(ctypes.byref(elapsed), start, end) == OK
    assert elapsed.value >= 12 - 1e-3
    assert gpu.count("graph_nodes") == 16


def test_nested_and_destroyed_graphs(gpu: Gpu) -> None:
    stream = gpu.stream()
    inner = gpu.graph(stream, 3)
    assert gpu.begin(stream) == OK
    assert gpu.cudaGraphLaunch(inner, stream) == OK
    assert gpu.launch(stream) == OK
    error, graph = gpu.end(stream)
    assert error == OK
    outer = gpu.executable(graph)
    assert gpu.cudaGraphDestroy(graph) == OK
    assert gpu.cudaGraphLaunch(outer, stream) == OK
    assert gpu.count("graph_nodes") == 4
    assert gpu.cudaGraphExecDestroy(outer) == OK
    assert gpu.cudaGraphLaunch(outer, stream) == INVALID_VALUE
    assert gpu.cudaGraphDestroy(graph) == INVALID_VALUE


def test_impossible_launch_shapes_are_refused(gpu: Gpu) -> None:
    stream = gpu.stream()
    assert gpu.launch(stream, grid=0) == INVALID_VALUE
    assert gpu.launch(stream, grid=70_000) == OK
    assert gpu.cuLaunchKernel(8, 1, 70_000, 1, 32, 1, 1, 0, stream, None, None) == INVALID_VALUE
    assert gpu.cuLaunchKernel(8, 1, 1, 1, 1024, 2, 1, 0, stream, None, None) == INVALID_VALUE
    assert gpu.cuLaunchKernel(8, 1, 1, 1, 32, 1, 1, 300_000, stream, None, None) == INVALID_VALUE


def test_matrix_products_run_in_the_stream_of_their_handle(load: Callable[..., Gpu]) -> None:
    gpu = load(kernel_ns=LONG_MS * MS)
    handle, stream = ctypes.c_void_p(), gpu.stream()
    assert gpu.cublasCreate_v2(ctypes.byref(handle)) == OK
    assert gpu.cublasSetStream_v2(handle, stream) == OK
    assert gpu.cublasGemmEx(handle) == OK
    assert gpu.cudaStreamQuery(stream) == NOT_READY
    assert gpu.begin(stream) == OK
    assert gpu.cublasCreate_v2(ctypes.byref(handle)) == 3  # allocation failed
    assert gpu.cublasGemmEx(handle) == 13  # execution failed
    assert gpu.end(stream) == (INVALIDATED, 0)

"""Copies tensors through reused slots, on a device that copies as late as it may."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing

import pytest
import torch

from penstock.kernels.staging import CudaCopyQueue, Stager

CHUNK = 64


class LateQueue:
    """A `CopyQueue` that copies and launches only when it is waited for, and counts the waits of the CPU."""

    def __init__(self) -> None:
        self._pending: list[Callable[[], object]] = []
        self._lock = threading.Lock()
        self.num_slots = 0
        self.num_waits = 0

    def allocate(self, num_bytes: int) -> torch.Tensor:
        self.num_slots += 1
        return torch.full((num_bytes,), 255, dtype=torch.uint8)

    def follow(self) -> None: ...

    def copy(self, source: torch.Tensor, out: torch.Tensor) -> LatePlace:
        return self.launch(lambda: out.copy_(source))

    def launch(self, launch: Callable[[], object]) -> LatePlace:
        assert torch.is_inference_mode_enabled()
        with self._lock:
            self._pending.append(launch)
        return LatePlace(self)

    def join(self) -> None:
        with self._lock, torch.inference_mode():
            for launch in self._pending:
                launch()
            self._pending.clear()


class LatePlace:
    def __init__(self, queue: LateQueue) -> None:
        self._queue = queue

    def synchronize(self) -> None:
        self._queue.num_waits += 1
        self._queue.join()


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.bool])
def test_copies_are_exact(num_threads: int, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(num_threads)
    queue = LateQueue()
    with closing(Stager(queue, CHUNK, num_threads)) as stager, torch.inference_mode():
        for shape in ((1,), (7, 129), (1000,), (3, 5, 31), (0, 4), (CHUNK // dtype.itemsize,)):
            source = torch.randint(0, 100, shape, generator=random).to(dtype)
            out = torch.zeros_like(source)
            stager.copy(source, out)
            assert torch.equal(out, source), shape
    assert queue.num_waits > 10
    assert queue.num_slots <= 2 * num_threads


def test_copies_convert_the_dtype() -> None:
    source = torch.randn(333).bfloat16()
    out = torch.empty(333)
    with closing(Stager(LateQueue(), CHUNK, 2)) as stager, torch.inference_mode():
        stager.copy(source, out)
    assert torch.equal(out, source.float())


def test_a_failed_copy_is_reported_when_all_chunks_have_ended() -> None:
    class Failing(LateQueue):
        num_copies = 0

        def copy(self, source: torch.Tensor, out: torch.Tensor) -> LatePlace:
            self.num_copies += 1
            if self.num_copies == 2:
                raise OSError("a page cannot be read")
            return super().copy(source, out)

    queue = Failing()
    with closing(Stager(queue, CHUNK, 2)) as stager, torch.inference_mode():
        source = torch.arange(100.0)
        with pytest.raises(OSError, match="cannot be read"):
            stager.copy(source, torch.zeros(100))
        assert queue.num_copies == 7
        out = torch.zeros(100)
        stager.copy(source, out)
        assert torch.equal(out, source)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu() -> None:
    device = torch.device("cuda")
    with closing(Stager(CudaCopyQueue(device))) as stager, torch.inference_mode():
        for dtype in (torch.bfloat16, torch.float32):
            for count in (1, 1000, 50_000_001):
                source = torch.randn(count, dtype=torch.bfloat16)
                out = torch.empty(count, dtype=dtype, device=device)
                stager.copy(source, out)
                assert torch.equal(out.cpu(), source.to(dtype))

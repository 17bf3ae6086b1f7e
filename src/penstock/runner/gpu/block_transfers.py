"""Copies KV blocks between the cache of a GPU and the host, while steps run.

                     the steps' stream          the queue's own stream          a thread
    read_blocks      gather                  -> copy to the host             -> take
    write_blocks                                copy from the host           <- data
                                                scatter, gather, copy back   -> take

Blocks are gathered on the steps' stream into memory outside the cache, so that later launches may overwrite them; from
there on only the thread waits. Blocks are written after everything launched before: no earlier step reads or writes the
new content, and a step that may read it is launched when the transfer is done.

Pieces have a limited size, and the bytes outside the cache are limited; a call that would exceed the limit waits.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from penstock.kernels.staging import CopyQueue
from penstock.kernels.triton.move_blocks import LayerTable, gather_blocks, scatter_blocks
from penstock.kv_transfer.view import Parts, Place, Take, Transfer
from penstock.runner.gpu.buffers import upload

_PIECE_BYTES = 32 << 20
_MAX_WAITING_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class _Piece:
    """Consecutive blocks of a transfer, of one group."""

    first: int
    group: int
    ids: torch.Tensor  # [n] int64
    packed: torch.Tensor  # [n, block_bytes] uint8 on the device


class _Room:
    """A limited number of bytes; reserving more waits."""

    def __init__(self, num_bytes: int) -> None:
        self._most = self._free = num_bytes
        self._changed = threading.Condition()

    def take(self, num_bytes: int) -> None:
        with self._changed:
            # A reservation larger than the limit is alone.
            self._changed.wait_for(lambda: self._free >= min(num_bytes, self._most))
            self._free -= num_bytes

    def give(self, num_bytes: int) -> None:
        with self._changed:
            self._free += num_bytes
            self._changed.notify_all()


class _Jobs:
    """A transfer in pieces (`Transfer`)."""

    def __init__(self, jobs: Sequence[Future[None]]) -> None:
        self._jobs = jobs

    def done(self) -> bool:
        return all(job.done() for job in self._jobs)

    def result(self) -> None:
        for job in self._jobs:
            job.result()


class BlockTransfers:
    """`layers` are the tensors of each group, [num_blocks, bytes of a block] uint8; a group may have none. Threading:
    the runner's thread calls the methods, a separate thread calls `take`.
    """

    def __init__(
        self,
        layers: Sequence[Sequence[torch.Tensor]],
        queue: CopyQueue,
        piece_bytes: int = _PIECE_BYTES,
        max_waiting_bytes: int = _MAX_WAITING_BYTES,
        waits: bool = False,
    ) -> None:
        """With `waits` every transfer has ended when it is returned."""
        self._tables = {group: LayerTable.of(each) for group, each in enumerate(layers) if each}
        self._device = next(iter(self._tables.values())).table.device
        self._sizes = [[layer.shape[1] for layer in each] for each in layers]
        self._queue = queue
        self._waits = waits
        self._piece_bytes = max(piece_bytes, *(table.block_bytes for table in self._tables.values()))
        self._room = _Room(max_waiting_bytes)
        self._host = queue.allocate(self._piece_bytes)  # used only by the thread
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-blocks")

    def read_blocks(self, places: Sequence[Place], take: Take) -> Transfer:
        """See `KVCacheView.read_blocks`."""
        return self._submit(places, self._gather, lambda piece: self._read(piece, take))

    def write_blocks(self, places: Sequence[Place], data: Sequence[Parts], take: Take) -> Transfer:
        """See `KVCacheView.write_blocks`."""
        assert len(places) == len(data), f"{len(places)} blocks, and bytes for {len(data)}"
        return self._submit(places, lambda piece: None, lambda piece: self._write(piece, data, take))

    def _submit(
        self, places: Sequence[Place], launch: Callable[[_Piece], None], run: Callable[[_Piece], None]
    ) -> Transfer:
        jobs: list[Future[None]] = []
        for first, group, ids in self._cut(places):
            shape = (len(ids), self._tables[group].block_bytes)
            self._room.take(shape[0] * shape[1])
            packed = torch.empty(shape, dtype=torch.uint8, device=self._device)
            piece = _Piece(first, group, upload(np.array(ids, dtype=np.int64), self._device), packed)
            launch(piece)
            # Also if nothing was launched: `packed` may be memory that an earlier step still uses.
            self._queue.follow()
            jobs.append(self._thread.submit(self._run, piece, run))
            if self._waits:
                jobs[-1].result()
        return _Jobs(jobs)

    def _cut(self, places: Sequence[Place]) -> list[tuple[int, int, list[int]]]:
        """Returns (index of its first block, group, block ids) of each piece."""
        cut: list[tuple[int, int, list[int]]] = []
        for number, (group, block_id) in enumerate(places):
            most = self._piece_bytes // self._tables[group].block_bytes
            if not cut or cut[-1][1] != group or len(cut[-1][2]) == most:
                cut.append((number, group, []))
            cut[-1][2].append(block_id)
        return cut

    @torch.inference_mode()  # the mode is per thread
    def _run(self, piece: _Piece, run: Callable[[_Piece], None]) -> None:
        try:
            run(piece)
        finally:
            self._room.give(piece.packed.nbytes)

    def _gather(self, piece: _Piece) -> None:
        gather_blocks(self._tables[piece.group], piece.ids, piece.packed)

    def _read(self, piece: _Piece, take: Take) -> None:
        host = self._host[: piece.packed.nbytes].view(piece.packed.shape)
        self._queue.copy(piece.packed, host).synchronize()
        rows = host.numpy()
        for number in range(len(rows)):
            take(piece.first + number, self._parts(piece.group, rows[number].data))

    def _write(self, piece: _Piece, data: Sequence[Parts], take: Take) -> None:
        host = self._host[: piece.packed.nbytes].view(piece.packed.shape)
        rows = host.numpy()
        for number in range(len(rows)):
            start = 0
            for part in data[piece.first + number]:
                # NumPy's copy releases the interpreter lock.
                np.copyto(rows[number][start : start + len(part)], np.frombuffer(part, dtype=np.uint8))
                start += len(part)
            assert start == len(rows[number]), f"{start} bytes for a block of {len(rows[number])}"

        def land() -> None:
            scatter_blocks(self._tables[piece.group], piece.ids, piece.packed)
            self._gather(piece)

        self._queue.copy(host, piece.packed)
        self._queue.launch(land)
        self._read(piece, take)

    def _parts(self, group: int, block: memoryview) -> list[memoryview]:
        ends = itertools.accumulate(self._sizes[group])
        return [block[end - size : end] for size, end in zip(self._sizes[group], ends, strict=True)]


def launch_all(device: torch.device) -> None:
    """Launches both kernels once, on a cache of one block, to compile them ahead."""
    layers = LayerTable.of([torch.empty((1, 8), dtype=torch.uint8, device=device)])
    ids = torch.zeros(1, dtype=torch.int64, device=device)
    packed = torch.empty((1, 8), dtype=torch.uint8, device=device)
    gather_blocks(layers, ids, packed)
    scatter_blocks(layers, ids, packed)

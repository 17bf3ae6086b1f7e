"""Groups and channels over memory that all ranks of an engine map (`penstock.parallel.rank_memory`). CPU tensors only.

A gather is one call: it copies the rank's columns into a buffer that all ranks share and waits for the others' columns,
so the result needs no further copy. A channel is a ring of bytes. Ranks may be processes or threads.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence

import torch

from penstock.kernels import rank_exchange
from penstock.messages.kv_transfer import ShardId
from penstock.parallel.groups import FLOAT_DTYPES, NullGroup, RankLinks, TensorChannel, TensorGroup, sum_by_gather
from penstock.parallel.message import FIRST_NUMBERS, decode_header, encode_header, numbers_missing
from penstock.parallel.rank_memory import GATHER_BUFFER_BYTES, GATHER_BUFFERS, Layout, Ring, spin_nanoseconds
from penstock.utils.errors import RanksLostError
from penstock.utils.shared_memory import SharedMemory


def shared_links(memory: SharedMemory, pp: int, tp: int, shard: ShardId) -> RankLinks:
    """Returns the links of rank `shard` of pp x tp, over the memory that `create_rank_memory(pp, tp)` made."""
    stage, tp_rank = shard
    assert 0 <= stage < pp and 0 <= tp_rank < tp, f"rank {shard} of {pp} x {tp}"
    layout, last = Layout(pp, tp), pp - 1
    mapping = _Mapping(memory, layout)
    group = _SharedGroup(mapping, stage, tp_rank) if tp > 1 else None
    earlier = range(last) if stage == last else ()
    upstream = _SharedChannel(mapping, layout.stage_ring(stage - 1, tp_rank)) if stage > 0 else None
    downstream = _SharedChannel(mapping, layout.stage_ring(stage, tp_rank)) if stage < last else None
    results_out = tuple(_SharedChannel(mapping, layout.results_ring(target, tp_rank)) for target in earlier)
    results_in = _SharedChannel(mapping, layout.results_ring(stage, tp_rank)) if stage < last else None
    links = [link for link in (group, upstream, downstream, *results_out, results_in) if link is not None]

    def close() -> None:
        for link in links:
            link.leave()

    ranks: TensorGroup = group or NullGroup()
    outgoing: tuple[TensorChannel, ...] = results_out
    return RankLinks(ranks, upstream, downstream, outgoing, results_in, close)


class _Mapping:
    """One rank's view of the engine's memory."""

    def __init__(self, memory: SharedMemory, layout: Layout) -> None:
        self.memory = memory
        self.layout = layout
        self.aborted = memory.address + layout.aborted
        self.spin_nanoseconds = spin_nanoseconds(memory, layout)
        self._file = _inode(memory.name)

    def complete(self, status: int, resume: Callable[[], int]) -> None:
        """Waits until the call that returned `status` is done; between its slices the interpreter handles signals."""
        while status != rank_exchange.DONE:
            if status == rank_exchange.LOST:
                raise RanksLostError("another rank of this engine has ended")
            assert status == rank_exchange.PENDING, "the ranks of a stage gather tensors of different shapes"
            if _inode(self.memory.name) != self._file:
                raise RanksLostError("the process that started the ranks of this engine has ended")
            status = resume()

    def check(self) -> None:
        if ctypes.c_uint32.from_address(self.aborted).value:
            raise RanksLostError("another rank of this engine has ended")

    def tensor(self, offset: int, dtype: torch.dtype, num_bytes: int) -> torch.Tensor:
        return torch.frombuffer(self.memory.view, dtype=dtype, count=num_bytes // dtype.itemsize, offset=offset)


def _inode(name: str) -> int | None:
    """Returns the file that a name refers to: a memory's name ends with the process that created it."""
    try:
        return os.stat(name).st_ino
    except OSError:
        return None


class _SharedGroup:
    def __init__(self, mapping: _Mapping, stage: int, index: int) -> None:
        self.index = index
        self.count = mapping.layout.tp
        self._mapping = mapping
        control = mapping.memory.address + mapping.layout.group_control(stage)
        self._seat = rank_exchange.GroupSeat(
            mapping.aborted, control, mapping.spin_nanoseconds, index, self.count, calls=0
        )
        starts = [mapping.layout.gather_buffer(stage, turn) for turn in range(GATHER_BUFFERS)]
        self._buffers = {
            dtype: [mapping.tensor(start, dtype, GATHER_BUFFER_BYTES) for start in starts] for dtype in FLOAT_DTYPES
        }
        self._turn = 0

    def gather_columns(self, part: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        assert part.dim() == 2 and len(sizes) == self.count, f"{tuple(part.shape)}, {self.count} ranks, sizes {sizes}"
        assert part.shape[1] == sizes[self.index], f"rank {self.index} has {part.shape[1]} columns of sizes {sizes}"
        rows, columns, first = part.shape[0], sum(sizes), sum(sizes[: self.index])
        self._turn += 1
        if rows * columns * part.element_size() > GATHER_BUFFER_BYTES:
            return self._gather_pieces(part, columns, first)
        out = self._buffer(part.dtype, self._turn, rows, columns)
        self._complete(rank_exchange.gather(self._seat, part, out, first))
        return out

    def sum_parts(self, part: torch.Tensor) -> torch.Tensor:
        return sum_by_gather(self, part)

    def barrier(self) -> None:
        self._complete(rank_exchange.barrier(self._seat))

    def leave(self) -> None:
        rank_exchange.leave_group(self._seat)

    def _gather_pieces(self, part: torch.Tensor, columns: int, first: int) -> torch.Tensor:
        """Alternates between the buffers of this call and the next: the third holds the last result, still valid.

        All ranks have copied a piece when the next but one is written, because a gather is between them.
        """
        most = GATHER_BUFFER_BYTES // (columns * part.element_size())
        assert most > 0, f"a row of {columns} columns is larger than the {GATHER_BUFFER_BYTES} bytes of a gather"
        whole = part.new_empty((part.shape[0], columns))
        for number, rows in enumerate(part.split(most)):
            out = self._buffer(part.dtype, self._turn + number % 2, rows.shape[0], columns)
            self._complete(rank_exchange.gather(self._seat, rows, out, first))
            whole[number * most : number * most + rows.shape[0]] = out
        self.barrier()
        return whole

    def _buffer(self, dtype: torch.dtype, turn: int, rows: int, columns: int) -> torch.Tensor:
        return self._buffers[dtype][turn % GATHER_BUFFERS].as_strided((rows, columns), (columns, 1))

    def _complete(self, status: int) -> None:
        if status != rank_exchange.DONE:
            self._mapping.complete(status, lambda: rank_exchange.wait(self._seat))


class _SharedChannel:
    """Either side of one ring."""

    def __init__(self, mapping: _Mapping, ring: Ring) -> None:
        self._mapping = mapping
        base = mapping.memory.address
        self._end = rank_exchange.ChannelEnd(
            mapping.aborted, base + ring.control, mapping.spin_nanoseconds, base + ring.start, ring.size
        )

    def send(self, *tensors: torch.Tensor) -> None:
        pieces = rank_exchange.Pieces([encode_header(tensors), *[tensor.detach().contiguous() for tensor in tensors]])
        write = lambda: rank_exchange.write(self._end, pieces)  # noqa: E731
        self._mapping.complete(write(), write)

    def receive(self) -> tuple[torch.Tensor, ...]:
        header = self._read(torch.empty(FIRST_NUMBERS, dtype=torch.int64))
        missing = numbers_missing(header)
        if missing:
            header = torch.cat((header, self._read(torch.empty(missing, dtype=torch.int64))))
        return tuple(self._read(torch.empty(shape, dtype=dtype)) for dtype, shape in decode_header(header))

    def poll(self) -> bool:
        self._mapping.check()
        return rank_exchange.has_begun(self._end)

    def leave(self) -> None:
        rank_exchange.leave_channel(self._end)

    def _read(self, data: torch.Tensor) -> torch.Tensor:
        done = ctypes.c_int64(0)
        read = lambda: rank_exchange.read(self._end, data, done)  # noqa: E731
        self._mapping.complete(read(), read)
        return data

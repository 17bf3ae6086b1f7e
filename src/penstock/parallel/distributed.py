"""Groups and channels by torch.distributed: between machines, and as the reference for `parallel/shared_memory.py`.

The ranks connect through a TCPStore, which rank (0, 0) serves at `address` and, if that is an IP address, at no other
address of its machine; ranks count as pp_rank * tp_size + tp_rank.
Every group and every channel has a separate process group, so nothing here is global to the process:
torch.distributed's default group is neither used nor needed, and one process may have ranks of several engines.

With the backend `gloo` all data goes through the CPU. With `nccl` gathers and sums take tensors on a GPU, which wait on
their stream only; channels and barriers still use gloo. A tensor on a GPU is sent through the CPU, and arrives on the
receiver's current GPU.

A connection that ends, or a wait in a group or a `send` of more than `timeout_s`, raises RanksLostError. NCCL does not
detect a lost peer: there the executor ends the processes.
"""

from __future__ import annotations

import atexit
import socket
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from penstock.messages.kv_transfer import ShardId
from penstock.parallel.groups import FLOAT_DTYPES, NullGroup, RankLinks, TensorChannel, TensorGroup, sum_by_gather
from penstock.parallel.message import FIRST_NUMBERS, decode_header, encode_header, numbers_missing
from penstock.utils.errors import ConfigError, RanksLostError
from penstock.utils.hosts import listen

# torch's type stubs lack most of the members of these modules' classes that are used here.
_torch: Any = dist
_Store = _ProcessGroup = Any

BACKENDS = ("gloo", "nccl")
# How many bytes of messages a receiver buffers before `receive` is called.
BUFFERED_BYTES = 32 << 20
_TIMEOUT_S = 600.0
_FOREVER = timedelta(days=3650)
_JOIN_S = 5.0
_TAG = 0


def distributed_links(
    address: str, pp: int, tp: int, shard: ShardId, backend: str, timeout_s: float = _TIMEOUT_S
) -> RankLinks:
    """Returns the links of rank `shard` of pp x tp, when all ranks that this one is connected to have called it.

    `address` is host:port on the machine of rank (0, 0). Raises ConfigError for a backend that torch lacks, and
    RanksLostError if the other ranks do not connect.
    """
    stage, tp_rank = shard
    assert 0 <= stage < pp and 0 <= tp_rank < tp, f"rank {shard} of {pp} x {tp}"
    if backend not in BACKENDS or not dist.is_backend_available(backend):
        raise ConfigError(f"torch.distributed has no backend {backend!r} here; choose one of {', '.join(BACKENDS)}")
    host, port = _split(address)
    timeout, last = timedelta(seconds=timeout_s), pp - 1
    with _loss("the ranks of this engine cannot reach one another"):
        store = _open_store(host, port, pp * tp, shard == (0, 0), timeout)
        meeting = _Meeting(store, _own_address(host, port), timeout)
        # A process group is created by all of its ranks together. Every rank creates its own in this order, so none
        # waits for a group whose other ranks wait for an earlier one.
        group = _make_group(meeting, stage, tp_rank, tp, backend) if tp > 1 else None
        stages: dict[int, _Channel] = {}
        results: dict[int, _Channel] = {}
        for number in range(last):
            for channels, name, source, target in (
                (stages, "stage", number, number + 1),
                (results, "results", last, number),
            ):
                if stage in (source, target):
                    process_group = meeting.gloo(f"{name} {number} {tp_rank}", int(stage == target), 2)
                    channels[number] = _Channel(process_group, stage == target)
    links = [link for link in (group, *stages.values(), *results.values()) if link is not None]

    def close() -> None:
        atexit.unregister(close)
        for link in links:
            link.leave()

    # A thread that still waits in torch when the interpreter exits would end the process with SIGABRT.
    atexit.register(close)
    ranks: TensorGroup = group or NullGroup()
    outgoing: tuple[TensorChannel, ...] = tuple(results.values()) if stage == last else ()
    results_in = results[stage] if stage < last else None
    return RankLinks(ranks, stages.get(stage - 1), stages.get(stage), outgoing, results_in, close)


@contextmanager
def _loss(message: str) -> Iterator[None]:
    """torch.distributed raises RuntimeError, or its subclass DistError; a socket OSError."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        raise RanksLostError(f"{message}: {error}") from error


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"{address!r} is not an address of the form host:port")
    return host.strip("[]"), int(port)


def _open_store(host: str, port: int, num_ranks: int, is_server: bool, timeout: timedelta) -> _Store:
    # Without a socket, a server would listen on all interfaces.
    listener = listen(host, port, num_ranks).detach() if is_server else None
    return _torch.TCPStore(host, port, num_ranks, is_server, timeout, wait_for_workers=False, master_listen_fd=listener)


def _own_address(host: str, port: int) -> str:
    """Returns the address of this machine on the route to `host`. Sends nothing."""
    family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return probe.getsockname()[0]


@dataclass(frozen=True, slots=True)
class _Meeting:
    """Creates process groups."""

    store: _Store
    own_address: str
    timeout: timedelta

    def gloo(self, name: str, rank: int, size: int) -> _ProcessGroup:
        options = _torch.ProcessGroupGloo._Options()
        options._timeout = self.timeout
        options._threads = 1
        options._devices = [_torch.ProcessGroupGloo.create_device(hostname=self.own_address)]
        return _torch.ProcessGroupGloo(_torch.PrefixStore(name, self.store), rank, size, options)

    def nccl(self, name: str, rank: int, size: int) -> _ProcessGroup:
        options = _torch.ProcessGroupNCCL.Options()
        options._timeout = self.timeout
        return _torch.ProcessGroupNCCL(_torch.PrefixStore(name, self.store), rank, size, options)


def _make_group(meeting: _Meeting, stage: int, index: int, count: int, backend: str) -> _DistributedGroup:
    host = meeting.gloo(f"group {stage}", index, count)
    device = meeting.nccl(f"nccl group {stage}", index, count) if backend == "nccl" else None
    return _DistributedGroup(index, count, host, device)


class _DistributedGroup:
    def __init__(self, index: int, count: int, host: _ProcessGroup, device: _ProcessGroup | None) -> None:
        self.index = index
        self.count = count
        # Empty once this rank has left, which ends the connections.
        self._host = [host]
        self._device = [device] if device else []

    def gather_columns(self, part: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        assert part.dim() == 2 and len(sizes) == self.count, f"{tuple(part.shape)}, {self.count} ranks, sizes {sizes}"
        assert part.shape[1] == sizes[self.index], f"rank {self.index} has {part.shape[1]} columns of sizes {sizes}"
        assert part.dtype in FLOAT_DTYPES, f"{part.dtype} is not among {FLOAT_DTYPES}"
        rows, widest = part.shape[0], max(sizes)
        if rows * widest == 0:
            self.barrier()
            return part.new_empty((rows, sum(sizes)))
        # All ranks send as many bytes as the one with the most columns.
        padded = part.new_zeros((rows, widest))
        padded[:, : part.shape[1]] = part
        parts = [torch.empty_like(padded) for _ in sizes]
        group = self._member(self._host if part.is_cpu else self._device)
        with _loss("the gather of a stage has failed"):
            # Sent as bytes, because gloo does not support every dtype.
            group.allgather([[each.view(torch.uint8) for each in parts]], [padded.view(torch.uint8)]).wait()
        return torch.cat([each[:, :size] for each, size in zip(parts, sizes, strict=True)], dim=1)

    def sum_parts(self, part: torch.Tensor) -> torch.Tensor:
        if part.is_cpu or part.numel() == 0:
            return sum_by_gather(self, part)
        return _all_reduce(self._member(self._device), part)

    def barrier(self) -> None:
        group = self._member(self._host)
        with _loss("the barrier of a stage has failed"):
            group.barrier().wait()

    def leave(self) -> None:
        self._host.clear()
        self._device.clear()

    def _member(self, groups: list[_ProcessGroup]) -> _ProcessGroup:
        if not self._host:
            raise RanksLostError("this rank has left its stage")
        assert groups, "tensors on a GPU need the backend nccl"
        return groups[0]


def _all_reduce(group: _ProcessGroup, part: torch.Tensor) -> torch.Tensor:
    total = part.contiguous()
    with _loss("the sum of a stage has failed"):
        group.allreduce([total]).wait()
    return total


class _Channel:
    """Either side of a channel: a process group of two, in which the sender has rank 0.

    A thread on each side listens to the other. It takes messages as they arrive, because gloo's `send` waits for a
    receiver; and it detects the end of the connection. A side that leaves sends a header of -1, and the other side
    replies with one, so neither thread remains in torch.
    """

    def __init__(self, group: _ProcessGroup, receives: bool) -> None:
        self._group = [group]  # empty once this rank has left
        self._peer = 0 if receives else 1
        self._changed = threading.Condition()
        self._messages: deque[tuple[torch.Tensor, ...]] = deque()
        self._buffered = 0  # bytes
        self._ended = ""  # the reason why nothing more can be sent or will arrive
        self._leaving = False
        self._sending = threading.Lock()
        self._said_end = False
        self._thread = threading.Thread(target=self._listen, args=(group,), name="rank-channel", daemon=True)
        self._thread.start()

    def send(self, *tensors: torch.Tensor) -> None:
        header = encode_header(tensors)
        contents = [tensor.detach().cpu().contiguous() for tensor in tensors]
        on_gpu = torch.tensor([not tensor.is_cpu for tensor in tensors], dtype=torch.uint8)
        with self._sending:
            if self._ended:
                raise RanksLostError(self._ended)
            with _loss("a message could not be sent to another rank"):
                self._send(header[:FIRST_NUMBERS])
                for piece in (header[FIRST_NUMBERS:], on_gpu, *contents):
                    self._send(piece)

    def receive(self) -> tuple[torch.Tensor, ...]:
        with self._changed:
            self._changed.wait_for(lambda: self._messages or self._ended)
            if not self._messages:
                raise RanksLostError(self._ended)
            message = self._messages.popleft()
            self._buffered -= _num_bytes(message)
            self._changed.notify_all()
        return message

    def poll(self) -> bool:
        with self._changed:
            if self._ended and not self._messages:
                raise RanksLostError(self._ended)
            return bool(self._messages)

    def leave(self) -> None:
        with self._changed:
            self._leaving = True
            self._ended = self._ended or "this rank has closed its links"
            self._changed.notify_all()
        self._say_end()
        self._thread.join(_JOIN_S)
        self._group.clear()

    def _listen(self, group: _ProcessGroup) -> None:
        reason = "another rank of this engine has ended"
        try:
            while (message := self._take(group)) is not None:
                with self._changed:
                    self._messages.append(message)
                    self._buffered += _num_bytes(message)
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._buffered <= BUFFERED_BYTES or self._leaving)
        except RuntimeError as error:
            reason = f"{reason}: {error}"
        with self._changed:
            self._ended = self._ended or reason
            self._changed.notify_all()
        self._say_end()

    def _take(self, group: _ProcessGroup) -> tuple[torch.Tensor, ...] | None:
        """Returns the next message; None at the end."""

        def fill(data: torch.Tensor) -> torch.Tensor:
            if data.numel() > 0:
                group.recv([data.view(-1).view(torch.uint8)], self._peer, _TAG).wait(_FOREVER)
            return data

        header = fill(torch.empty(FIRST_NUMBERS, dtype=torch.int64))
        if header[0] < 0:
            return None
        header = torch.cat((header, fill(torch.empty(numbers_missing(header), dtype=torch.int64))))
        kinds = decode_header(header)
        on_gpu = fill(torch.empty(len(kinds), dtype=torch.uint8)).tolist()
        tensors = [fill(torch.empty(shape, dtype=dtype)) for dtype, shape in kinds]
        return tuple(tensor.cuda() if gpu else tensor for tensor, gpu in zip(tensors, on_gpu, strict=True))

    def _send(self, data: torch.Tensor) -> None:
        if data.numel() > 0:
            self._group[0].send([data.view(-1).view(torch.uint8)], self._peer, _TAG).wait()

    def _say_end(self) -> None:
        with self._sending:
            if self._said_end or not self._group:
                return
            self._said_end = True
            with suppress(RuntimeError):  # the other side has ended without notice
                self._send(torch.full((FIRST_NUMBERS,), -1, dtype=torch.int64))


def _num_bytes(message: tuple[torch.Tensor, ...]) -> int:
    return sum(tensor.nbytes for tensor in message)

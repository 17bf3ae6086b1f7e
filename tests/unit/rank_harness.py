"""Ranks as threads of the test, with any implementation of their links; and functions for ranks in processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch

from penstock.messages.kv_transfer import ShardId
from penstock.parallel.distributed import distributed_links
from penstock.parallel.groups import RankLinks
from penstock.parallel.rank_memory import abort, create_rank_memory
from penstock.parallel.shared_memory import shared_links
from penstock.utils.errors import RanksLostError
from penstock.utils.hosts import free_port
from penstock.utils.shared_memory import attach_memory

Body = Callable[[RankLinks, ShardId], Any]
# How long the end of a wait may take that would otherwise never end, on a machine that does other work too.
SOON_S = 10.0


def shards(pp: int, tp: int) -> list[ShardId]:
    return [(stage, rank) for stage in range(pp) for rank in range(tp)]


class Ranks:
    """Every rank of an engine runs `body` in a thread of its own. With gloo, `memory` is created but not used."""

    def __init__(self, pp: int, tp: int, body: Body, backend: str = "shared", port: int | None = None):
        self.memory = create_rank_memory(pp, tp)
        self.results: dict[ShardId, Any] = {}
        self.errors: dict[ShardId, BaseException] = {}
        address = f"127.0.0.1:{port or free_port()}"

        def run(shard: ShardId) -> None:
            try:
                if backend == "gloo":
                    links = distributed_links(address, pp, tp, shard, "gloo", 60.0)
                else:
                    links = shared_links(self.memory, pp, tp, shard)
                try:
                    self.results[shard] = body(links, shard)
                finally:
                    links.close()
            except BaseException as error:  # noqa: BLE001 it is raised where the test waits
                self.errors[shard] = error

        self.threads = {shard: threading.Thread(target=run, args=(shard,), daemon=True) for shard in shards(pp, tp)}
        for thread in self.threads.values():
            thread.start()

    def finish(self, seconds: float = 120.0) -> dict[ShardId, Any]:
        """Returns each rank's result. Raises the first error that is not a consequence of another rank's."""
        end = time.monotonic() + seconds
        for shard, thread in self.threads.items():
            thread.join(max(0.0, end - time.monotonic()))
            if thread.is_alive():
                abort(self.memory)
                raise AssertionError(f"rank {shard} has not ended after {seconds} s; errors: {self.errors}")
        for error in sorted(self.errors.values(), key=lambda error: isinstance(error, RanksLostError)):
            raise error
        return self.results


def run_ranks(pp: int, tp: int, body: Body, backend: str = "shared") -> dict[ShardId, Any]:
    return Ranks(pp, tp, body, backend).finish()


def random_bits(rows: int, columns: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Returns [rows, columns] of random bits, including NaNs of every kind."""
    size = dtype.itemsize
    bits = torch.randint(0, 256, (rows, columns * size), dtype=torch.uint8, generator=generator)
    return bits.view(dtype) if rows and columns else torch.empty((rows, columns), dtype=dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    a, b = a.contiguous().view(-1), b.contiguous().view(-1)
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8)) if a.numel() else True


def own_part(whole: torch.Tensor, sizes: list[int], index: int) -> torch.Tensor:
    first = sum(sizes[:index])
    return whole[:, first : first + sizes[index]]


@contextmanager
def raises_soon() -> Iterator[None]:
    """Checks that the body raises RanksLostError within SOON_S."""
    start = time.monotonic()
    try:
        yield
    except RanksLostError:
        took = time.monotonic() - start
        assert took < SOON_S, f"it took {took:.2f} s"
        return
    raise AssertionError("RanksLostError was not raised")


# Functions that run in a process of their own.


def gather_in_process(name: str, num_bytes: int, shard: ShardId, count: int, seconds: float) -> None:
    """Runs a rank of 1 x 2: compares `count` gathers with the whole, which must take less than `seconds` in all."""
    torch.set_num_threads(1)
    links = shared_links(attach_memory(name, num_bytes), 1, 2, shard)
    generator = torch.Generator().manual_seed(count)
    previous: tuple[torch.Tensor, torch.Tensor] | None = None
    links.group.barrier()
    start = time.monotonic()
    for _ in range(count):
        rows, *sizes = torch.randint(0, 40, (3,), generator=generator).tolist()
        whole = random_bits(rows, sum(sizes), torch.bfloat16, generator)
        got = links.group.gather_columns(own_part(whole, sizes, shard[1]), sizes)
        assert same_bits(got, whole)
        assert previous is None or same_bits(*previous)
        previous = (got, whole)
    links.group.barrier()
    assert time.monotonic() - start < seconds
    links.close()


def wait_in_process(name: str, num_bytes: int, size: tuple[int, int], shard: ShardId, pipe: Connection) -> None:
    """Runs a rank that waits for one that never starts, and reports how the wait ended."""
    links = shared_links(attach_memory(name, num_bytes), *size, shard)
    pipe.send("waiting")
    try:
        links.group.barrier()
        pipe.send("the barrier has ended")
    except (RanksLostError, KeyboardInterrupt) as error:
        pipe.send(f"{type(error).__name__}: {error}")


def gather_and_report(name: str, num_bytes: int, shard: ShardId, pipe: Connection) -> None:
    """Runs a rank of 1 x 2 that gathers until a gather fails."""
    links = shared_links(attach_memory(name, num_bytes), 1, 2, shard)
    part = torch.ones(64, 512)
    links.group.gather_columns(part, [512, 512])
    pipe.send("gathering")
    try:
        while True:
            links.group.gather_columns(part, [512, 512])
    except RanksLostError:
        pipe.send("RanksLostError")


def create_in_process(pipe: Connection) -> None:
    """Acts as an executor that only creates the memory."""
    memory = create_rank_memory(1, 2)
    pipe.send((memory.name, len(memory.view)))
    pipe.recv()


def wait_with_gloo(address: str, shard: ShardId, how: str, pipe: Connection) -> None:
    """Runs a rank of 2 x 2 with gloo that waits as `how` says, and reports when and how the wait ended."""
    links = distributed_links(address, 2, 2, shard, "gloo", 60.0)
    links.group.barrier()
    pipe.send("waiting")
    try:
        if how == "gather":
            links.group.gather_columns(torch.ones(1, 1), [1, 1])
        elif how == "receive":
            assert links.upstream is not None
            links.upstream.receive()
        else:
            threading.Event().wait()
    except RanksLostError as error:
        pipe.send(str(error))
    links.close()

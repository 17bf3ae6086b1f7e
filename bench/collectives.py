"""Measures the latency of communication between ranks: gathers and messages through shared memory, and through gloo.

    python bench/collectives.py [--rounds 5] [--calls 200]

Two processes, each pinned to a separate core if the machine has two. In every round each size is gathered through
shared memory and through gloo, in turn, so that a busy machine slows both down alike. A message is a round trip,
halved: through a channel to the other process and back.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch

from penstock.parallel.distributed import distributed_links
from penstock.parallel.groups import RankLinks
from penstock.parallel.rank_memory import create_rank_memory
from penstock.parallel.shared_memory import shared_links
from penstock.utils.shared_memory import attach_memory

TOKENS, COLUMNS = (1, 8, 32, 512), (1024, 2048, 3072)
VOCABULARY = 151936
WAYS = ("shared memory", "gloo")
Cases = dict[str, tuple[int, int, torch.dtype]]


def make_cases() -> Cases:
    cases: Cases = {
        f"gather [{tokens}, {columns}] bfloat16": (tokens, columns, torch.bfloat16)
        for tokens in TOKENS
        for columns in COLUMNS
    }
    cases[f"gather [1, {VOCABULARY}] float32"] = (1, VOCABULARY, torch.float32)
    return cases


def gathering(links: RankLinks, shape: tuple[int, int, torch.dtype]) -> Callable[[], object]:
    tokens, columns, dtype = shape
    sizes = [columns // 2] * 2
    part = torch.zeros((tokens, sizes[0]), dtype=dtype)
    return lambda: links.group.gather_columns(part, sizes)


def sending(links: RankLinks, tokens: int) -> Callable[[], object]:
    """Returns a round trip of a message with the hidden state and the residual of a stage."""
    state = torch.zeros((tokens, COLUMNS[0]), dtype=torch.bfloat16)

    def first() -> None:
        assert links.downstream is not None
        assert links.results_in is not None
        links.downstream.send(state, state)
        links.results_in.receive()

    def second() -> None:
        assert links.upstream is not None
        links.results_out[0].send(*links.upstream.receive())

    return first if links.downstream else second


def measure(index: int, names: list[str], address: str, rounds: int, calls: int, pipe: Connection) -> None:
    """Runs one of the two processes: rank `index` of 1 x 2 and of 2 x 1."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[index % len(cores)]})
    torch.set_num_threads(1)
    host, port = address.rsplit(":", 1)
    memories = [attach_memory(name, int(size)) for name, size in (each.rsplit("|", 1) for each in names)]
    groups = {
        "shared memory": shared_links(memories[0], 1, 2, (0, index)),
        "gloo": distributed_links(address, 1, 2, (0, index), "gloo"),
    }
    channels = {
        "shared memory": shared_links(memories[1], 2, 1, (index, 0)),
        "gloo": distributed_links(f"{host}:{int(port) + 1}", 2, 1, (index, 0), "gloo"),
    }
    methods = {name: {way: gathering(groups[way], shape) for way in WAYS} for name, shape in make_cases().items()}
    for tokens in TOKENS:
        name = f"message 2 x [{tokens}, {COLUMNS[0]}] bfloat16"
        methods[name] = {way: sending(channels[way], tokens) for way in WAYS}
    seconds: dict[str, dict[str, list[float]]] = {name: {way: [] for way in WAYS} for name in methods}
    for _ in range(rounds):
        for name, of_name in methods.items():
            for way, method in of_name.items():
                method()
                groups[way].group.barrier()
                for _ in range(calls):
                    start = time.perf_counter()
                    method()
                    took = time.perf_counter() - start
                    seconds[name][way].append(took / 2 if name.startswith("message") else took)
    groups["gloo"].group.barrier()
    if index == 0:
        pipe.send({name: {way: statistics.median(times) for way, times in of.items()} for name, of in seconds.items()})
    for links in (*groups.values(), *channels.values()):
        links.close()


def free_port() -> int:
    """Returns the first of two consecutive free ports."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port = first.getsockname()[1]
            try:
                with socket.create_server(("127.0.0.1", port + 1)):
                    return port
            except (OSError, OverflowError):
                continue


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=200, help="of each kind in a round")
    options = parser.parse_args()
    memories = [create_rank_memory(1, 2), create_rank_memory(2, 1)]
    names = [f"{memory.name}|{len(memory.view)}" for memory in memories]
    context = multiprocessing.get_context("spawn")
    pipe, child = context.Pipe()
    arguments = (names, f"127.0.0.1:{free_port()}", options.rounds, options.calls, child)
    ranks = [context.Process(target=measure, args=(index, *arguments)) for index in range(2)]
    for rank in ranks:
        rank.start()
    child.close()
    medians = pipe.recv()
    for rank in ranks:
        rank.join()
    sys.stdout.write("| | shared memory, us | gloo, us | gloo / shared memory |\n|---|---|---|---|\n")
    for name, of_name in medians.items():
        ours, gloo = (of_name[way] * 1e6 for way in WAYS)
        sys.stdout.write(f"| {name} | {ours:.1f} | {gloo:.0f} | {gloo / ours:.0f} |\n")


if __name__ == "__main__":
    main()

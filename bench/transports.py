"""Speed of the transports between two processes of this machine, compared with plain TCP and a plain memory copy.

    python bench/transports.py [--rounds 15] [--megabytes 64]

Every method moves the same bytes in each round, in turn, so that a busy machine slows all of them down alike. Pieces
are in random order on both sides, which is the worst case: nothing can be merged. Plain TCP and the copy move one
piece. NIXL and Mooncake take part if they are installed; NIXL both over UCX's own choice and, with UCX_TLS=tcp,self in
the environment, over TCP. A method that fails once is listed as failed, and the others continue.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import multiprocessing
import socket
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np

from penstock.kv_transfer.transports.agent_transport import AgentTransport
from penstock.kv_transfer.transports.agents import LIBRARIES, AgentSettings
from penstock.kv_transfer.transports.base import DataTransport, TransferState
from penstock.kv_transfer.transports.shared_memory import SharedMemoryTransport
from penstock.kv_transfer.transports.sockets import SocketsTransport
from penstock.messages.kv_layout import MemoryRegion
from penstock.utils.errors import PeerError
from penstock.utils.shared_memory import SharedMemory, create_memory

KEY = b"bench"
TRANSFER_SECONDS = 300.0
END_SECONDS = 60.0
PIECES = {"4 KB": 4 << 10, "64 KB": 64 << 10, "1 MB": 1 << 20}


def make_memory(num_bytes: int) -> SharedMemory:
    memory = create_memory(num_bytes)
    np.frombuffer(memory.view, np.uint8)[:] = 1
    return memory


def make_transports(memory: SharedMemory) -> dict[str, DataTransport]:
    region = MemoryRegion("kv", len(memory.view), path=memory.name)
    transports: dict[str, DataTransport] = {
        "sockets": SocketsTransport("127.0.0.1", KEY),
        "shared_memory": SharedMemoryTransport([region]),
    }
    for library, each in LIBRARIES.items():
        if any(importlib.util.find_spec(module) for module in each.modules):
            settings = AgentSettings(library=library, host="127.0.0.1", is_local=True, protocol="tcp")
            transports[library] = AgentTransport(settings, [region], KEY)
    for transport in transports.values():
        transport.register([memory.view])
    return transports


def serve(pipe: Connection, num_bytes: int) -> None:
    """The other process: its transports serve themselves; plain TCP sends the memory for every byte that arrives."""
    memory = make_memory(num_bytes)
    transports = make_transports(memory)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send((listener.getsockname()[1], {name: each.descriptor() for name, each in transports.items()}))
        connection, _ = listener.accept()
    with connection:
        while connection.recv(1):
            connection.sendall(memory.view)
    for transport in transports.values():
        transport.close()


def reading(transport: DataTransport, descriptor: bytes, num_bytes: int, piece: int) -> Callable[[], None]:
    rng, count = np.random.default_rng(0), num_bytes // piece
    runs = np.stack([rng.permutation(count) * piece, rng.permutation(count) * piece, np.full(count, piece)], 1)
    runs = runs.astype(np.int64)
    peer = transport.connect(descriptor)

    def read() -> None:
        nonlocal peer
        handle = transport.submit(peer, runs)
        deadline = time.perf_counter() + TRANSFER_SECONDS
        while transport.poll(handle) is TransferState.PENDING and time.perf_counter() < deadline:
            transport.wait([handle], 1.0)
        if transport.poll(handle) is not TransferState.DONE:
            transport.disconnect(peer)
            peer = transport.connect(descriptor)
            raise PeerError(f"a read ended as {transport.poll(handle)}")

    return read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--megabytes", type=int, default=64)
    options = parser.parse_args()
    num_bytes = options.megabytes << 20
    context = multiprocessing.get_context("spawn")
    pipe, child = context.Pipe()
    # A daemon ends with this process, whatever fails here.
    process = context.Process(target=serve, args=(child, num_bytes), daemon=True)
    process.start()
    child.close()
    try:
        port, descriptors = pipe.recv()
    except EOFError:
        raise SystemExit("the other process has not started; its messages are above") from None
    memory, other = make_memory(num_bytes), make_memory(num_bytes)
    transports = make_transports(memory)
    with socket.create_connection(("127.0.0.1", port)) as plain:

        def plain_tcp() -> None:
            plain.sendall(b"x")
            done = 0
            while done < num_bytes:
                received = plain.recv_into(memory.view[done:], 0, socket.MSG_WAITALL)
                if not received:
                    raise SystemExit("the other process has ended; its messages are above")
                done += received

        methods: dict[str, Callable[[], object]] = {
            "memory copy": lambda: ctypes.memmove(memory.address, other.address, num_bytes),
            "plain TCP": plain_tcp,
        }
        for name, transport in transports.items():
            for label, piece in PIECES.items():
                methods[f"{name}, {label}"] = reading(transport, descriptors[name], num_bytes, piece)
        seconds = measure(methods, options.rounds)
    report(seconds, num_bytes)
    for transport in transports.values():
        transport.close()
    process.join(END_SECONDS)


def measure(methods: dict[str, Callable[[], object]], num_rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of each round after two warm-up rounds; none for a method that has failed once."""
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    left = dict(methods)
    for round_number in range(num_rounds + 2):
        for name, method in list(left.items()):
            start = time.perf_counter()
            try:
                method()
            except PeerError as error:
                sys.stderr.write(f"{name}: {error}\n")
                del left[name]
                seconds[name].clear()
            else:
                seconds[name] += [time.perf_counter() - start] * (round_number >= 2)
    return seconds


def report(seconds: dict[str, list[float]], num_bytes: int) -> None:
    sys.stdout.write("| method | ms | GB/s | of plain TCP | of a memory copy |\n|---|---|---|---|---|\n")
    for name, of_method in seconds.items():
        if not of_method:
            sys.stdout.write(f"| {name} | failed | | | |\n")
            continue
        # The ratio is taken per round, to cancel slowdowns of whole rounds.
        of_tcp, of_copy = (
            statistics.median(theirs / ours for theirs, ours in zip(seconds[base], of_method, strict=True))
            for base in ("plain TCP", "memory copy")
        )
        median = statistics.median(of_method)
        speed = num_bytes / median / 1e9
        sys.stdout.write(f"| {name} | {median * 1e3:.1f} | {speed:.2f} | {of_tcp:.2f} | {of_copy:.2f} |\n")


if __name__ == "__main__":
    main()

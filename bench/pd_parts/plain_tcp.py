"""Plain TCP between two processes, each pinned to a core: the reference for transfers of KV."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection


def _send(pipe: Connection, core: int, max_bytes: int) -> None:
    """Sends as many bytes as each request asks for."""
    os.sched_setaffinity(0, {core})
    memory = bytearray(b"\1" * max_bytes)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send(listener.getsockname()[1])
        connection, _ = listener.accept()
    with connection:
        while asked := connection.recv(8):
            connection.sendall(memoryview(memory)[: int.from_bytes(asked, "little")])


def _receive(pipe: Connection, core: int, max_bytes: int, port: int) -> None:
    """Reports how many seconds each read has taken."""
    os.sched_setaffinity(0, {core})
    memory = memoryview(bytearray(b"\1" * max_bytes))
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while num_bytes := pipe.recv():
            began, done = time.perf_counter(), 0
            connection.sendall(num_bytes.to_bytes(8, "little"))
            while done < num_bytes:
                done += connection.recv_into(memory[done:num_bytes], 0, socket.MSG_WAITALL)
            pipe.send(time.perf_counter() - began)


@contextlib.contextmanager
def plain_tcp(cores: Sequence[int], max_bytes: int) -> Iterator[Callable[[int], float]]:
    """Yields a function that reads a number of bytes, and returns the seconds. The sender runs on the first core."""
    context = multiprocessing.get_context("spawn")
    sender_pipe, sender_end = context.Pipe()
    receiver_pipe, receiver_end = context.Pipe()
    # Daemons end with this process, whatever fails here.
    sender = context.Process(target=_send, args=(sender_end, cores[0], max_bytes), daemon=True)
    sender.start()
    port = sender_pipe.recv()
    receiver = context.Process(target=_receive, args=(receiver_end, cores[1], max_bytes, port), daemon=True)
    receiver.start()

    def read(num_bytes: int) -> float:
        receiver_pipe.send(num_bytes)
        return receiver_pipe.recv()

    yield read
    receiver_pipe.send(0)
    receiver.join()
    sender.join()

"""A `SocketsTransport` with slow, silent, invalid or unauthenticated peers, and what transports leave behind."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from penstock.kv_transfer.authentication import Authentication
from penstock.kv_transfer.transports import stream as streams
from penstock.kv_transfer.transports.base import DataTransport, TransferHandle, TransferState
from penstock.kv_transfer.transports.shared_memory import SharedMemoryTransport
from penstock.kv_transfer.transports.socket_protocol import (
    PURPOSE,
    Address,
    Answer,
    Hello,
    SocketLimits,
    decode,
    encode,
)
from penstock.kv_transfer.transports.sockets import Request, SocketsTransport
from penstock.kv_transfer.transports.stream import Stream
from penstock.messages.kv_layout import MemoryRegion
from penstock.simulation.conformance import runs_of
from penstock.utils.errors import ConfigError, PeerError
from penstock.utils.shared_memory import create_memory

KEY = b"the key of this cluster"
SIZE = 1 << 20
LIMITS = SocketLimits(stall_seconds=0.5, connect_seconds=0.5, max_handshakes=4, max_connections=8, max_runs=100)


def endpoint(limits: SocketLimits = LIMITS, key: bytes = KEY, num_bytes: int = SIZE) -> SocketsTransport:
    transport = SocketsTransport("127.0.0.1", key, limits)
    transport.register([memoryview(bytearray(num_bytes))])
    return transport


@pytest.fixture
def server() -> Iterator[SocketsTransport]:
    transport = endpoint()
    yield transport
    transport.close()


def address(transport: SocketsTransport) -> Address:
    return decode(Address, transport.descriptor())


def plain(transport: SocketsTransport) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", address(transport).port))
    connection.settimeout(10)
    return connection


def authenticated(transport: SocketsTransport) -> Stream:
    """Returns an authenticated client that can send anything."""
    stream = Stream(plain(transport), 10)
    stream.authenticate(KEY, True, PURPOSE, 10, 1 << 20)
    stream.send(encode(Hello(address(transport).epoch)))
    assert decode(Answer, stream.receive()) == Answer(num_bytes=SIZE)
    return stream


def request(*ranges: tuple[int, int]) -> bytes:
    return encode(Request(np.array(ranges, np.int64).tobytes()))


def until_closed(connection: socket.socket) -> bytes:
    received = b""
    try:
        while data := connection.recv(1 << 16):
            received += data
    except ConnectionError:
        pass
    return received


def end_of(transport: DataTransport, handle: TransferHandle) -> TransferState:
    deadline = time.monotonic() + 10
    while not transport.poll(handle).is_settled and time.monotonic() < deadline:
        transport.wait([handle], 1.0)
    return transport.poll(handle)


def works(server: SocketsTransport) -> bool:
    client = endpoint(SocketLimits())
    try:
        peer = client.connect(server.descriptor())
        return end_of(client, client.submit(peer, runs_of((0, 0, SIZE)))) is TransferState.DONE
    finally:
        client.close()


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", b"\0" * 100, b"PSK\x01" + b"x" * 100_000, b"PSK\x09"])
def test_garbage_ends_only_its_own_connection(server: SocketsTransport, data: bytes) -> None:
    with plain(server) as connection:
        connection.sendall(data)
        assert len(until_closed(connection)) <= 36, "an impostor got more than a greeting"
    assert works(server)


def test_a_client_with_another_key_is_refused_on_both_sides(server: SocketsTransport) -> None:
    # A busy server's answer may take longer than the other tests wait.
    other = endpoint(SocketLimits(), key=b"another key")
    with pytest.raises(PeerError, match="compare the cluster keys"):
        other.connect(server.descriptor())
    other.close()
    assert works(server)


def test_a_connection_for_another_purpose_is_refused(server: SocketsTransport) -> None:
    stream = Stream(plain(server), 10)
    with pytest.raises(PeerError, match="closed the connection"):
        stream.authenticate(KEY, True, b"control", 10, 1 << 20)
    stream.close()
    assert works(server)


def test_a_silent_client_is_closed_after_the_handshake_timeout(server: SocketsTransport) -> None:
    with plain(server) as connection:
        started = time.monotonic()
        until_closed(connection)
        assert time.monotonic() - started < 5


def test_many_silent_clients_do_not_keep_others_out() -> None:
    server = endpoint(SocketLimits(connect_seconds=60, max_handshakes=4, max_connections=8))
    with contextlib.ExitStack() as stack:
        stack.callback(server.close)
        for _ in range(20):
            stack.enter_context(plain(server))
        assert works(server)


def test_a_client_with_a_slow_handshake_is_closed(server: SocketsTransport) -> None:
    greeting = Authentication(KEY, True, PURPOSE).greeting()
    pause = threading.Event()

    def send_slowly(connection: socket.socket) -> None:
        for at in range(len(greeting)):
            connection.sendall(greeting[at : at + 1])
            pause.wait(0.1)

    with plain(server) as connection, pytest.raises(ConnectionError):
        send_slowly(connection)


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ([(0, SIZE + 1)], "outside"),
        ([(0, 8), (-8, 8)], "outside"),
        ([(SIZE, 1)], "outside"),
        ([(8, (1 << 63) - 1)], "outside"),
        ([(0, 1)] * 101, "the limit is 100 runs"),
    ],
)
def test_ranges_that_a_client_did_not_check_are_refused_by_the_server(
    server: SocketsTransport, ranges: list[tuple[int, int]], message: str
) -> None:
    stream = authenticated(server)
    stream.send(request(*ranges))
    assert message in decode(Answer, stream.receive()).refusal
    stream.send(request((0, 8)))
    assert decode(Answer, stream.receive()) == Answer()
    stream.close()


def test_more_bytes_than_the_limit_are_refused() -> None:
    server = endpoint(SocketLimits(max_bytes=SIZE))
    stream = authenticated(server)
    stream.send(request((0, SIZE), (0, 1)))
    assert "more than" in decode(Answer, stream.receive()).refusal
    stream.close()
    server.close()


@pytest.mark.parametrize("frame", [b"", b"\xff" * 50, b"\x91" * 5000, encode(Answer())])
def test_an_invalid_request_ends_the_connection(server: SocketsTransport, frame: bytes) -> None:
    stream = authenticated(server)
    stream.send(frame)
    with pytest.raises(PeerError, match="closed the connection"):
        stream.receive()
    stream.close()
    assert works(server)


def test_a_reader_that_does_not_read_is_closed_and_others_are_served_meanwhile() -> None:
    big = 64 << 20
    server = endpoint(num_bytes=big)
    stream = Stream(plain(server), 10)
    stream.authenticate(KEY, True, PURPOSE, 10, 1 << 20)
    stream.send(encode(Hello(address(server).epoch)))
    assert decode(Answer, stream.receive()).num_bytes == big
    stream.send(request((0, big)))
    assert works(server)
    into = np.zeros(big, np.uint8)
    segments = np.array([[into.ctypes.data, big]], np.int64)
    deadline = time.monotonic() + 10
    while server._listener._streams and time.monotonic() < deadline:
        server.wait([], 0.05)
    assert decode(Answer, stream.receive()) == Answer()
    with pytest.raises(PeerError, match="closed the connection"):
        stream.receive_segments(segments)
    stream.close()
    server.close()


def test_a_server_that_stalls_ends_the_transfer() -> None:
    """The server authenticates itself, accepts a read, and sends only a part of it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ended = threading.Event()

        def serve() -> None:
            stream = Stream(listener.accept()[0], 10)
            stream.authenticate(KEY, False, PURPOSE, 10, 1 << 20)
            stream.receive()
            stream.send(encode(Answer(num_bytes=SIZE)))
            stream.receive()
            stream.send(encode(Answer()))
            part = np.ones(1000, np.uint8)
            stream.send_segments(np.array([[part.ctypes.data, len(part)]], np.int64))
            ended.wait(10)
            stream.close()

        serving = threading.Thread(target=serve)
        serving.start()
        client = endpoint()
        peer = client.connect(encode(Address("127.0.0.1", listener.getsockname()[1], b"e" * 16)))
        handle = client.submit(peer, runs_of((0, 0, SIZE)))
        assert end_of(client, handle) is TransferState.FAILED_SETTLED
        ended.set()
        serving.join()
        client.close()


def test_connections_have_keepalive(server: SocketsTransport) -> None:
    stream = authenticated(server)
    with contextlib.closing(stream):
        assert stream._socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


@pytest.mark.parametrize("num_bytes", [-1, 2**62, 2**64 - 1])
def test_a_server_with_an_impossible_memory_is_not_connected(server: SocketsTransport, num_bytes: int) -> None:
    """Else the sums of offsets overflow when a transfer begins."""
    server._listener._serve = lambda stream: stream.send(encode({"type": "answer", "num_bytes": num_bytes}))
    client = endpoint()
    with pytest.raises(PeerError, match="invalid Answer"):
        client.connect(server.descriptor())
    client.close()


def test_connecting_to_a_silent_server_has_a_time_limit() -> None:
    client = endpoint()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        started = time.monotonic()
        with pytest.raises(PeerError, match=r"0\.5 seconds"):
            client.connect(encode(Address("127.0.0.1", listener.getsockname()[1], b"e" * 16)))
        assert time.monotonic() - started < 5
    client.close()


def test_a_restarted_server_on_the_same_port_is_refused(server: SocketsTransport) -> None:
    right = address(server)
    client = endpoint()
    with pytest.raises(PeerError, match="restarted"):
        client.connect(encode(Address(right.host, right.port, b"e" * 16)))
    client.close()


def test_more_runs_than_the_limit_are_refused_by_submit(server: SocketsTransport) -> None:
    client = endpoint()
    peer = client.connect(server.descriptor())
    with pytest.raises(PeerError, match="the limit is 100"):
        client.submit(peer, runs_of(*[(0, 0, 1)] * 101))
    client.close()


def test_an_address_of_another_host_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="give an address of this host"):
        SocketsTransport("203.0.113.1", KEY)


def shared_endpoint() -> SharedMemoryTransport:
    memory = create_memory(SIZE)
    transport = SharedMemoryTransport([MemoryRegion("kv", SIZE, path=memory.name)])
    transport.register([memory.view])
    return transport


@pytest.mark.parametrize("make", [endpoint, shared_endpoint])
def test_the_end_of_a_transfer_wakes_waiting_threads(make: Callable[[], SocketsTransport]) -> None:
    left, right = make(), make()
    peer = left.connect(right.descriptor())
    handle = left.submit(peer, runs_of((0, 0, SIZE)))
    started = time.monotonic()
    while not left.poll(handle).is_settled:
        left.wait([handle], 20)
    assert time.monotonic() - started < 10
    left.close()
    right.close()


@pytest.mark.parametrize("make", [endpoint, shared_endpoint])
def test_a_closed_endpoint_leaves_no_thread_and_no_descriptor(make: Callable[[], SocketsTransport]) -> None:
    threads, descriptors = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    left, right = make(), make()
    for a, b in ((left, right), (right, left)):
        peer = a.connect(b.descriptor())
        handles = [a.submit(peer, runs_of((0, 0, SIZE))) for _ in range(5)]
        assert end_of(a, handles[0]) is TransferState.DONE
    left.close()
    right.close()
    left.close()
    assert set(threading.enumerate()) <= threads
    with pytest.raises(PeerError, match="closed"):
        left.connect(right.descriptor())
    del left, right, a, b
    assert len(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.parametrize("make", [endpoint, shared_endpoint])
def test_a_disconnected_peer_leaves_no_thread_and_no_descriptor(make: Callable[[], SocketsTransport]) -> None:
    left = make()
    before = resources()
    for _ in range(3):
        right = make()
        peer = left.connect(right.descriptor())
        right.close()
        left.disconnect(peer)
        del right
        deadline = time.monotonic() + 20
        # What another test left may still be ending.
        while any(now > then for now, then in zip(resources(), before, strict=True)):
            assert time.monotonic() < deadline, f"{resources()} threads and descriptors, not {before}"
            time.sleep(0.01)
    left.close()


def resources() -> tuple[int, int]:
    """Returns the number of threads and of descriptors of this process."""
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


def test_shared_memory_is_only_for_processes_of_the_same_user_and_root(monkeypatch: pytest.MonkeyPatch) -> None:
    def connection_of(user: int) -> Any:
        return Mock(getsockopt=Mock(return_value=struct.pack("3i", 1, user, user)))

    own = os.geteuid()
    for user in (own, 0):
        streams.check_user(connection_of(user))
    with pytest.raises(PeerError, match="must run as the same user"):
        streams.check_user(connection_of(own + 1))
    left, right, checks = SharedMemoryTransport([]), SharedMemoryTransport([]), threading.Semaphore(0)

    def refuse(_connection: object) -> None:
        checks.release()
        raise PeerError("another user")

    monkeypatch.setattr(streams, "check_user", refuse)
    with pytest.raises(PeerError, match="another user"):
        left.connect(right.descriptor())
    for _side in range(2):
        assert checks.acquire(timeout=10), "both sides check"
    right.close()
    left.close()


def test_shared_memory_that_is_smaller_than_described_is_refused() -> None:
    memory = create_memory(4096)
    right = SharedMemoryTransport([MemoryRegion("kv", 8192, path=memory.name)])
    left = shared_endpoint()
    with pytest.raises(PeerError, match="cannot be mapped"):
        left.connect(right.descriptor())
    left.close()
    right.close()


def test_memory_without_a_path_is_refused_with_advice() -> None:
    with pytest.raises(ConfigError, match="choose transport=sockets"):
        SharedMemoryTransport([MemoryRegion("kv", SIZE)])


@pytest.mark.parametrize("make", [endpoint, shared_endpoint])
def test_connections_are_refused_while_no_thread_can_start(
    make: Callable[[], SocketsTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    left, right = make(), make()

    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fail)
        with pytest.raises(PeerError):
            left.connect(right.descriptor())
    peer = left.connect(right.descriptor())
    assert end_of(left, left.submit(peer, runs_of((0, 0, 8)))) is TransferState.DONE
    left.close()
    right.close()

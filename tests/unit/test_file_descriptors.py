"""A process without free file descriptors: a connection that cannot be made fails alone, with PeerError."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.kv_transfer.p2p.peers import LocalCluster, PeerList
from penstock.kv_transfer.transports import socket_protocol
from penstock.kv_transfer.transports.helper import HelperProcess
from penstock.kv_transfer.transports.listener import incoming
from penstock.kv_transfer.transports.shared_memory import SharedMemoryTransport
from penstock.kv_transfer.transports.sockets import SocketsTransport
from penstock.utils.errors import ConfigError, PeerError

KEY = b"k" * 32


@contextlib.contextmanager
def free_descriptors(count: int) -> Iterator[None]:
    """Leaves the process `count` free file descriptors."""
    taken = [os.dup(0) for _ in range(count + 1)]
    for descriptor in taken:
        os.close(descriptor)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken[-1], before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def num_open() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("kind", ["sockets", "shared_memory"])
def test_a_peer_is_not_connected(kind: str) -> None:
    def make() -> SocketsTransport | SharedMemoryTransport:
        return SocketsTransport("127.0.0.1", KEY) if kind == "sockets" else SharedMemoryTransport([])

    with contextlib.closing(make()) as one, contextlib.closing(make()) as other:
        for each in (one, other):
            each.register([])
        before = num_open()
        with free_descriptors(0), pytest.raises(PeerError, match="Too many open files"):
            one.connect(other.descriptor())
        assert num_open() == before
        assert one.connect(other.descriptor()), "it works again"


@pytest.mark.parametrize("count", range(6))
def test_a_helper_process_is_not_started(count: int) -> None:
    before = num_open()
    with free_descriptors(count), pytest.raises(PeerError, match="cannot be started"):
        HelperProcess({})
    assert num_open() == before


def test_a_connection_that_ends_while_it_is_set_up_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[socket.socket] = []

    def fail(connection: socket.socket, seconds: float) -> None:
        made.append(connection)
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(socket_protocol, "Stream", fail)
    with (
        contextlib.closing(SocketsTransport("127.0.0.1", KEY)) as one,
        contextlib.closing(SocketsTransport("127.0.0.1", KEY)) as other,
        pytest.raises(PeerError, match="Invalid argument"),
    ):
        one.connect(other.descriptor())
    assert made[0].fileno() == -1


class Waits(threading.Event):
    """Does not wait, and is set after five waits."""

    count = 0

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        assert timeout >= 0.05, "a loop without a pause takes a whole core"
        self.count += 1
        if self.count == 5:
            self.set()
        return self.is_set()


def test_a_listener_pauses_between_attempts_and_logs_the_first(caplog: pytest.LogCaptureFixture) -> None:
    waits = Waits()
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()):
        with free_descriptors(0), caplog.at_level(logging.DEBUG, "penstock.kv_transfer.transports.listener"):
            assert list(incoming(listener, waits)) == []
        assert waits.count == 5
        assert [record.levelno for record in caplog.records] == [logging.WARNING] + [logging.DEBUG] * 4
        next(incoming(listener, threading.Event())).close()


def test_announcements_are_neither_lost_nor_taken_for_stale(tmp_path: Path) -> None:
    address, other = ("127.0.0.1", 5600), ("127.0.0.1", 5601)
    first, second = LocalCluster(tmp_path / "cluster"), LocalCluster(tmp_path / "cluster")
    first.announce(address)
    with free_descriptors(0):
        with pytest.raises(PeerError, match="Too many open files"):
            PeerList([], second).resolve(address)
        with pytest.raises(ConfigError, match="Too many open files"):
            second.announce(other)
    assert second.has(address)
    first.withdraw(address)

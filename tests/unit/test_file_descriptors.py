"""A process without free file descriptors: a connection that cannot be made fails alone, with PeerError."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import os
import resource
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvloop

from penstock.cli.main import main
from penstock.kv_transfer.p2p.peers import LocalCluster, PeerList
from penstock.kv_transfer.transports import socket_protocol
from penstock.kv_transfer.transports.agent_transport import AgentTransport
from penstock.kv_transfer.transports.agents import AgentSettings
from penstock.kv_transfer.transports.helper import HelperProcess
from penstock.kv_transfer.transports.listener import incoming
from penstock.kv_transfer.transports.shared_memory import SharedMemoryTransport
from penstock.kv_transfer.transports.sockets import SocketsTransport
from penstock.messages.kv_layout import MemoryRegion
from penstock.router.health import HealthChecks, HealthConfig
from penstock.router.http_client import HttpUpstream
from penstock.router.http_server import Request, Response, serving
from penstock.router.instances import Instance, Role, State
from penstock.router.pool import Pool
from penstock.utils.clock import ManualClock
from penstock.utils.errors import ConfigError, PeerError
from penstock.utils.shared_memory import create_memory

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


def test_a_library_that_cannot_be_used_leaves_nothing_behind() -> None:
    """In an interactive session the next attempt follows in the same process, and needs the memory."""
    memory = create_memory(1 << 20)
    freed = threading.Event()
    weakref.finalize(memory.view.obj, freed.set)
    before = num_open(), set(threading.enumerate())
    settings = AgentSettings(library="nixl", host="127.0.0.1")
    # The helper process fails before it loads the library: no memory has this name.
    transport = AgentTransport(settings, [MemoryRegion("kv", 1 << 20, path="/nowhere")], KEY)
    with pytest.raises(PeerError, match="/nowhere"):
        transport.register([memory.view])
    assert (num_open(), set(threading.enumerate())) == before
    del memory
    gc.collect()
    assert freed.is_set()


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


@pytest.mark.parametrize("command", ["serve", "route"])
def test_servers_raise_the_limit_as_far_as_they_may(command: str) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        # Neither starts: the options contradict each other, or the model is missing.
        assert main([command, "--host", "0.0.0.0", *(["/no/such/model"] if command == "serve" else [])]) != 0
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(65536, before[1]), before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_hard_limit_below_is_kept() -> None:
    script = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (100, 500))\n"
        "from penstock.utils.machine import allow_open_files\n"
        "allow_open_files(); print(resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    assert subprocess.check_output([sys.executable, "-c", script], text=True) == "(500, 500)\n"


async def _health_of(url: str) -> tuple[State, State]:
    """Returns the states of an instance that is checked before and after the process has run out of descriptors."""
    pool = Pool(dead_after=0)
    member = pool.add(Instance(url, Role.SERVE))
    async with HttpUpstream() as upstream:
        checks = HealthChecks(pool, upstream, HealthConfig(), ManualClock())
        await checks.check_all()
        before = member.state
        upstream._free.clear()
        with free_descriptors(0):
            await checks.check_all()
        return before, member.state


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_an_instance_is_not_blamed_by_a_router_without_descriptors(
    loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def check() -> tuple[State, State]:
        async def answer(request: Request, response: Response) -> None:
            await response.refuse(404, "this instance has no such route")

        async with serving(answer, "127.0.0.1", 0) as url:
            return await _health_of(url)

    with asyncio.Runner(loop_factory=loop) as runner:
        assert runner.run(check()) == (State.READY, State.READY)


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

"""Transports over a library in helper processes: how transfers and helpers end when a process stops or dies, or when
the library fails."""

from __future__ import annotations

import base64
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from penstock.kv_transfer.topology.planner import merge
from penstock.kv_transfer.transports import agent_transport
from penstock.kv_transfer.transports.agent_transport import AgentAddress, AgentTransport
from penstock.kv_transfer.transports.agents import LIBRARIES, AgentSettings, check_installed
from penstock.kv_transfer.transports.base import TransferHandle, TransferState
from penstock.kv_transfer.transports.helper import OpenAgent, ServedMemory
from penstock.kv_transfer.transports.socket_protocol import SocketLimits, decode, encode
from penstock.messages.kv_layout import MemoryRegion
from penstock.simulation.conformance import runs_of
from penstock.utils.errors import ConfigError, PeerError
from penstock.utils.shared_memory import SharedMemory, create_memory
from tests.integration.transfer_libraries import LIBRARY_KINDS, with_library
from tests.integration.transport_process import KEY, Memories, RemoteTransport

LIBRARY_CASES = [with_library(library, library, "all") for library in LIBRARIES]
SIZE = 192 << 20
WAIT_SECONDS = 60.0


def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"not within {WAIT_SECONDS} seconds: {what}"
        time.sleep(0.002)


def children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        tasks = Path(f"/proc/{pid}/task").iterdir()
        return [int(each) for task in tasks for each in (task / "children").read_text().split()]
    return []


def is_alive(pid: int) -> bool:
    """Tells whether the process is neither gone nor a zombie."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def endpoint(library: str, memory: SharedMemory, key: bytes = KEY) -> AgentTransport:
    settings = AgentSettings(library=library, host="127.0.0.1", is_local=True, protocol="tcp")
    region = MemoryRegion("kv", len(memory.view), path=memory.name)
    transport = AgentTransport(settings, [region], key)
    transport.register([memory.view])
    return transport


class Pair:
    """A reader here, whose memory is full of ones, and a peer in another process that serves twos."""

    def __init__(self, library: str) -> None:
        self.library = library
        memories = Memories()
        self.near, far = create_memory(SIZE), memories.allocate(SIZE)
        self.array = np.frombuffer(self.near.view, np.uint8)
        self.array[:] = 1
        np.frombuffer(far, np.uint8)[:] = 2
        self.peer = RemoteTransport(library, memories)
        self.reader = endpoint(library, self.near)
        self.peer.register([far])
        self.name = self.reader.connect(self.peer.descriptor())

    @property
    def peer_processes(self) -> list[int]:
        return [self.peer.process.pid, *children(self.peer.process.pid)]

    def signal_peer(self, number: int) -> None:
        for pid in self.peer_processes:
            # The peer may end its helper as soon as it runs again.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def submit(self) -> TransferHandle:
        return self.reader.submit(self.name, runs_of((0, 0, SIZE)))

    def read_and_stop_peer(self) -> TransferHandle:
        """Begins a read, and stops all processes of the peer when a part has landed."""
        for _ in range(20):
            self.array[:] = 1
            handle = self.submit()
            wait_until(lambda: (self.array[:: 1 << 16] == 2).any(), "the first bytes land")
            self.signal_peer(signal.SIGSTOP)
            if self.reader.poll(handle) is TransferState.PENDING and (self.array[:: 1 << 16] == 1).any():
                return handle
            self.signal_peer(signal.SIGCONT)
            assert self.settled(handle) is TransferState.DONE
        pytest.fail("no read was stopped midway")

    def settled(self, handle: TransferHandle) -> TransferState:
        wait_until(lambda: self.reader.poll(handle).is_settled, "the transfer settles")
        return self.reader.poll(handle)

    def read_again(self) -> None:
        """Reads everything with another reader, which shows that the peer's engine and helper work."""
        other = create_memory(SIZE)
        reader = endpoint(self.library, other)
        try:
            deadline = time.monotonic() + WAIT_SECONDS
            while True:
                try:
                    name = reader.connect(self.peer.descriptor())
                    handle = reader.submit(name, runs_of((0, 0, SIZE)))
                    wait_until(lambda handle=handle: reader.poll(handle).is_settled, "the other read settles")
                    if reader.poll(handle) is TransferState.DONE:
                        break
                except PeerError:
                    pass  # the peer's helper is being replaced
                assert time.monotonic() < deadline, "the peer does not serve another reader"
            assert (np.frombuffer(other.view, np.uint8) == 2).all()
        finally:
            reader.close()


@contextlib.contextmanager
def pair_of(library: str) -> Iterator[Pair]:
    pair = Pair(library)
    try:
        yield pair
    finally:
        pair.signal_peer(signal.SIGCONT)
        pair.reader.close()
        pair.peer.end()


@pytest.mark.spread(1)
@pytest.mark.parametrize(("library", "ucx"), [*LIBRARY_CASES, with_library("nixl", "nixl", "tcp,self")])
def test_a_peer_that_continues_after_a_stop_writes_nothing_and_serves_the_next_reader(
    library: str, ucx: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uses UCX's own choice of transports, and TCP, where the end of a reader has made a stopped peer abort."""
    monkeypatch.setenv("UCX_TLS", ucx)
    with pair_of(library) as pair:
        handle = pair.read_and_stop_peer()
        pair.reader.disconnect(pair.name)
        assert pair.settled(handle) is TransferState.FAILED_SETTLED
        # The memory has another owner now.
        pair.array[:] = 3
        pair.signal_peer(signal.SIGCONT)
        pair.read_again()
        assert pair.peer.process.poll() is None, "the peer's engine has died with its helper"
        assert (pair.array == 3).all(), "bytes landed in memory of another owner"


@pytest.mark.spread(1)
@pytest.mark.parametrize("library", LIBRARY_KINDS)
def test_an_engine_survives_the_death_of_its_helper_and_starts_another(library: str) -> None:
    with pair_of(library) as pair:
        (helper,) = children(pair.peer.process.pid)
        os.kill(helper, signal.SIGABRT)
        wait_until(lambda: not is_alive(helper), "the helper dies")
        pair.read_again()
        assert pair.peer.process.poll() is None
        # The connection to the dead helper is lost, and can be made again.
        wait_until(lambda: not _is_connected(pair), "the reader learns that the peer's agent has ended")
        pair.name = pair.reader.connect(pair.peer.descriptor())
        assert pair.settled(pair.submit()) is TransferState.DONE


def _is_connected(pair: Pair) -> bool:
    try:
        return pair.settled(pair.reader.submit(pair.name, runs_of())) is TransferState.DONE
    except PeerError:
        return False


@pytest.mark.spread(1)
@pytest.mark.parametrize("library", LIBRARY_KINDS)
def test_helpers_do_not_outlive_their_engine(library: str) -> None:
    """This includes a helper that waits for a peer in a call of the library."""
    with pair_of(library) as pair:
        code = (
            "import sys, base64\n"
            "from tests.integration.test_agent_transport import *\n"
            "reader = endpoint(sys.argv[1], create_memory(SIZE))\n"
            "name = reader.connect(base64.b64decode(sys.argv[2]))\n"
            "print('connected', flush=True)\n"
            "sys.stdin.readline()\n"
            "handle = reader.submit(name, runs_of((0, 0, SIZE)))\n"
            "wait_until(lambda: reader._peers[name].lanes[0].transfer, 'the read begins')\n"
            "print('reading', flush=True)\n"
            "sys.stdin.readline()\n"
        )
        address = base64.b64encode(pair.peer.descriptor()).decode()
        command = [sys.executable, "-c", code, library, address]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as engine:
            assert engine.stdin is not None
            assert engine.stdout is not None
            assert engine.stdout.readline() == "connected\n"
            helpers = children(engine.pid)
            assert len(helpers) == 2, helpers
            pair.signal_peer(signal.SIGSTOP)
            engine.stdin.write("read\n")
            engine.stdin.flush()
            assert engine.stdout.readline() == "reading\n"
            engine.kill()
        for helper in helpers:
            wait_until(lambda helper=helper: not is_alive(helper), "a helper ends with its engine")


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_error_for_a_missing_library_names_the_command_that_installs_it(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=rf"pip install 'penstock\[{library}\]'"):
        check_installed(library)


def test_a_library_that_cannot_be_loaded_is_a_config_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library is replaced by a module whose import fails."""
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").touch()
    (tmp_path / "mooncake" / "engine.py").write_text("raise ImportError('libibverbs.so.1: cannot open')\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    memory = create_memory(1 << 16)
    transport = AgentTransport(
        AgentSettings(library="mooncake", host="127.0.0.1"), [MemoryRegion("kv", 1 << 16, path=memory.name)], KEY
    )
    with pytest.raises(ConfigError, match=r"libibverbs.so.1: cannot open.*apt-get install libibverbs1"):
        transport.register([memory.view])
    transport.close()


def test_memory_without_a_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="choose transport=sockets"):
        AgentTransport(AgentSettings(library="mooncake", host="127.0.0.1"), [MemoryRegion("kv", 8)], KEY)


def test_pieces_that_are_contiguous_on_both_sides_are_merged() -> None:
    pieces = runs_of((0, 100, 4), (4, 104, 4), (8, 112, 4), (12, 116, 2), (20, 118, 2))
    assert merge(pieces).tolist() == [[0, 100, 8], [8, 112, 6], [20, 118, 2]]
    assert merge(runs_of()).tolist() == []


# ---- Without a library ----


class ScriptedHelper:
    """A helper process of which a test decides what its reads do."""

    def __init__(self, defaults: dict[str, str]) -> None:
        self.pid = 0
        self.has_ended = threading.Event()
        self.reads: list[np.ndarray] = []
        self.on_read: Callable[[], None] = lambda: None

    def open(self, message: OpenAgent, seconds: float) -> ServedMemory:
        return ServedMemory(b"agent", tuple((0, region.num_bytes) for region in message.regions))

    def read(self, runs: np.ndarray) -> None:
        self.reads.append(runs)
        self.on_read()

    def ended(self, seconds: float | None) -> str | None:
        return "was killed" if self.has_ended.wait(seconds) else None

    def kill(self) -> None:
        self.has_ended.set()

    def end(self) -> None:
        self.kill()


class ScriptedPair:
    """A reader that is connected to a peer, both in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.helpers: list[ScriptedHelper] = []
        monkeypatch.setattr(agent_transport, "HelperProcess", self._make_helper)
        self.near, self.far = create_memory(64), create_memory(64)
        self.reader, self.peer = endpoint("nixl", self.near), endpoint("nixl", self.far)
        self.name = self.reader.connect(self.peer.descriptor())
        _, self.serving, self.helper = self.helpers

    def _make_helper(self, defaults: dict[str, str]) -> ScriptedHelper:
        self.helpers.append(ScriptedHelper(defaults))
        return self.helpers[-1]

    def read(self) -> TransferHandle:
        return self.reader.submit(self.name, runs_of((0, 0, 64)))

    def settled(self, handle: TransferHandle) -> TransferState:
        wait_until(lambda: self.reader.poll(handle).is_settled, "the transfer settles")
        return self.reader.poll(handle)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedPair]:
    pair = ScriptedPair(monkeypatch)
    try:
        yield pair
    finally:
        pair.reader.close()
        pair.peer.close()


def test_bytes_that_a_helper_reports_after_its_peers_agent_has_ended_are_not_used(
    scripted: ScriptedPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that watches the peer is late to give it up, so nothing else ends the transfer."""
    (peer,), has_settled = scripted.reader._peers.values(), threading.Event()
    lose, drivers = AgentTransport._lose, list[threading.Thread]()

    def lose_late(self: AgentTransport, lost: Any) -> None:
        if lost is peer and threading.current_thread() not in drivers:
            assert has_settled.wait(WAIT_SECONDS)
        lose(self, lost)

    def end_peer() -> None:
        drivers.append(threading.current_thread())
        scripted.serving.kill()
        wait_until(peer.has_left, "the control connection ends")

    monkeypatch.setattr(AgentTransport, "_lose", lose_late)
    scripted.helper.on_read = end_peer
    handle = scripted.read()
    try:
        assert scripted.settled(handle) is TransferState.FAILED_SETTLED
    finally:
        has_settled.set()


def test_a_read_settles_when_its_helper_has_ended(scripted: ScriptedPair, monkeypatch: pytest.MonkeyPatch) -> None:
    helper, ends = scripted.helper, list[tuple[str | None, TransferState]]()

    def read_until_killed() -> None:
        helper.has_ended.wait(WAIT_SECONDS)
        raise PeerError("a helper process has ended")

    def end() -> None:
        ends.append((helper.ended(0), scripted.reader.poll(running)))
        helper.kill()

    helper.on_read = read_until_killed
    monkeypatch.setattr(helper, "end", end)
    running, queued = scripted.read(), scripted.read()
    wait_until(lambda: helper.reads, "the read begins")
    scripted.reader.disconnect(scripted.name)
    assert scripted.reader.poll(queued) is TransferState.FAILED_SETTLED
    assert scripted.settled(running) is TransferState.FAILED_SETTLED
    assert ends == [("was killed", TransferState.FAILED_UNSETTLED)], "it was killed before"
    assert len(helper.reads) == 1
    with pytest.raises(PeerError, match="not connected"):
        scripted.read()


def test_transfers_outside_of_the_memory_or_beyond_the_limit_are_refused(
    scripted: ScriptedPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripted.reader, "_limits", SocketLimits(max_runs=2))
    for runs, reason in (
        (runs_of((8, 0, 64)), "local memory"),
        (runs_of((0, 8, 64)), "peer's memory"),
        (runs_of((0, 0, 1), (1, 1, 1), (2, 2, 1)), "the limit is 2"),
    ):
        with pytest.raises(PeerError, match=reason):
            scripted.reader.submit(scripted.name, runs)
    handle = scripted.reader.submit(scripted.name, runs_of((0, 0, 32), (32, 32, 32)))
    assert scripted.settled(handle) is TransferState.DONE
    assert len(scripted.helper.reads) == 1


def test_descriptors_of_another_library_or_another_life_are_refused(scripted: ScriptedPair) -> None:
    address = decode(AgentAddress, scripted.peer.descriptor())
    for changes, reason in (({"library": "mooncake"}, "uses the mooncake"), ({"epoch": b"x" * 16}, "been restarted")):
        with pytest.raises(PeerError, match=reason):
            scripted.reader.connect(encode(msgspec.structs.replace(address, **changes)))
    assert len(scripted.helpers) == 3, "no helper was started for them"

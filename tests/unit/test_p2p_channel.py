"""Control connections between engine cores over real sockets: delivery, refusals, and wake-ups of the core."""

from __future__ import annotations

import contextlib
import errno
import json
import queue
import socket
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import penstock.kv_transfer.p2p.peers as peers_module
import penstock.kv_transfer.p2p.socket_channel as channel_module
from penstock.kv_transfer.authentication import Authentication, Sealer
from penstock.kv_transfer.p2p.channel import ChannelEvent, Connected, Lost, Received
from penstock.kv_transfer.p2p.lookups import Lookups
from penstock.kv_transfer.p2p.messages import CODEC, MAX_MESSAGE_BYTES, Abort, Bye, Done
from penstock.kv_transfer.p2p.params import Address
from penstock.kv_transfer.p2p.peers import LocalCluster
from penstock.kv_transfer.p2p.socket_channel import PURPOSE, SocketChannel
from penstock.utils.clock import SystemClock
from penstock.utils.errors import ConfigError
from penstock.utils.hosts import free_port, is_ip_address
from tests.unit.transfer_names import named

KEY = b"a key of thirty-two bytes or so.."
HOST = "127.0.0.1"
PORT = {"kv_port": 0}
SECONDS = 10.0


class Recorder:
    """Takes what a channel reports."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[ChannelEvent] = queue.SimpleQueue()
        self.is_time = threading.Event()

    def on_event(self, event: ChannelEvent) -> None:
        self.events.put(event)

    def on_time(self) -> None:
        self.is_time.set()


def start(channel: SocketChannel) -> SocketChannel:
    channel.start(Recorder())
    return channel


def recorder_of(channel: SocketChannel) -> Recorder:
    assert isinstance(channel._handler, Recorder)
    return channel._handler


@contextlib.contextmanager
def channels(count: int = 2, key: bytes = KEY) -> Iterator[list[SocketChannel]]:
    made = [start(SocketChannel(HOST, PORT, key)) for _ in range(count)]
    try:
        yield made
    finally:
        for each in made:
            each.close()


def take(channel: SocketChannel, count: int = 1) -> list[ChannelEvent]:
    """Returns the next events."""
    return [recorder_of(channel).events.get(timeout=SECONDS) for _ in range(count)]


def is_silent(channel: SocketChannel) -> bool:
    return recorder_of(channel).events.empty()


def connect(left: SocketChannel, right: SocketChannel) -> tuple[str, str]:
    """Connects two channels; returns the name of the connection at each end."""
    peer = left.dial(right.address)
    assert take(left) == [Connected(peer, is_outgoing=True)]
    (event,) = take(right)
    assert isinstance(event, Connected)
    assert not event.is_outgoing
    return peer, event.peer


def test_messages_arrive_in_order_in_both_directions() -> None:
    with channels() as (left, right):
        there, here = connect(left, right)
        for number in range(100):
            left.send(there, Done(named(f"{number}")))
            right.send(here, Abort(named("x" * number * 1000)))
        assert take(right, 100) == [Received(here, Done(named(f"{number}"))) for number in range(100)]
        assert take(left, 100) == [Received(there, Abort(named("x" * number * 1000))) for number in range(100)]


def test_messages_sent_before_the_end_arrive() -> None:
    with channels() as (left, right):
        there, here = connect(left, right)
        left.send(there, Bye("enough"))
        left.hang_up(there)
        events = take(right, 2)
        assert events[0] == Received(here, Bye("enough"))
        assert isinstance(events[1], Lost)
        assert events[1].peer == here


def test_an_address_without_an_engine_is_reported() -> None:
    with channels(1) as (left,):
        with socket.socket() as free:
            free.bind((HOST, 0))
            address = free.getsockname()
        peer = left.dial(address)
        (event,) = take(left)
        assert isinstance(event, Lost)
        assert event.peer == peer
        assert "refused" in event.reason


def set_names(monkeypatch: pytest.MonkeyPatch, known: Mapping[str, Sequence[str]]) -> None:
    """Replaces name resolution by a table."""
    real = socket.getaddrinfo

    def look_up(host: Any, port: Any, *args: Any, **options: Any) -> Any:
        if host not in known and not is_ip_address(host):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [each for address in known.get(host, [host]) for each in real(address, port, *args, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)


def test_an_engine_with_a_host_name_listens_on_all_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    set_names(monkeypatch, {"prefill-0.prefill": ["127.0.0.2"]})
    right = start(SocketChannel("prefill-0.prefill", PORT, KEY))
    with contextlib.closing(right), channels(1) as (left,):
        host, port = right.address
        assert host == "prefill-0.prefill"
        assert port > 0
        connect(left, right)
        for address in ("127.0.0.1", "127.0.0.3"):
            socket.create_connection((address, port), SECONDS).close()


def test_an_engine_with_an_address_listens_only_there() -> None:
    with channels(1) as (left,), pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", left.address[1]), SECONDS)


def test_every_address_of_a_name_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing listens on the first, and this host may not support the address family of the second."""
    with channels() as (left, right):
        set_names(monkeypatch, {"p.example": ["127.0.0.9", "::1", "127.0.0.1"]})
        peer = left.dial(("p.example", right.address[1]))
        assert take(left) == [Connected(peer, is_outgoing=True)]


def test_a_name_without_an_address_fails_only_that_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    with channels() as (left, right):
        there, _ = connect(left, right)
        set_names(monkeypatch, {})
        peer = left.dial(("prefill-9.prefill", 5600))
        (event,) = take(left)
        assert isinstance(event, Lost)
        assert event.peer == peer
        assert "prefill-9.prefill has no address" in event.reason
        left.send(there, Done(named("still here")))
        assert isinstance(take(right)[0], Received)


def test_an_unresponsive_name_server_delays_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread waits for it however often the name is dialled, and a late answer has no effect."""
    monkeypatch.setattr(channel_module, "_OPEN_SECONDS", 0.2)
    answer, asked = threading.Event(), list[str]()

    def look_up(host: str, *_: Any, **__: Any) -> Any:
        asked.append(host)
        answer.wait(SECONDS)
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    with channels() as (left, right):
        there, _ = connect(left, right)
        monkeypatch.setattr(socket, "getaddrinfo", look_up)
        for _ in range(2):
            peer = left.dial(("slow.example", 5600))
            left.send(there, Done(named("still here")))
            assert isinstance(take(right)[0], Received)
            (event,) = take(left)
            assert isinstance(event, Lost)
            assert event.peer == peer
            assert "no name server has answered" in event.reason
        assert asked == ["slow.example"]
        answer.set()
        left.send(there, Done(named("still here")))
        assert isinstance(take(right)[0], Received)
        assert is_silent(left)


def test_everyone_who_asks_for_a_name_is_answered_and_it_is_looked_up_again_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, answer = list[str](), threading.Event()

    def look_up(host: str, *_: Any, **__: Any) -> Any:
        asked.append(host)
        assert answer.wait(SECONDS)
        raise UnicodeError("label too long")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    lookups, found = Lookups(), queue.SimpleQueue[str]()
    for _ in range(2):
        lookups.begin(("a.example", 1), lambda _, reason: found.put(reason))
    answer.set()
    reasons = [found.get(timeout=SECONDS) for _ in range(2)]
    assert reasons == ["the name a.example has no address: label too long"] * 2
    lookups.begin(("a.example", 1), lambda _, reason: found.put(reason))
    assert found.get(timeout=SECONDS)
    assert asked == ["a.example"] * 2


def test_an_engine_with_another_key_is_refused() -> None:
    with channels(1) as (left,), channels(1, b"another key of sufficient length") as (right,):
        peer = left.dial(right.address)
        (event,) = take(left)
        assert isinstance(event, Lost)
        assert event.peer == peer
        assert is_silent(right), "a peer without the key is not reported to the engine"


@pytest.mark.parametrize(
    "data", [b"", b"\0" * 100, b"POST / HTTP/1.1\r\n\r\n", b"\xff" * 70_000], ids=["nothing", "zeros", "post", "flood"]
)
def test_garbage_is_refused_and_does_not_affect_other_connections(data: bytes) -> None:
    with channels() as (left, right):
        there, here = connect(left, right)
        with socket.create_connection(right.address, SECONDS) as rogue, contextlib.suppress(OSError):
            rogue.sendall(data)
            rogue.shutdown(socket.SHUT_WR)
            while rogue.recv(4096):
                pass
        left.send(there, Done(named("still here")))
        assert take(right) == [Received(here, Done(named("still here")))]


def test_unauthenticated_connections_do_not_lock_others_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "_MAX_CONNECTIONS", 4)
    with channels(3) as (right, *others), contextlib.ExitStack() as strangers:
        right.answer_queries({})

        def arrive() -> socket.socket:
            return strangers.enter_context(socket.create_connection(right.address, SECONDS))

        oldest, *_ = [arrive() for _ in range(8)]
        lines = [connect(left, right) for left in others]
        for _ in range(8):
            arrive()
        assert get(right.address, "/query") == (200, {})
        assert oldest.recv(1) == b""
        for left, (there, here) in zip(others, lines, strict=True):
            left.send(there, Done(named("still here")))
            assert take(right) == [Received(here, Done(named("still here")))]


@contextlib.contextmanager
def member(channel: SocketChannel) -> Iterator[tuple[socket.socket, Sealer]]:
    """Connects as a peer that has the key."""
    with socket.create_connection(channel.address, SECONDS) as rogue:
        authentication = Authentication(KEY, True, PURPOSE)
        rogue.sendall(authentication.greeting())
        while not authentication.is_done:
            rogue.sendall(authentication.receive(rogue.recv(4096)))
        assert isinstance(take(channel)[0], Connected)
        yield rogue, authentication.sealer()


def test_an_altered_frame_ends_the_connection() -> None:
    with channels(1) as (right,), member(right) as (rogue, sealer):
        frame = bytearray(sealer.seal(CODEC.encode(Done(named("a")))))
        frame[-1] ^= 1
        rogue.sendall(frame)
        (event,) = take(right)
        assert isinstance(event, Lost)
        assert "altered" in event.reason


def test_a_message_in_several_frames_has_the_same_limit() -> None:
    with channels(1) as (right,), member(right) as (rogue, sealer):
        header = struct.pack("<IB", MAX_MESSAGE_BYTES + 1, 0)
        rogue.sendall(sealer.seal(header))
        (event,) = take(right)
        assert isinstance(event, Lost)
        assert f"exceeds {MAX_MESSAGE_BYTES}" in event.reason


def test_a_closing_connection_ends_although_its_peer_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "_CLOSE_SECONDS", 0.2)
    with channels(1) as (right,), member(right):
        (here,) = right._connections
        right.send(here, Abort(named("x" * MAX_MESSAGE_BYTES)))
        right.hang_up(here)
        deadline = SystemClock().now() + SECONDS
        while right._connections:
            assert SystemClock().now() < deadline, "the connection is still there"
            threading.Event().wait(0.02)
        assert is_silent(right), "closing a connection must not produce an event"


def test_connections_have_keepalive_and_a_limit_of_unacknowledged_time() -> None:
    with channels() as (left, right):
        for channel, peer in zip((left, right), connect(left, right), strict=True):
            connection = channel._connections[peer].socket
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert 0 < connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 60_000


def test_the_handler_is_called_at_the_last_time_that_was_set() -> None:
    with channels() as (left, right):
        there, here = connect(left, right)
        when = SystemClock().now() + 0.4
        right.wake_at(when - 0.1)
        right.wake_at(None)
        right.wake_at(when)
        left.send(there, Done(named("before")))
        assert take(right) == [Received(here, Done(named("before")))]
        recorder = recorder_of(right)
        assert recorder.is_time.wait(SECONDS)
        assert SystemClock().now() >= when
        recorder.is_time.clear()
        assert not recorder.is_time.wait(0.05), "a time is reported once"


def test_the_thread_is_woken_to_notice_an_earlier_time() -> None:
    channel = start(SocketChannel(HOST, PORT, KEY))
    channel.close()
    counts: list[int] = []
    for when in (5.0, 5.0, 6.0, 4.0, None, 9.0):
        channel.wake_at(when)
        counts.append(len(channel._commands))
    assert counts == [1, 1, 1, 2, 2, 3]


def test_a_time_may_be_cleared_while_the_channel_looks_at_it() -> None:
    class Cleared(SocketChannel):
        """The other thread clears the time as soon as it has been read."""

        times: Iterator[float] = iter(())

        @property
        def _wake_time(self) -> float | None:
            return next(self.times, None)

        @_wake_time.setter
        def _wake_time(self, when: float | None) -> None: ...

    channel = start(Cleared(HOST, PORT, KEY))
    channel.close()
    channel.times = iter([0.0])  # type: ignore[attr-defined]
    assert channel._patience() == 0.0


def test_events_before_the_start_are_kept() -> None:
    right = SocketChannel(HOST, PORT, KEY)
    with contextlib.closing(right), channels(1) as (left,):
        peer = left.dial(right.address)
        assert take(left) == [Connected(peer, is_outgoing=True)]
        left.send(peer, Done(named("early")))
        assert isinstance(take(start(right))[0], Connected)
        assert isinstance(take(right)[0], Received)


def wait_for_events(channel: SocketChannel, count: int) -> None:
    deadline = SystemClock().now() + SECONDS
    while len(channel._events) < count:
        assert SystemClock().now() < deadline, "the events have not arrived"
        threading.Event().wait(0.01)


def test_a_start_passes_events_on_though_nothing_else_happens() -> None:
    right = SocketChannel(HOST, PORT, KEY)
    with contextlib.closing(right), channels(1) as (left,):
        left.dial(right.address)
        wait_for_events(right, 1)
        assert isinstance(take(start(right))[0], Connected)


def test_events_before_the_start_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "_MAX_EARLY_EVENTS", 1)
    right = SocketChannel(HOST, PORT, KEY)
    with contextlib.closing(right), channels(1) as (left,):
        peer = left.dial(right.address)
        take(left)
        left.send(peer, Done(named("1")))
        wait_for_events(right, 2)
        left.send(peer, Done(named("2")))
        (event,) = take(left)
        assert isinstance(event, Lost)


def test_a_peer_that_reads_nothing_loses_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "_MAX_UNSENT_BYTES", 1 << 20)
    with channels(1) as (right,), member(right):
        (here,) = right._connections
        for _ in range(2):
            right.send(here, Abort(named("x" * (MAX_MESSAGE_BYTES - 100))))
        assert take(right) == [Lost(here, "the peer does not read what is sent")]


def test_a_message_that_arrives_with_the_end_of_the_handshake_is_not_lost() -> None:
    with channels(1) as (left,), socket.create_server((HOST, 0)) as server:
        peer = left.dial(server.getsockname())
        accepted, _ = server.accept()
        with accepted:
            authentication, answer = Authentication(KEY, False, PURPOSE), b""
            accepted.sendall(authentication.greeting())
            while not authentication.is_done:
                answer = authentication.receive(accepted.recv(4096))
            accepted.sendall(answer + authentication.sealer().seal(CODEC.encode(Done(named("first")))))
            assert take(left, 2) == [Connected(peer, is_outgoing=True), Received(peer, Done(named("first")))]


def test_a_message_that_the_handler_cannot_process_costs_its_connection() -> None:
    with channels(3) as (left, right, other):
        (there, here), (from_other, _) = connect(left, right), connect(other, right)
        recorder = recorder_of(right)

        def fail(event: ChannelEvent) -> None:
            if isinstance(event, Received) and event.message == Done(named("bug")):
                raise ZeroDivisionError
            recorder.events.put(event)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(recorder, "on_event", fail)
            left.send(there, Done(named("bug")))
            assert take(right) == [Lost(here, "its message cannot be processed: ZeroDivisionError")]
        assert isinstance(take(left)[0], Lost)
        other.send(from_other, Done(named("still here")))
        assert isinstance(take(right)[0], Received)
        right.check()


def test_the_end_of_the_thread_by_a_bug_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with channels(1) as (right,):
        right.check()

        def fail(_: object) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(right, "_accept", fail)
        with contextlib.suppress(OSError):
            socket.create_connection(right.address, SECONDS).close()
        assert recorder_of(right).is_time.wait(SECONDS), "the core is woken"
        with pytest.raises(RuntimeError, match="because of a bug: ZeroDivisionError"):
            right.check()


def test_an_engine_without_free_file_descriptors_accepts_connections_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "_PAUSE_SECONDS", 0.05)
    with channels() as (left, right):
        attempts, accept = list[OSError](), socket.socket.accept

        def accept_late(listener: socket.socket) -> Any:
            if len(attempts) < 2:
                attempts.append(OSError(errno.EMFILE, "Too many open files"))
                raise attempts[-1]
            return accept(listener)

        monkeypatch.setattr(socket.socket, "accept", accept_late)
        connect(left, right)
        assert len(attempts) == 2


def test_close_delivers_sent_messages_and_is_idempotent() -> None:
    with channels() as (left, right):
        there, here = connect(left, right)
        left.send(there, Bye("the engine shuts down"))
        left.close()
        left.close()
        events = take(right, 2)
        assert events[0] == Received(here, Bye("the engine shuts down"))
        assert isinstance(events[1], Lost)
        assert not [each for each in threading.enumerate() if each.name == "kv-control" and each is not right._thread]


def get(address: tuple[str, int], path: str) -> tuple[int, object]:
    with socket.create_connection(address, SECONDS) as client:
        client.sendall(f"GET {path} HTTP/1.1\r\nHost: here\r\n\r\n".encode())
        data = b""
        while part := client.recv(4096):
            data += part
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


def test_proxies_query_the_engine_by_http() -> None:
    channel = SocketChannel(HOST, {**PORT, "bootstrap_port": 0}, KEY)
    try:
        for address in channel._addresses:
            assert get(address, "/query")[0] == 503
        channel.answer_queries({"0": {"engine_id": "p"}})
        for address in channel._addresses:
            assert get(address, "/query") == (200, {"0": {"engine_id": "p"}})
            assert get(address, "/query?x=1")[0] == 200
            assert get(address, "/other")[0] == 404
    finally:
        channel.close()


def test_an_endless_query_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "_OPEN_SECONDS", 10 * SECONDS)
    with channels(1) as (right,), socket.create_connection(right.address, SECONDS) as client:
        client.sendall(b"GET /query?" + b"x" * 9000)
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(1) == b""
        assert not right._connections


def test_a_channel_without_ports_only_dials() -> None:
    with channels(1) as (right,), contextlib.closing(start(SocketChannel(HOST, {}, KEY))) as left:
        there, here = connect(left, right)
        left.send(there, Done(named("a")))
        assert take(right) == [Received(here, Done(named("a")))]


@pytest.mark.parametrize("option", ["kv_port", "bootstrap_port"])
def test_a_port_in_use_is_refused_by_the_name_of_its_option(option: str) -> None:
    with channels(1) as (other,):
        taken = other.address[1]
        with pytest.raises(ConfigError, match=rf"{option} {taken}: .*Address already in use.*choose another one"):
            SocketChannel(HOST, {**PORT, "bootstrap_port": 0, option: taken}, KEY)


def test_engines_of_one_user_find_each_other(tmp_path: Path) -> None:
    local = LocalCluster(tmp_path / "cluster")
    channel = SocketChannel(HOST, PORT, local.key(), local)
    assert local.has(channel.address)
    channel.close()
    assert not local.has(channel.address)


def test_nothing_is_left_of_a_channel_whose_addresses_cannot_be_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local, port = LocalCluster(tmp_path / "cluster"), free_port()
    announce = local.announce

    def announce_first(address: Address) -> None:
        if address[1] != port:
            raise ConfigError("there is no space")
        announce(address)

    monkeypatch.setattr(local, "announce", announce_first)
    with pytest.raises(ConfigError, match="there is no space"):
        SocketChannel(HOST, {"kv_port": port, "bootstrap_port": 0}, KEY, local)
    assert not local.has((HOST, port))
    SocketChannel(HOST, {"kv_port": port}, KEY, local).close()


def test_an_announcement_that_was_removed_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (channel_module, peers_module):
        monkeypatch.setattr(module, "REFRESH_SECONDS", 0.02)
    local = LocalCluster(tmp_path / "cluster")
    channel = SocketChannel(HOST, PORT, local.key(), local)
    try:
        (announcement,) = (tmp_path / "cluster").glob("engine.*")
        announcement.unlink()
        deadline = SystemClock().now() + SECONDS
        while not LocalCluster(tmp_path / "cluster").has(channel.address):
            assert SystemClock().now() < deadline, "the engine cannot be found"
            threading.Event().wait(0.01)
    finally:
        channel.close()

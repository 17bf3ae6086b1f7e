"""The pure parts of disaggregation: tickets, request parameters, peers, and the two halves as state machines."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kv_transfer.p2p.consumer import CANCELLED, Cancel, Consumer, Dial, Ended, Load, Read
from penstock.kv_transfer.p2p.known_digests import KnownDigests, Reading
from penstock.kv_transfer.p2p.messages import (
    CODEC,
    Abort,
    Done,
    DoneAck,
    Fetch,
    Grant,
    Message,
    Reason,
    Refuse,
    Renew,
    ShardDigests,
)
from penstock.kv_transfer.p2p.params import Address, RemoteDecode, RemotePrefill, read_params
from penstock.kv_transfer.p2p.peers import (
    REFRESH_SECONDS,
    LocalCluster,
    PeerList,
    check_host,
    is_loopback,
    read_cluster_key,
)
from penstock.kv_transfer.p2p.producer import Digest, Offer, Producer, ProducerRules, Release, Sent, StopDigest
from penstock.kv_transfer.p2p.session import Send, find_differences
from penstock.kv_transfer.p2p.ticket import Ticket, TicketOffice, digest_prompt
from penstock.messages.kv_transfer import BadRange, TransferId
from penstock.utils.errors import ConfigError, PeerError, RequestError, WireError
from tests.unit.transfer_names import named

OFFICE = TicketOffice(b"key")
PROMPT = digest_prompt((1, 2, 3), b"")
ADDRESS = ("127.0.0.1", 5600)
UNKNOWN = ("10.0.0.1", 5600)
HOLD, LOAD = named("hold"), named("load")


# ---- Tickets ----


def test_an_issued_ticket_is_read_unchanged() -> None:
    ticket = Ticket("engine", "epoch", HOLD, PROMPT, 3)
    assert OFFICE.read(OFFICE.issue(ticket)) == ticket


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_a_changed_ticket_is_refused(at: int, by: int) -> None:
    text = OFFICE.issue(Ticket("engine", "epoch", HOLD, PROMPT, 3))
    at %= len(text)
    changed = text[:at] + chr((ord(text[at]) + by) % 128) + text[at + 1 :]
    if changed != text:
        try:
            read = OFFICE.read(changed)
        except PeerError:
            return
        # The last character has bits that decode to nothing.
        assert at == len(text) - 1
        assert read == OFFICE.read(text)


@given(st.text(max_size=300))
def test_any_text_is_refused_with_a_peer_error(text: str) -> None:
    with pytest.raises(PeerError):
        OFFICE.read(text)


def test_a_ticket_of_another_cluster_is_refused() -> None:
    with pytest.raises(PeerError, match="does not belong to this cluster"):
        OFFICE.read(TicketOffice(b"other").issue(Ticket("engine", "epoch", HOLD, PROMPT, 3)))


def test_the_digest_of_a_prompt_depends_on_tokens_and_salt() -> None:
    prompts: list[tuple[Sequence[int], bytes]] = [((1, 2), b""), ((1, 2, 3), b""), ((1, 2), b"a"), ((2, 1), b"")]
    assert len({digest_prompt(*each) for each in prompts}) == len(prompts)
    assert digest_prompt([1, 2], b"") == digest_prompt((1, 2), b"")
    assert digest_prompt((97,), b"") != digest_prompt((), b"a" + 7 * b"\0"), "a salt is not taken for tokens"


# ---- Request parameters ----

SERIAL = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "p",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "remote_num_tokens": 3,
    "ticket": "t",
    "remote_block_ids": [[1, 2]],
    "unknown": {"nested": [None]},
}
CONCURRENT = {
    "do_remote_prefill": True,
    "transfer_id": "xfer-1",
    "remote_bootstrap_addr": "http://127.0.0.1:8998",
    "remote_engine_id": "p",
}


def test_parameters_of_both_styles() -> None:
    assert read_params({}) is None
    assert read_params({"do_remote_decode": True, "remote_host": None}) == RemoteDecode()
    assert read_params({"do_remote_decode": True, "transfer_id": "x"}) == RemoteDecode("x")
    assert read_params(SERIAL) == RemotePrefill(ADDRESS, "p", ticket="t", num_tokens=3)
    assert read_params({**SERIAL, "remote_port": "5600"}) == RemotePrefill(ADDRESS, "p", ticket="t", num_tokens=3)
    assert read_params(CONCURRENT) == RemotePrefill(("127.0.0.1", 8998), "p", rendezvous="xfer-1")
    for address in ("[fe80::1%eth0]:8998/", "https://[fe80::1%eth0]:8998"):
        found = read_params({**CONCURRENT, "remote_bootstrap_addr": address})
        assert found == RemotePrefill(("fe80::1%eth0", 8998), "p", rendezvous="xfer-1")


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"do_remote_prefill": True, "do_remote_decode": True}, "exclude"),
        ({"do_remote_prefill": "yes"}, "do_remote_prefill"),
        ({**SERIAL, "remote_host": None}, "remote_host"),
        ({**SERIAL, "remote_port": 0}, "remote_port"),
        ({**SERIAL, "remote_port": True}, "remote_port"),
        ({**SERIAL, "ticket": ""}, "ticket"),
        ({**SERIAL, "ticket": "x" * 5000}, "ticket"),
        ({**SERIAL, "remote_engine_id": 5}, "remote_engine_id"),
        ({**CONCURRENT, "remote_bootstrap_addr": None}, "remote_bootstrap_addr"),
        ({**CONCURRENT, "remote_bootstrap_addr": "http://[::1"}, "remote_bootstrap_addr"),
        ({**CONCURRENT, "remote_bootstrap_addr": "nowhere"}, "remote_bootstrap_addr"),
        ({**CONCURRENT, "remote_bootstrap_addr": "host:99999"}, "remote_bootstrap_addr"),
    ],
)
def test_errors_name_the_missing_or_invalid_parameter(params: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError, match=named):
        read_params(params)


DIGITS = "9" * 4301
"""More than Python converts to an integer."""
UNREADABLE: dict[str, list[object]] = {
    "remote_port": [DIGITS, "080", "٨٠", "+80", " 80", "80\n", "1_0", 65536, -1, 80.0, 10**5000, [], {}],
    "remote_num_tokens": [DIGITS, "-1", -1, 1 << 41, 10**5000, float("inf"), "3.0"],
    "remote_host": [
        "::1%\0", "::1%", "::1%a/b", "::1%" + "e" * 300, "\0", "127.0.0.1\n", "a b", "-a", "a/b", "../a", "x" * 254,
        "\ud800", "ä.example", "١٢٧.0.0.1", "127.0.0.1:80", "[::1]", "user@host", 5, ["127.0.0.1"],
    ],
    "remote_engine_id": ["p\0", "p\n", "\ud800", "x" * 5000, {}],
    "ticket": ["\0", "\udfff", "t" * 5000, 1e300],
}  # fmt: skip
UNREADABLE_ADDRESSES = [
    "http://[::1%\0]:80", "http://127.0.0.1:" + DIGITS, "http://127.0.0.1:0", "http://127.0.0.1:080",
    "http://user:password@127.0.0.1:80", "http://127.0.0.1:80/path", "http://127.0.0.1:80?a", "http://127.0.0.1:80#a",
    "file://127.0.0.1:80", "http://127.0.0.1:80\n", "http://127.0.0.1\t:80", " http://127.0.0.1:80", "http://a b:80",
    "http://\ud800:80", "http://127.0.0.1:٨٠", "http://:80", "//127.0.0.1:80", "\0",
]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "name", "values"),
    [
        *((SERIAL, name, values) for name, values in UNREADABLE.items()),
        (CONCURRENT, "remote_bootstrap_addr", UNREADABLE_ADDRESSES),
        ({"do_remote_decode": True}, "transfer_id", ["\0", "\ud800", 1, True]),
        ({}, "do_remote_decode", [1, "true", "x" * 60000, 10**5000, []]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_value_that_cannot_be_used_is_refused_in_few_words(
    given: dict[str, object], name: str, values: list[object]
) -> None:
    for value in values:
        with pytest.raises(RequestError, match=f"{name} in kv_transfer_params must be") as caught:
            read_params({**given, name: value})
        assert caught.value.field == "kv_transfer_params"
        assert len(str(caught.value)) < 600
        str(caught.value).encode()


# ---- Peers ----


@pytest.mark.parametrize("host", ["::1%\0", "::1%\ud800", "::1%" + "e" * 5000])
def test_a_host_that_no_file_can_be_named_after_is_unknown(tmp_path: Path, host: str) -> None:
    with pytest.raises(PeerError, match="is not in the list of peers"):
        PeerList([], LocalCluster(tmp_path / "cluster")).resolve((host, 80))


def test_only_known_addresses_are_dialled(tmp_path: Path) -> None:
    local = LocalCluster(tmp_path / "cluster")
    peers = PeerList(["10.0.0.1:5600"], local)
    assert peers.resolve(("10.0.0.1", 5600)) == ("10.0.0.1", 5600)
    for address in (("10.0.0.1", 5601), ("10.0.0.2", 5600), ADDRESS, ("localhost", 5600)):
        with pytest.raises(PeerError, match="not in the list of peers"):
            peers.resolve(address)
    local.announce(ADDRESS)
    assert peers.resolve(ADDRESS) == peers.resolve(("localhost", 5600)) == ADDRESS
    local.withdraw(ADDRESS)
    with pytest.raises(PeerError):
        peers.resolve(ADDRESS)


def test_peers_may_be_names_which_are_compared_without_a_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up(*_: object, **__: object) -> None:
        raise AssertionError("a name of a request or of the list is looked up")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    peers = PeerList(["prefill-0.Prefill.:5600", "[2001:db8:0::1]:5600", "localhost:5600"], None)
    assert peers.resolve(("PREFILL-0.prefill", 5600)) == ("prefill-0.prefill", 5600)
    assert peers.resolve(("2001:DB8::1", 5600)) == ("2001:db8::1", 5600)
    assert peers.resolve(("127.0.0.1", 5600)) == peers.resolve(("localhost", 5600)) == ("127.0.0.1", 5600)
    for host in ("prefill-0", "prefill-1.prefill", "prefill-0.prefill.svc", "10.0.0.1", "http://prefill-0.prefill"):
        with pytest.raises(PeerError, match="not in the list of peers"):
            peers.resolve((host, 5600))
    for text in ("prefill-0.prefill", "prefill-0.prefill:0", "http://prefill:1", "10.0.0:1", "a b:1", ":5600"):
        with pytest.raises(ConfigError, match="peers must be"):
            PeerList([text], None)


def test_an_engine_that_was_killed_leaves_no_address(tmp_path: Path) -> None:
    folder = tmp_path / "cluster"
    local = LocalCluster(folder)
    program = """
import os, signal, sys
from pathlib import Path
from penstock.kv_transfer.p2p.peers import LocalCluster
LocalCluster(Path(sys.argv[1])).announce(("127.0.0.1", 5601))
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", program, str(folder)], check=False, timeout=60)
    assert len(list(folder.glob("engine.*"))) == 1
    assert not local.has(("127.0.0.1", 5601))
    local.announce(ADDRESS)
    assert local.has(ADDRESS)
    assert len(list(folder.glob("engine.*"))) == 1
    local.withdraw(ADDRESS)
    assert not list(folder.glob("engine.*"))


def test_an_announcement_is_not_removed_as_stale_while_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, folder = ("127.0.0.1", 5601), tmp_path / "cluster"
    one, other = LocalCluster(folder), LocalCluster(folder)
    stale, unlink, announcing = folder / "engine.127.0.0.1.5601", Path.unlink, list[threading.Thread]()
    stale.touch(0o600)

    def unlink_late(path: Path, missing_ok: bool = False) -> None:
        if path == stale and not announcing:
            announcing.append(threading.Thread(target=other.announce, args=(address,)))
            announcing[0].start()
            announcing[0].join(0.2)
        unlink(path, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", unlink_late)
        one.announce(ADDRESS)
        announcing[0].join(10.0)
    assert one.has(address)
    assert one.has(ADDRESS)
    for local, each in ((one, ADDRESS), (other, address)):
        local.withdraw(each)
    assert not list(folder.glob("engine.*"))


def test_an_engine_that_ends_leaves_the_announcement_of_the_next_one_at_its_address(tmp_path: Path) -> None:
    ending, beginning = LocalCluster(tmp_path / "cluster"), LocalCluster(tmp_path / "cluster")
    ending.announce(ADDRESS)
    beginning.announce(ADDRESS)
    ending.withdraw(ADDRESS)
    assert ending.has(ADDRESS)
    beginning.withdraw(ADDRESS)
    assert not ending.has(ADDRESS)


def test_a_key_of_the_user_that_is_incomplete_or_cannot_be_kept_is_refused(tmp_path: Path) -> None:
    """A loss of power may leave an empty file. An empty key would admit everyone."""
    path, local = tmp_path / "cluster" / "cluster.key", LocalCluster(tmp_path / "cluster")
    path.touch(0o600)
    with pytest.raises(ConfigError, match="is incomplete: remove it"):
        local.key()
    path.unlink()
    path.mkdir()
    with pytest.raises(ConfigError, match=r"cannot be used: .* Is a directory"):
        local.key()
    path.rmdir()
    assert len(local.key()) == 32
    with pytest.raises(ConfigError, match=r"cannot be used: .* set TMPDIR"):
        LocalCluster(tmp_path / "missing" / "cluster")


def test_engines_of_one_user_share_a_key_that_others_cannot_read(tmp_path: Path) -> None:
    folder = tmp_path / "cluster"
    key = LocalCluster(folder).key()
    assert len(key) == 32
    assert LocalCluster(folder).key() == key
    assert (folder / "cluster.key").stat().st_mode & 0o077 == 0
    folder.chmod(0o755)
    with pytest.raises(ConfigError, match="only its owner"):
        LocalCluster(folder)


def test_a_running_engine_restores_what_a_cleaner_removes(tmp_path: Path) -> None:
    folder = tmp_path / "cluster"
    local, other = LocalCluster(folder), LocalCluster(folder)
    key = local.key()
    local.announce(ADDRESS)
    local.refresh(0.0)
    shutil.rmtree(folder)
    local.refresh(REFRESH_SECONDS - 1)
    assert not folder.exists(), "it is refreshed too often"
    local.refresh(REFRESH_SECONDS)
    assert other.has(ADDRESS)
    assert LocalCluster(folder).key() == key
    other.announce(("127.0.0.1", 5601))
    assert other.has(ADDRESS), "the restored announcement is taken for a stale one"
    local.withdraw(ADDRESS)
    assert not other.has(ADDRESS)
    other.withdraw(("127.0.0.1", 5601))
    assert [path.name for path in folder.iterdir()] == ["cluster.key"]


def test_a_running_engine_makes_its_files_look_used(tmp_path: Path) -> None:
    folder = tmp_path / "cluster"
    local = LocalCluster(folder)
    local.key()
    local.announce(ADDRESS)
    written = [folder, *folder.iterdir()]
    assert len(written) == 3
    for path in written:
        os.utime(path, (0, 0))
    local.refresh(0.0)
    assert all(path.stat().st_mtime > 0 for path in written)
    local.withdraw(ADDRESS)


def test_a_key_or_folder_that_another_has_replaced_is_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "cluster"
    local = LocalCluster(folder)
    key = local.key()
    (folder / "cluster.key").unlink()
    assert LocalCluster(folder).key() != key
    local.refresh(0.0)
    assert "restart this engine" in caplog.text
    shutil.rmtree(folder)
    folder.write_bytes(b"")
    local.refresh(REFRESH_SECONDS)
    assert "must be a folder that only its owner can use" in caplog.text
    assert folder.is_file()


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    LocalCluster(tmp_path / "cluster")
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(ConfigError, match="only its owner"):
        LocalCluster(tmp_path / "cluster")


def test_a_key_file_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "key"
    with pytest.raises(ConfigError, match="cannot be read"):
        read_cluster_key(path)
    path.write_bytes(b"short\n")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="5 bytes"):
        read_cluster_key(path)
    path.write_bytes(b"a key that is long enough\n")
    assert read_cluster_key(path) == b"a key that is long enough"
    for mode in (0o644, 0o640, 0o604):
        path.chmod(mode)
        with pytest.raises(ConfigError, match="chmod 600"):
            read_cluster_key(path)


@pytest.mark.parametrize(("owner", "mode", "is_right"), [(0, 0o440, True), (0, 0o444, False), (1000, 0o440, False)])
def test_a_group_may_read_a_key_of_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: int, mode: int, is_right: bool
) -> None:
    """Kubernetes mounts a secret in this way for an unprivileged user with an fsGroup."""
    path = tmp_path / "key"
    path.write_bytes(b"a key that is long enough\n")
    path.chmod(mode)
    found = path.stat()
    as_owned = os.stat_result((found.st_mode, *found[1:4], owner, *found[5:]))
    monkeypatch.setattr(Path, "stat", lambda _: as_owned)
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    if is_right:
        assert read_cluster_key(path) == b"a key that is long enough"
    else:
        with pytest.raises(ConfigError, match="chmod 600"):
            read_cluster_key(path)


def test_checks_of_hosts() -> None:
    assert is_loopback("localhost")
    assert is_loopback("127.0.0.5")
    assert is_loopback("::1")
    assert not is_loopback("10.0.0.1")
    assert not is_loopback("example.org")
    assert check_host("localhost") == "127.0.0.1"
    assert check_host("Prefill-0.prefill.") == "prefill-0.prefill"
    for everywhere in ("0.0.0.0", "::"):
        with pytest.raises(ConfigError, match=f"not {everywhere}"):
            check_host(everywhere)
    with pytest.raises(ConfigError, match="peers must be"):
        PeerList(["10.0.0.1"], None)


def test_differences_are_named_with_both_values() -> None:
    own, other = {"weights": "a", "dtype": "bfloat16"}, {"weights": "b", "dtype": "bfloat16", "speculator": "mtp"}
    assert find_differences(own, other, frozenset()) == ["speculator (none and mtp)", "weights (a and b)"]
    assert find_differences(own, other, frozenset({"weights"})) == ["speculator (none and mtp)"]


# ---- The sending half ----

RULES = ProducerRules(
    hold_seconds=100.0,
    lease_seconds=10.0,
    park_seconds=5.0,
    max_parked=2,
    max_held_blocks=4,
    first_state=100,
    max_held_states=1,
    is_attested=True,
)
OFFER = Offer(hold_id=HOLD, prompt_digest=PROMPT, num_tokens=32, block_ids=((5, 6),))
PEER = "d#1"


def make_producer(rules: ProducerRules = RULES) -> Producer:
    producer = Producer("p", "epoch", rules, OFFICE)
    producer.expected = READING
    return producer


def fetch(name: str = "load", **changes: Any) -> Fetch:
    given: dict[str, Any] = {"transfer_id": named(name), "first": 0, "end": 16, "prompt_digest": PROMPT, **changes}
    return Fetch(**given)


READING = Reading(1)


def offer(producer: Producer, now: float, rendezvous: str = "") -> str:
    """Runs a request to its end, and offers its blocks."""
    producer.expect(HOLD, rendezvous)
    return producer.offer(OFFER, now)


def digest_job(number: int = 1, first: int = 0, end: int = 16) -> Digest:
    return Digest(named("hold", number), READING, ((5, 6),), first, end)


def answers(producer: Producer) -> list[Message]:
    producer.check_integrity()
    return [action.message for action in producer.take_actions() if isinstance(action, Send)]


def granted(now: float = 0.0) -> Producer:
    """Returns a producer that granted "load" at time `now`."""
    producer = make_producer()
    ticket = offer(producer, now)
    producer.receive(PEER, fetch(ticket=ticket), now)
    assert producer.take_actions() == [digest_job()]
    producer.on_digested(named("hold", 1), (), now)
    assert producer.take_actions() == [Send(PEER, Grant(transfer_id=LOAD, lease=10.0, block_ids=((5, 6),)))]
    producer.check_integrity()
    return producer


def test_a_grant_that_is_read_in_time_is_confirmed_and_released() -> None:
    producer = granted()
    producer.receive(PEER, Done(LOAD), 9.9)
    assert producer.take_actions() == [Release(HOLD), Sent(PEER, 16, 9.9), Send(PEER, DoneAck(LOAD, True))]
    assert producer.num_held == 0
    assert producer.next_deadline is None


def test_a_renewed_lease_continues_and_an_expired_one_is_not_confirmed() -> None:
    producer = granted()
    producer.receive(PEER, Renew(LOAD), 9.0)
    producer.poll(15.0)
    assert producer.take_actions() == []
    producer.poll(19.0)
    assert producer.take_actions() == [Release(HOLD)]
    producer.receive(PEER, Renew(LOAD), 19.5)
    producer.receive(PEER, Done(LOAD), 20.0)
    assert answers(producer) == [DoneAck(LOAD, False)]


def test_an_expired_lease_is_not_confirmed_even_before_a_poll() -> None:
    producer = granted()
    producer.receive(PEER, Renew(LOAD), 10.0)
    producer.receive(PEER, Done(LOAD), 10.0)
    assert answers(producer) == [DoneAck(LOAD, False)]
    assert producer.num_held == 0


def test_a_ticket_is_valid_for_one_reader() -> None:
    producer = make_producer()
    ticket = offer(producer, 0.0)
    producer.receive(PEER, fetch(ticket=ticket), 0.0)
    producer.receive("other#1", fetch(ticket=ticket), 0.0)
    (refusal,) = answers(producer)
    assert isinstance(refusal, Refuse)
    assert refusal.reason is Reason.UNKNOWN_REQUEST


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prompt_digest": digest_prompt((9,), b"")}, Reason.OTHER_PROMPT),
        ({"end": 48}, Reason.INVALID_RANGE),
        ({"first": -1}, Reason.INVALID_RANGE),
        ({"first": 17}, Reason.INVALID_RANGE),
        ({"ticket": "nonsense"}, Reason.INVALID_TICKET),
        ({"ticket": OFFICE.issue(Ticket("p", "earlier", HOLD, PROMPT, 32))}, Reason.INVALID_TICKET),
        ({"ticket": OFFICE.issue(Ticket("q", "epoch", HOLD, PROMPT, 32))}, Reason.INVALID_TICKET),
        ({"ticket": OFFICE.issue(Ticket("p", "epoch", named("another"), PROMPT, 32))}, Reason.UNKNOWN_REQUEST),
    ],
)
def test_invalid_fetches_are_refused_and_the_hold_remains(changes: dict[str, Any], reason: Reason) -> None:
    producer = make_producer()
    ticket = offer(producer, 0.0)
    producer.receive(PEER, fetch(**{"ticket": ticket, **changes}), 0.0)
    (refusal,) = answers(producer)
    assert isinstance(refusal, Refuse)
    assert refusal.reason is reason
    producer.receive(PEER, fetch("again", ticket=ticket), 0.0)
    assert isinstance(producer.take_actions()[0], Digest)


def test_a_hold_that_is_not_fetched_expires() -> None:
    producer = make_producer()
    offer(producer, 0.0)
    assert producer.next_deadline == 100.0
    producer.poll(100.0)
    assert producer.take_actions() == [Release(HOLD)]


def test_a_reader_of_a_hold_that_has_expired_does_not_wait() -> None:
    producer = make_producer()
    offer(producer, 0.0, "x")
    producer.poll(100.0)
    assert producer.take_actions() == [Release(HOLD)]
    producer.receive(PEER, fetch(rendezvous="x"), 101.0)
    assert refusals(producer) == [(LOAD, Reason.PREFILL_FAILED)]
    # One of a request that comes again does.
    producer.poll(102.0)
    producer.receive(PEER, fetch("early", rendezvous="x"), 102.0)
    assert offer(producer, 103.0, "x")
    assert any(isinstance(action, Digest) for action in producer.take_actions())
    producer.check_integrity()


def test_a_hold_that_is_not_needed_ends_at_once() -> None:
    producer = make_producer()
    producer.receive(PEER, fetch(ticket=offer(producer, 0.0), end=0), 1.0)
    assert producer.take_actions() == [Release(HOLD)]


def test_digests_end_with_their_reader() -> None:
    producer = make_producer()
    producer.receive(PEER, fetch(ticket=offer(producer, 0.0)), 0.0)
    assert producer.take_actions() == [digest_job()]
    producer.on_lost(PEER)
    assert producer.take_actions() == [StopDigest(named("hold", 1)), Release(HOLD)]
    producer.on_digested(named("hold", 1), (), 1000.0)
    assert producer.take_actions() == []
    producer.check_integrity()


def shard_digests(*units: bytes) -> tuple[ShardDigests, ...]:
    return (ShardDigests((0, 0), (0, 0), (units,)),)


def test_blocks_are_digested_when_they_are_complete_and_their_reader_need_not_wait() -> None:
    producer = make_producer()
    producer.expect(HOLD, "")
    producer.on_computed(HOLD, ((5,),), 0, 2)
    producer.on_computed(HOLD, ((5, 6),), 2, 3)
    assert producer.take_actions() == [
        Digest(named("hold", 1), READING, ((5,),), 0, 2),
        Digest(named("hold", 2), READING, ((5, 6),), 2, 3),
    ]
    # Reports may come in any order.
    producer.on_digested(named("hold", 2), shard_digests(b"c"), 0.0)
    producer.on_digested(named("hold", 1), shard_digests(b"a", b"b"), 0.0)
    ticket = producer.offer(OFFER, 0.0)
    producer.receive(PEER, fetch(ticket=ticket, first=1, end=3), 0.0)
    (sent,) = producer.take_actions()
    assert isinstance(sent, Send)
    assert isinstance(sent.message, Grant)
    assert sent.message.digests == shard_digests(b"b", b"c")
    producer.check_integrity()


def test_only_what_is_missing_is_digested_for_a_reader() -> None:
    producer = make_producer()
    producer.expect(HOLD, "")
    producer.on_computed(HOLD, ((5,),), 1, 2)
    producer.on_digested(named("hold", 1), shard_digests(b"b"), 0.0)
    producer.take_actions()
    producer.receive(PEER, fetch(ticket=producer.offer(OFFER, 0.0), end=4), 0.0)
    assert producer.take_actions() == [digest_job(2, 0, 1), digest_job(3, 2, 4)]
    producer.on_digested(named("hold", 2), shard_digests(b"a"), 0.0)
    assert producer.take_actions() == []
    producer.on_digested(named("hold", 3), shard_digests(b"c", b"d"), 0.0)
    (granted,) = answers(producer)
    assert isinstance(granted, Grant)
    assert granted.digests == shard_digests(b"a", b"b", b"c", b"d")


def test_a_reader_with_other_ranks_gets_its_own_digests_and_they_are_expected_next() -> None:
    producer, other = make_producer(), Reading(4)
    producer.expect(HOLD, "")
    producer.on_computed(HOLD, ((5,),), 0, 4)
    producer.take_actions()
    producer.receive(PEER, fetch(ticket=producer.offer(OFFER, 0.0), end=8), 0.0, other)
    assert producer.take_actions() == [StopDigest(named("hold", 1)), Digest(named("hold", 2), other, ((5, 6),), 0, 8)]
    producer.check_integrity()
    producer.on_digested(named("hold", 2), None, 0.0)
    (refusal,) = answers(producer)
    assert isinstance(refusal, Refuse)
    assert refusal.reason is Reason.PREFILL_FAILED
    producer.expect(named("next"), "")
    producer.on_computed(named("next"), ((7,),), 0, 4)
    assert producer.take_actions() == [Release(HOLD), Digest(named("next", 3), other, ((7,),), 0, 4)][1:]


def test_a_reader_whose_digests_do_not_fit_into_a_message_is_refused() -> None:
    producer = make_producer()
    ranks = tuple(((0, tp), ()) for tp in range(1024))
    producer.expect(HOLD, "")
    ticket = producer.offer(replace(OFFER, num_tokens=2000), 0.0)
    producer.receive(PEER, fetch(ticket=ticket, end=2000), 0.0, Reading(1, (((0, 0), ranks),)))
    (refusal,) = answers(producer)
    assert isinstance(refusal, Refuse)
    assert refusal.reason is Reason.OVERLOADED
    producer.receive(PEER, fetch("small", ticket=ticket, end=16), 0.0, Reading(1, (((0, 0), ranks),)))
    assert isinstance(producer.take_actions()[0], Digest)


def test_digests_are_made_again_for_the_blocks_after_a_preemption() -> None:
    producer = make_producer()
    producer.expect(HOLD, "")
    producer.on_computed(HOLD, ((5,),), 0, 4)
    producer.restart(HOLD)
    producer.on_computed(HOLD, ((7,),), 0, 4)
    assert producer.take_actions() == [
        Digest(named("hold", 1), READING, ((5,),), 0, 4),
        StopDigest(named("hold", 1)),
        Digest(named("hold", 2), READING, ((7,),), 0, 4),
    ]
    producer.on_digested(named("hold", 1), shard_digests(b"a", b"b", b"c", b"d"), 0.0)
    assert producer._state.holds[HOLD].digests.of(0, 4) is None


def test_a_failed_digest_is_repeated_for_the_reader() -> None:
    producer = make_producer()
    producer.expect(HOLD, "")
    producer.on_computed(HOLD, ((5,),), 0, 4)
    producer.on_digested(named("hold", 1), None, 0.0)
    producer.take_actions()
    producer.receive(PEER, fetch(ticket=producer.offer(OFFER, 0.0), end=4), 0.0)
    assert producer.take_actions() == [digest_job(2, 0, 4)]


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=6), st.integers(1, 20), st.data())
def test_digests_of_pieces_are_those_of_the_whole(
    ranges: list[tuple[int, int]], unit: int, data: st.DataObject
) -> None:
    """Whatever the pieces, the units of a range are each digested once and are joined in their order."""
    known, jobs = KnownDigests(Reading(unit)), list[tuple[TransferId, int, int]]()
    first, end = sorted(data.draw(st.tuples(st.integers(0, 20), st.integers(0, 20))))
    for start, stop in [*ranges, (first, end)]:
        for gap in known.missing(start * unit, stop * unit):
            jobs.append((named("hold", len(jobs)), *gap))
            known.begin(*jobs[-1])
    for job_id, start, stop in data.draw(st.permutations(jobs)):
        known.finish(job_id, shard_digests(*(b"%d" % each for each in range(start // unit, stop // unit))))
    assert known.jobs == []
    if first < end:
        assert known.of(first * unit, end * unit) == shard_digests(*(b"%d" % each for each in range(first, end)))


def test_holds_take_a_part_of_the_pool_and_a_request_beyond_it_gets_no_ticket() -> None:
    producer = make_producer()
    for name, blocks in (("a", (1, 2)), ("b", (2, 3)), ("c", (4, 0))):
        producer.expect(named(name), "")
        assert producer.offer(replace(OFFER, hold_id=named(name), block_ids=(blocks,)), 0.0), (
            "blocks 1 to 4 are within it"
        )
    producer.expect(named("d"), "x")
    producer.receive(PEER, fetch(rendezvous="x"), 0.0)
    assert producer.offer(replace(OFFER, hold_id=named("d"), block_ids=((5,),)), 0.0) == ""
    (refusal,) = answers(producer)
    assert isinstance(refusal, Refuse)
    assert refusal.reason is Reason.PREFILL_FAILED
    producer.poll(100.0)
    producer.expect(named("e"), "")
    assert producer.offer(replace(OFFER, hold_id=named("e"), block_ids=((1, 2, 3, 4),)), 100.0)
    assert (producer.counts.num_offered, producer.counts.num_without_room) == (4, 1)


def test_a_reader_may_arrive_before_its_request() -> None:
    producer = make_producer()
    producer.receive(PEER, fetch(rendezvous="x"), 0.0)
    assert producer.take_actions() == []
    assert producer.next_deadline == 5.0
    offer(producer, 1.0, "x")
    assert isinstance(producer.take_actions()[0], Digest)


def test_a_parked_reader_is_refused_when_its_request_fails_or_never_arrives() -> None:
    producer = make_producer()
    producer.expect(HOLD, "b")
    producer.receive(PEER, fetch("a", rendezvous="a"), 0.0)
    producer.receive(PEER, fetch("b", rendezvous="b"), 0.0)
    producer.receive(PEER, fetch("c", rendezvous="c"), 0.0)
    producer.withdraw(HOLD, 1.0)
    producer.poll(5.0)
    reasons = [(each.transfer_id, each.reason) for each in answers(producer) if isinstance(each, Refuse)]
    assert reasons == [
        (named("c"), Reason.OVERLOADED),
        (named("b"), Reason.PREFILL_FAILED),
        (named("a"), Reason.UNKNOWN_REQUEST),
    ]
    producer.poll(10.0)
    assert producer.next_deadline is None


@pytest.mark.parametrize(("ends_at", "is_held_until"), [(6.0, 16.0), (11.0, 111.0)])
def test_blocks_are_held_only_for_a_lease_if_their_reader_has_waited_in_vain(
    ends_at: float, is_held_until: float
) -> None:
    producer = make_producer()
    producer.receive(PEER, fetch(rendezvous="x"), 0.0)
    producer.receive("other#1", fetch(rendezvous="x"), 1.0)
    producer.poll(5.0)
    assert refusals(producer) == [(named("load"), Reason.UNKNOWN_REQUEST)]
    assert not producer._state.closed, "the other one still waits"
    producer.poll(6.0)
    assert refusals(producer) == [(named("load"), Reason.UNKNOWN_REQUEST)]
    producer.poll(ends_at)
    offer(producer, ends_at, "x")
    assert producer.next_deadline == is_held_until
    producer.receive(PEER, fetch("again", rendezvous="x"), ends_at)
    assert any(isinstance(action, Digest) for action in producer.take_actions()), "the reader may come again"


def test_a_reader_that_arrives_after_its_request_has_failed_does_not_wait() -> None:
    producer = make_producer()
    producer.expect(HOLD, "x")
    producer.withdraw(HOLD, 0.0)
    producer.receive(PEER, fetch(rendezvous="x"), 1.0)
    (refusal,) = answers(producer)
    assert isinstance(refusal, Refuse)
    assert refusal.reason is Reason.PREFILL_FAILED
    producer.receive(PEER, fetch("again", rendezvous="x"), 1.0)
    assert answers(producer) == []


def test_kv_whose_reader_has_aborted_is_not_held() -> None:
    producer = make_producer()
    producer.receive(PEER, fetch(rendezvous="x"), 0.0)
    producer.receive(PEER, Abort(LOAD), 1.0)
    offer(producer, 2.0, "x")
    assert producer.take_actions() == [Release(HOLD)]
    offer(producer, 2.0, "x")
    assert producer.take_actions() == []


def test_a_reader_that_cancels_does_not_affect_a_waiting_one() -> None:
    """The waiting reader may need nothing: then it ends the hold, which must not end twice."""
    for end, expected in ((16, digest_job()), (0, Release(HOLD))):
        producer = make_producer()
        producer.receive(PEER, fetch("a", rendezvous="x"), 0.0)
        producer.receive(PEER, fetch("b", rendezvous="x", end=end), 0.0)
        producer.receive(PEER, Abort(named("a")), 1.0)
        producer.check_integrity()
        offer(producer, 2.0, "x")
        assert producer.take_actions() == [expected]
        producer.check_integrity()


def test_another_reader_may_come_after_one_has_cancelled() -> None:
    producer = make_producer()
    producer.receive(PEER, fetch(rendezvous="x"), 0.0)
    producer.receive(PEER, Abort(LOAD), 1.0)
    producer.receive("other#1", fetch(rendezvous="x"), 2.0)
    assert answers(producer) == []
    offer(producer, 3.0, "x")
    assert producer.take_actions() == [digest_job()]
    producer.check_integrity()


def test_a_reader_waits_for_a_repeated_request() -> None:
    producer = make_producer()
    producer.expect(HOLD, "x")
    producer.withdraw(HOLD, 0.0)
    producer.expect(named("again"), "x")
    producer.receive(PEER, fetch(rendezvous="x"), 1.0)
    assert answers(producer) == []
    # A reader that has cancelled is not awaited, whenever the request begins.
    producer.receive(PEER, Abort(LOAD), 2.0)
    offer(producer, 3.0, "x")
    assert producer.take_actions() == [Release(HOLD)]


def test_a_withdrawn_rendezvous_is_forgotten_after_a_time_limit() -> None:
    producer = make_producer()
    producer.expect(HOLD, "x")
    producer.withdraw(HOLD, 0.0)
    assert producer.next_deadline == 5.0, "it is forgotten though nothing else happens"
    producer.poll(5.0)
    producer.receive(PEER, fetch(rendezvous="x"), 5.0)
    assert answers(producer) == []


def test_messages_of_the_other_half_break_the_session() -> None:
    with pytest.raises(PeerError, match="DoneAck"):
        make_producer().receive(PEER, DoneAck(LOAD, True), 0.0)
    with pytest.raises(PeerError, match="Fetch"):
        Consumer(OFFICE, resolve, 1e6).receive(PEER, fetch(), 0.0)


@pytest.mark.parametrize("field", ["ticket", "rendezvous", "prompt_digest"])
def test_what_is_kept_of_a_waiting_reader_is_limited(field: str) -> None:
    text: Any = b"x" * 20_000 if field == "prompt_digest" else "x" * 20_000
    with pytest.raises(WireError, match=field):
        CODEC.copy(fetch(**{field: text}))
    assert CODEC.copy(fetch(rendezvous="x" * 4096)) == fetch(rendezvous="x" * 4096)


@pytest.mark.parametrize("field", ["request", "epoch", "child"])
def test_the_name_of_a_waiting_reader_is_limited(field: str) -> None:
    longest, longer = (msgspec.structs.replace(LOAD, **{field: "x" * length}) for length in (16 << 10, (16 << 10) + 1))
    assert CODEC.copy(fetch(transfer_id=longest)) == fetch(transfer_id=longest)
    with pytest.raises(ValueError, match="name of a transfer"):
        fetch(transfer_id=longer)
    sent = msgspec.msgpack.encode({**msgspec.structs.asdict(fetch()), "transfer_id": longer})
    with pytest.raises(WireError, match="name of a transfer"):
        CODEC.decode(CODEC.kinds.index(Fetch), memoryview(sent))


def refusals(producer: Producer) -> list[tuple[TransferId | None, Reason]]:
    return [(each.transfer_id, each.reason) for each in answers(producer) if isinstance(each, Refuse)]


def test_kv_without_attestation_is_granted_without_digests() -> None:
    producer = make_producer(replace(RULES, is_attested=False))
    producer.expect(HOLD, "")
    producer.on_computed(HOLD, ((5,),), 0, 4)
    producer.receive(PEER, fetch(ticket=producer.offer(OFFER, 0.0)), 0.0)
    assert producer.take_actions() == [Send(PEER, Grant(transfer_id=LOAD, lease=10.0, block_ids=((5, 6),)))]


def test_digests_serve_only_ranges_of_whole_units_of_the_same_reading() -> None:
    reading = Reading(4)
    known = KnownDigests(reading)
    ranges = [(0, 8), (4, 8), (2, 8), (0, 6)]
    assert [known.can_serve(reading, *each) for each in ranges] == [True, True, False, False]
    assert not known.can_serve(Reading(4), 0, 8), "another object is another reading"


@pytest.mark.parametrize(("first", "end"), [(2, 8), (0, 6)])
def test_a_reader_of_a_part_of_a_unit_gets_digests_of_its_own(first: int, end: int) -> None:
    reading = Reading(4)
    producer = make_producer()
    producer.expected = reading
    producer.expect(HOLD, "")
    producer.on_computed(HOLD, ((5,),), 0, 6)
    assert producer.take_actions() == [], "pieces end at whole units"
    producer.on_computed(HOLD, ((5,),), 0, 8)
    producer.on_digested(named("hold", 1), shard_digests(b"a", b"b"), 0.0)
    producer.take_actions()
    producer.receive(PEER, fetch(ticket=producer.offer(OFFER, 0.0), first=first, end=end), 0.0, reading)
    assert producer.take_actions() == [Digest(named("hold", 2), reading, ((5, 6),), first, end)]


def test_only_pieces_within_the_range_are_awaited() -> None:
    known = KnownDigests(Reading(4))
    for number, first in enumerate((0, 4, 8)):
        known.begin(named("hold", number), first, first + 4)
    known.finish(named("hold", 1), shard_digests(b"b"))
    assert known.of(4, 8) == shard_digests(b"b")
    assert known.of(0, 8) is None
    assert known.of(4, 12) is None
    known.finish(named("hold", 2), None)
    known.begin(named("hold", 3), 12, 16)
    assert known.missing(8, 10) == [(8, 10)], "nothing beyond the range is missing"


def test_digests_after_a_preemption_are_for_the_reading_that_is_expected_by_then() -> None:
    producer, other = make_producer(), Reading(4)
    producer.expect(named("preempted"), "")
    producer.receive(PEER, fetch(ticket=offer(producer, 0.0)), 0.0, other)
    producer.take_actions()
    producer.restart(named("preempted"))
    producer.on_computed(named("preempted"), ((7,),), 0, 4)
    assert producer.take_actions() == [Digest(named("preempted", 2), other, ((7,),), 0, 4)]


def test_blocks_of_several_holds_are_counted_once_and_until_their_last_release() -> None:
    producer = make_producer()
    for name, blocks in (("a", (1, 2, 3)), ("b", (3, 4)), ("c", (1, 2, 3, 4))):
        producer.expect(named(name), "")
        assert producer.offer(replace(OFFER, hold_id=named(name), block_ids=(blocks,)), 0.0)
    producer.expect(named("unfinished"), "")
    assert (producer.num_held, producer.next_deadline) == (3, 100.0)
    producer.poll(100.0)
    assert (producer.num_held, producer.next_deadline, producer.counts.num_expired) == (0, None, 3)
    producer.expect(named("d"), "")
    assert producer.offer(replace(OFFER, hold_id=named("d"), block_ids=((5, 6, 7, 8),)), 100.0)


def test_one_of_several_readers_gets_the_kv_and_all_are_answered() -> None:
    producer = make_producer()
    producer.receive(PEER, fetch("a", rendezvous="x"), 0.0)
    producer.receive(PEER, fetch("b", rendezvous="x"), 0.0)
    offer(producer, 1.0, "x")
    assert refusals(producer) == [(named("b"), Reason.UNKNOWN_REQUEST)]
    assert producer._state.holds[HOLD].reader is not None


def test_a_request_that_ends_without_kv_stops_its_digests() -> None:
    producer = make_producer()
    producer.expect(HOLD, "x")
    producer.on_computed(HOLD, ((5,),), 0, 4)
    assert not producer.can_be_met("x")
    producer.withdraw(HOLD, 0.0)
    assert producer.take_actions() == [Digest(named("hold", 1), READING, ((5,),), 0, 4), StopDigest(named("hold", 1))]
    assert producer.can_be_met("x")
    producer.check_integrity()


def digesting(now: float = 0.0) -> Producer:
    producer = make_producer()
    producer.receive(PEER, fetch(ticket=offer(producer, 0.0)), now)
    assert producer.take_actions() == [digest_job()]
    return producer


def test_what_has_not_been_granted_is_neither_renewed_nor_done() -> None:
    producer = digesting(99.0)
    producer.receive(PEER, Renew(LOAD), 99.0)
    producer.receive(PEER, Done(LOAD), 99.0)
    assert answers(producer) == [DoneAck(LOAD, False)]
    producer.poll(1000.0)
    assert producer.num_held == 1, "the deadline of its reader ends it"
    producer.on_digested(named("hold", 1), (), 1000.0)
    (granted,) = answers(producer)
    assert isinstance(granted, Grant)


def test_the_time_of_a_transfer_begins_with_its_grant() -> None:
    producer = digesting(1.0)
    producer.on_digested(named("hold", 1), (), 3.0)
    producer.receive(PEER, Done(LOAD), 7.0)
    assert Sent(PEER, 16, 4.0) in producer.take_actions()
    producer.receive(PEER, Done(LOAD), 7.0)
    assert answers(producer) == [DoneAck(LOAD, False)]
    assert producer.counts.num_completed == 1


def test_a_lost_connection_ends_only_what_its_own_readers_wait_for() -> None:
    producer = make_producer()
    producer.receive(PEER, fetch("a", rendezvous="x"), 0.0)
    producer.receive("other#1", fetch("b", rendezvous="y"), 0.0)
    producer.on_lost(PEER)
    offer(producer, 1.0, "x")
    assert producer.take_actions() == [], "nobody has come for it"
    producer.poll(5.0)
    assert refusals(producer) == [(named("b"), Reason.UNKNOWN_REQUEST)]


def test_a_repeated_fetch_has_no_effect() -> None:
    producer = digesting()
    producer.receive(PEER, fetch(ticket="nonsense"), 1.0)
    producer.receive(PEER, fetch("parked", rendezvous="x"), 1.0)
    producer.receive(PEER, fetch("parked", rendezvous="x"), 4.0)
    assert answers(producer) == []
    producer.poll(6.0)
    assert refusals(producer) == [(named("parked"), Reason.UNKNOWN_REQUEST)]


def test_what_is_recorded_of_ended_requests_is_limited() -> None:
    producer = make_producer()
    for name in ("a", "b", "c"):
        producer.expect(named(name), name)
        producer.withdraw(named(name), 0.0)
    producer.receive(PEER, fetch(rendezvous="c"), 0.0)
    assert len(producer._state.closed) == RULES.max_parked
    assert refusals(producer) == [], "the reader of the third waits for its deadline"


def test_all_tokens_of_a_request_that_has_ended_may_be_read() -> None:
    producer = make_producer()
    producer.expect(HOLD, "")
    ticket = OFFICE.issue(Ticket("p", "epoch", HOLD, PROMPT, 32))
    producer.receive(PEER, fetch("early", ticket=ticket), 0.0)
    producer.offer(OFFER, 0.0)
    producer.receive(PEER, fetch("long", ticket=ticket, end=33), 0.0)
    assert refusals(producer) == [(named("early"), Reason.UNKNOWN_REQUEST), (named("long"), Reason.INVALID_RANGE)]
    producer.receive(PEER, fetch(ticket=ticket, end=32), 0.0)
    assert producer.take_actions() == [digest_job(1, 0, 32)]


# ---- The receiving half ----

GRANT = Grant(transfer_id=LOAD, lease=9.0, block_ids=((5, 6),))


def source(**changes: Any) -> RemotePrefill:
    ticket = OFFICE.issue(Ticket("p", "epoch", HOLD, PROMPT, 32))
    given: dict[str, Any] = {"address": ADDRESS, "engine_id": "p", "ticket": ticket, **changes}
    return RemotePrefill(**given)


def resolve(address: Address) -> Address:
    if address == UNKNOWN:
        raise PeerError("not in the list")
    return address


def begun(*names: str, given: RemotePrefill | None = None, consumer: Consumer | None = None) -> Consumer:
    """The scheduler's name of each load is `named(NAME, 1)`."""
    consumer = consumer or Consumer(OFFICE, resolve, 1e6)
    for name in map(named, names):
        consumer.want(name, given or source(), PROMPT)
        assert consumer.wanted(name) == (given or source())
        consumer.begin(name, named(name.request, 1), ((1,),), 0, 16, now=0.0)
        assert consumer.wanted(name) is None
    return consumer


def ends(consumer: Consumer) -> list[tuple[TransferId, str]]:
    """Returns the loads that have ended, and why."""
    actions = consumer.take_actions()
    return [(each.load.transfer_id, each.reason) for each in actions if isinstance(each, Ended)]


def the_load(consumer: Consumer) -> Load:
    return consumer._loads[LOAD]


def asking(consumer: Consumer | None = None) -> Consumer:
    consumer = begun("load", consumer=consumer)
    assert consumer.take_actions() == [Dial(ADDRESS)]
    consumer.on_dialled(ADDRESS, PEER)
    consumer.on_open(PEER, "p")
    (sent,) = consumer.take_actions()
    assert isinstance(sent, Send)
    assert isinstance(sent.message, Fetch)
    consumer.check_integrity()
    return consumer


def reading(consumer: Consumer | None = None) -> Consumer:
    consumer = asking(consumer)
    consumer.receive(PEER, GRANT, 0.0)
    assert consumer.take_actions() == [Read(the_load(consumer), GRANT)]
    return consumer


def confirming() -> Consumer:
    consumer = reading()
    consumer.on_read(the_load(consumer), (), is_complete=True)
    assert consumer.take_actions() == [Send(PEER, Done(LOAD))]
    return consumer


def test_a_load_ends_when_the_producer_has_confirmed_it() -> None:
    consumer = confirming()
    consumer.receive(PEER, DoneAck(LOAD, True), 1.0)
    assert ends(consumer) == [(named("load", 1), "")]
    assert consumer.num_loads == 0
    assert consumer.next_deadline is None


def test_bad_ranges_are_passed_on() -> None:
    consumer, bad = reading(), (BadRange(0, 0, 16),)
    consumer.on_read(the_load(consumer), bad, is_complete=True)
    consumer.receive(PEER, DoneAck(LOAD, True), 1.0)
    ended = consumer.take_actions()[-1]
    assert isinstance(ended, Ended)
    assert (ended.load.bad_ranges, ended.reason) == (bad, "")


@pytest.mark.parametrize("detail", ["", "the pool is full"])
def test_a_refusal_without_detail_still_has_a_reason(detail: str) -> None:
    consumer = asking()
    consumer.receive(PEER, Refuse(LOAD, Reason.OVERLOADED, detail), 1.0)
    ((_, reason),) = ends(consumer)
    assert reason
    consumer = reading()
    load = the_load(consumer)
    consumer.on_lost(PEER, "")
    consumer.on_read(load, (), is_complete=False)
    ((_, reason),) = ends(consumer)
    assert reason


def test_kv_that_is_not_confirmed_is_not_used() -> None:
    consumer = confirming()
    consumer.receive(PEER, DoneAck(LOAD, False), 1.0)
    ((_, reason),) = ends(consumer)
    assert "lease" in reason


def test_a_lease_is_renewed_only_during_the_read() -> None:
    consumer = reading()
    assert consumer.next_deadline == 3.0
    consumer.poll(2.9)
    assert consumer.take_actions() == []
    consumer.poll(3.0)
    assert consumer.take_actions() == [Send(PEER, Renew(LOAD))]
    assert consumer.next_deadline == 6.0
    consumer.on_read(the_load(consumer), (), is_complete=True)
    assert consumer.next_deadline is None


@pytest.mark.parametrize("make", [asking, confirming])
def test_a_lost_connection_ends_a_load_that_reads_nothing(make: Any) -> None:
    consumer = make()
    consumer.on_lost(PEER, "gone")
    assert ends(consumer) == [(named("load", 1), "gone")]
    consumer.check_integrity()


def test_a_read_ends_only_with_the_workers_reports() -> None:
    consumer = reading()
    load = the_load(consumer)
    consumer.on_lost(PEER, "gone")
    assert consumer.take_actions() == [Cancel(load)]
    consumer.poll(1000.0)
    consumer.cancel(LOAD)
    assert consumer.take_actions() == []
    assert consumer.num_loads == 1
    consumer.on_read(load, (), is_complete=True)
    assert consumer.take_actions() == [Ended(load, "gone")]


def test_a_cancelled_load_ends_in_every_state_and_the_producer_is_told() -> None:
    for consumer in (asking(), confirming()):
        load = the_load(consumer)
        consumer.cancel(LOAD)
        assert consumer.take_actions() == [Send(PEER, Abort(LOAD)), Ended(load, CANCELLED)]
        consumer.cancel(LOAD)
        assert consumer.take_actions() == []
    consumer = reading()
    consumer.cancel(LOAD)
    assert consumer.take_actions() == [Send(PEER, Abort(LOAD)), Cancel(the_load(consumer))]


def test_an_answer_to_a_load_that_has_ended_has_no_effect() -> None:
    consumer = asking()
    consumer.cancel(LOAD)
    consumer.take_actions()
    for message in (GRANT, Refuse(LOAD, Reason.OVERLOADED, ""), DoneAck(LOAD, True)):
        consumer.receive(PEER, message, 1.0)
        consumer.receive("other#1", message, 1.0)
    assert consumer.take_actions() == []


def open_line(consumer: Consumer, engine_id: str = "p") -> list[Any]:
    """Returns what is sent to the peer when it is connected."""
    consumer.take_actions()
    consumer.on_dialled(ADDRESS, PEER)
    consumer.on_open(PEER, engine_id)
    return [each.message for each in consumer.take_actions() if isinstance(each, Send)]


def test_a_load_that_ends_before_its_fetch_leaves_nothing_held() -> None:
    consumer = begun("load")
    consumer.take_actions()
    consumer.cancel(LOAD)
    assert ends(consumer) == [(named("load", 1), CANCELLED)]
    (fetch,) = open_line(consumer)
    assert (fetch.first, fetch.end) == (0, 0)
    consumer.check_integrity()
    assert not consumer._loads


def test_a_load_that_ends_before_its_fetch_is_forgotten_with_the_connection() -> None:
    consumer = begun("load")
    consumer.cancel(LOAD)
    consumer.on_dialled(ADDRESS, PEER)
    consumer.take_actions()
    consumer.on_lost(PEER, "nobody is there")
    assert consumer.take_actions() == []
    assert not consumer._loads


def test_an_address_that_is_not_in_the_list_is_not_asked() -> None:
    consumer = begun("load", given=source(address=UNKNOWN))
    assert ends(consumer) == [(named("load", 1), "not in the list")]
    consumer.want(named("none"), source(address=UNKNOWN), PROMPT)
    consumer.cancel(named("none"))
    assert consumer.take_actions() == []
    assert not consumer._loads


def test_an_answer_from_another_peer_has_no_effect() -> None:
    consumer = asking()
    consumer.receive("other#1", GRANT, 1.0)
    assert consumer.take_actions() == []


def test_another_engine_at_the_address_gets_no_fetch() -> None:
    consumer = begun("load")
    consumer.on_dialled(ADDRESS, PEER)
    consumer.on_open(PEER, "q")
    assert ends(consumer) == [(named("load", 1), "the engine there is q, not p")]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"ticket": "nonsense"}, "does not belong to this cluster"),
        ({"ticket": "\u00e4"}, "malformed"),
        ({"engine_id": "q"}, "issued by engine p, not by q"),
        ({"ticket": OFFICE.issue(Ticket("p", "epoch", HOLD, b"other", 32))}, "another prompt"),
    ],
)
def test_a_ticket_that_would_be_refused_is_not_sent(changes: dict[str, Any], reason: str) -> None:
    consumer = begun("load", given=source(**changes))
    (ended,) = consumer.take_actions()
    assert isinstance(ended, Ended)
    assert reason in ended.reason


@pytest.mark.parametrize("is_connected", [False, True])
def test_a_producer_is_told_that_nothing_is_needed(is_connected: bool) -> None:
    consumer = Consumer(OFFICE, resolve, 1e6)
    if is_connected:
        begun("load", consumer=consumer)
        open_line(consumer)
    consumer.want(named("none"), source(), PROMPT)
    consumer.cancel(named("none"))
    consumer.cancel(named("none"))
    sent = [each.message for each in consumer.take_actions() if isinstance(each, Send)]
    (fetch,) = sent if is_connected else open_line(consumer)
    assert (fetch.transfer_id, fetch.first, fetch.end) == (named("none"), 0, 0)
    assert consumer.num_loads == is_connected
    assert consumer.counts.num_not_needed == 1


def test_several_loads_use_one_connection() -> None:
    consumer = begun("a", "b")
    assert consumer.take_actions() == [Dial(ADDRESS)]
    sent = open_line(consumer)
    begun("load", consumer=consumer)
    sent += [each.message for each in consumer.take_actions() if isinstance(each, Send)]
    assert [each.transfer_id for each in sent] == [named("a"), named("b"), LOAD]
    consumer.receive(PEER, GRANT, 1.0)
    assert consumer.take_actions() == [Read(the_load(consumer), GRANT)]
    consumer.check_integrity()


def test_a_rendezvous_needs_no_known_engine_id() -> None:
    consumer = begun("load", given=source(ticket="", rendezvous="x", engine_id="earlier"))
    assert len(open_line(consumer)) == 1
    assert consumer.num_loads == 1


def test_answers_out_of_turn_have_no_effect() -> None:
    refusal, confirmation = Refuse(LOAD, Reason.OVERLOADED, "no"), DoneAck(LOAD, True)
    for make, messages in (
        (asking, [confirmation]),
        (reading, [GRANT, refusal, confirmation]),
        (confirming, [GRANT, refusal]),
    ):
        consumer = make()
        for message in messages:
            consumer.receive(PEER, message, 1.0)
        assert consumer.take_actions() == []
        assert consumer.num_loads == 1


def test_the_producer_is_told_when_a_read_has_failed() -> None:
    for is_refused, reason in ((False, "the KV could not be read"), (True, "no digests")):
        consumer = reading()
        load = the_load(consumer)
        if is_refused:
            consumer.on_read_refused(load, reason)
        else:
            consumer.on_read(load, (), is_complete=False)
        assert consumer.take_actions() == [Send(PEER, Abort(LOAD)), Ended(load, reason)]


def test_the_lease_of_an_overdue_read_is_not_renewed() -> None:
    """Its core hangs, as it has not cancelled the load: the thread of the connections must not hold blocks for it."""
    consumer = reading(Consumer(OFFICE, resolve, 6.0))
    renewals = 0
    while (when := consumer.next_deadline) is not None and when < 1000.0:
        consumer.poll(when)
        renewals += consumer.take_actions().count(Send(PEER, Renew(LOAD)))
    assert renewals == 20


def test_the_lease_of_a_cancelled_read_is_not_renewed() -> None:
    consumer = reading()
    consumer.cancel(LOAD)
    assert consumer.next_deadline is None


@pytest.mark.parametrize("lease", [0.0, -1.0, 1e6, float("nan"), float("inf")])
def test_an_impossible_lease_breaks_the_session(lease: float) -> None:
    with pytest.raises(PeerError, match="lease"):
        asking().receive(PEER, Grant(transfer_id=LOAD, lease=lease, block_ids=()), 0.0)


def test_states_have_a_limit_of_their_own() -> None:
    producer = make_producer(replace(RULES, first_state=10, max_held_states=1))
    names = [named(letter) for letter in "abc"]
    for name in names:
        producer.expect(name, "")
    tickets = [
        producer.offer(replace(OFFER, hold_id=name, block_ids=blocks), 0.0)
        for name, blocks in zip(names, (((5,), (10,)), ((6,), (11,)), ((7,), (0,))), strict=True)
    ]
    assert [bool(ticket) for ticket in tickets] == [True, False, True]
    producer.check_integrity()

"""Mutual authentication and sealed frames: valid peers exchange data, and anything else raises only PeerError."""

import contextlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kv_transfer.authentication import MAX_READ_BYTES, VERSION, Authentication, Opener, Sealer
from penstock.utils.errors import PeerError

KEY = b"cluster key"
GREETING_BYTES = 36
NONCES = (b"c" * 32, b"s" * 32)


def sides(
    client_key: bytes = KEY, server_key: bytes = KEY, purposes: tuple[bytes, bytes] = (b"data", b"data")
) -> tuple[Authentication, Authentication]:
    return Authentication(client_key, True, purposes[0]), Authentication(server_key, False, purposes[1])


def converse(client: Authentication, server: Authentication, piece: int = 1 << 20) -> None:
    """Delivers what each side sends to the other, in pieces of `piece` bytes, until there is nothing more to send."""
    to_server, to_client = client.greeting(), server.greeting()
    while to_server or to_client:
        sent, to_server = to_server, b""
        for at in range(0, len(sent), piece):
            to_client += server.receive(sent[at : at + piece])
        sent, to_client = to_client, b""
        for at in range(0, len(sent), piece):
            to_server += client.receive(sent[at : at + piece])


def connected() -> tuple[Authentication, Authentication]:
    client, server = sides()
    converse(client, server)
    return client, server


@pytest.mark.parametrize("piece", [1, 7, 36, 1000])
def test_peers_with_the_same_key_authenticate_and_exchange_frames_both_ways(piece: int):
    client, server = sides()
    converse(client, server, piece)
    assert client.is_done
    assert server.is_done
    for sender, receiver in ((client, server), (server, client)):
        sealer, opener = sender.sealer(), receiver.opener(100)
        stream = b"".join(sealer.seal(payload) for payload in (b"one", b"", b"x" * 100))
        received = [got for at in range(0, len(stream), piece) for got in opener.feed(stream[at : at + piece])]
        assert received == [b"one", b"", b"x" * 100]


@pytest.mark.parametrize(("client_key", "client_purpose"), [(b"other", b"data"), (KEY, b"control"), (b"", b"data")])
def test_another_key_or_purpose_is_refused_by_the_server_before_it_proves_anything(client_key, client_purpose):
    client, server = sides(client_key, purposes=(client_purpose, b"data"))
    server_greeting = server.greeting()
    assert server.receive(client.greeting()) == b""
    with pytest.raises(PeerError, match="cluster key"):
        server.receive(client.receive(server_greeting))
    assert not server.is_done


def test_a_server_without_the_key_is_refused():
    client, server = sides()
    client.receive(server.greeting())
    with pytest.raises(PeerError, match="cluster key"):
        client.receive(b"\x00" * 32)
    with pytest.raises(PeerError, match="cluster key"):
        client.receive(b"more")
    assert not client.is_done


def test_a_client_without_the_key_learns_no_proof_by_reflecting_the_servers_messages():
    first, second = Authentication(KEY, False, b"data"), Authentication(KEY, False, b"data")
    assert first.receive(second.greeting()) == b""
    assert second.receive(first.greeting()) == b""
    assert not first.is_done
    # Another client's proof for one server is invalid for the other server.
    client = Authentication(KEY, True, b"data")
    proof = client.receive(second.greeting())
    with pytest.raises(PeerError):
        first.receive(proof)


def test_a_server_that_reflects_the_clients_proof_is_refused():
    client = Authentication(KEY, True, b"data")
    proof = client.receive(client.greeting())
    assert len(proof) == 32
    with pytest.raises(PeerError):
        client.receive(proof)


def test_a_recorded_handshake_cannot_be_replayed():
    client = Authentication(KEY, True, b"data", nonce=NONCES[0])
    server = Authentication(KEY, False, b"data", nonce=NONCES[1])
    recorded = client.greeting() + client.receive(server.greeting())
    assert server.receive(recorded)
    assert server.is_done
    with pytest.raises(PeerError):
        Authentication(KEY, False, b"data").receive(recorded)


def test_data_that_directly_follows_the_handshake_is_kept_for_the_opener():
    client, server = sides()
    proof = client.receive(server.greeting())
    answer = server.receive(client.greeting() + proof)
    client.receive(answer + server.sealer().seal(b"early"))
    assert client.is_done
    assert client.opener(10).feed(client.rest) == [b"early"]


def test_a_client_that_sends_data_before_the_server_is_authenticated_is_refused():
    client, server = sides()
    proof = client.receive(server.greeting())
    with pytest.raises(PeerError, match="before the server"):
        server.receive(client.greeting() + proof + b"early")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"GET / HTTP/1.1\r\n", "does not speak"),
        (b"P\x00", "does not speak"),
        (b"PSK" + bytes([VERSION + 1]), f"version {VERSION + 1}"),
        (b"PSK" + bytes([VERSION]) + b"\x00" * MAX_READ_BYTES, "at once"),
    ],
)
def test_other_protocols_and_versions_and_excess_data_are_refused_at_once(data: bytes, message: str):
    for is_client in (True, False):
        side = Authentication(KEY, is_client, b"data")
        with pytest.raises(PeerError, match=message):
            side.receive(data)


@given(st.lists(st.binary(max_size=120), max_size=8), st.booleans(), st.booleans())
def test_arbitrary_bytes_never_authenticate_and_raise_only_a_peer_error(chunks, is_client, with_greeting):
    side = Authentication(KEY, is_client, b"data")
    if with_greeting:
        chunks = [Authentication(KEY, not is_client, b"data").greeting(), *chunks]
    for chunk in chunks:
        with contextlib.suppress(PeerError):
            side.receive(chunk)
        assert not side.is_done
        assert len(side._buffer) <= GREETING_BYTES


def frames() -> tuple[list[bytes], Opener]:
    client, server = connected()
    sealer = client.sealer()
    return [sealer.seal(payload) for payload in (b"first", b"second", b"third")], server.opener(64)


@pytest.mark.parametrize("order", [(1,), (0, 0), (0, 2), (1, 0)])
def test_frames_that_are_repeated_reordered_or_missing_are_refused(order):
    made, opener = frames()
    with pytest.raises(PeerError, match="altered, repeated or reordered"):
        opener.feed(b"".join(made[index] for index in order))


def test_frames_sent_back_to_their_sender_are_refused():
    client, server = connected()
    with pytest.raises(PeerError):
        client.opener(64).feed(client.sealer().seal(b"mirror"))
    assert server.opener(64).feed(client.sealer().seal(b"mirror")) == [b"mirror"]


def test_frames_of_another_connection_are_refused():
    made, _ = frames()
    _, opener = frames()
    with pytest.raises(PeerError):
        opener.feed(made[0])


def sealed_with_fixed_nonces() -> tuple[list[bytes], Opener]:
    """Returns the same frames at each call, and a fresh opener for them."""
    client = Authentication(KEY, True, b"data", nonce=NONCES[0])
    server = Authentication(KEY, False, b"data", nonce=NONCES[1])
    converse(client, server)
    sealer = client.sealer()
    return [sealer.seal(payload) for payload in (b"first", b"second")], server.opener(64)


def test_every_changed_bit_of_a_frame_is_detected():
    for at in range(4 + len(b"first") + 32):
        for bit in range(8):
            made, opener = sealed_with_fixed_nonces()
            changed = bytearray(made[0])
            changed[at] ^= 1 << bit
            with pytest.raises(PeerError):
                opener.feed(bytes(changed) + made[1] * 3)


def test_a_frame_above_the_limit_is_refused_by_its_header_alone():
    _, opener = frames()
    with pytest.raises(PeerError, match="the limit is 64"):
        opener.feed(struct.pack("<I", 65))


def test_a_truncated_frame_yields_nothing():
    made, opener = frames()
    assert opener.feed(made[0][:-1]) == []
    assert opener.feed(made[0][-1:]) == [b"first"]


@given(st.lists(st.binary(max_size=300), max_size=6))
def test_an_opener_takes_arbitrary_bytes_with_bounded_memory(chunks):
    opener = Opener(b"key", 64)
    for chunk in chunks:
        with contextlib.suppress(PeerError):
            assert opener.feed(chunk) == []
        assert len(opener._buffer) <= 4 + 64 + 32


@given(st.lists(st.binary(max_size=64), max_size=8), st.integers(1, 50))
def test_payloads_are_recovered_however_the_stream_is_split(payloads, piece):
    sealer, opener = Sealer(b"key"), Opener(b"key", 64)
    stream = b"".join(sealer.seal(payload) for payload in payloads)
    assert [got for at in range(0, len(stream), piece) for got in opener.feed(stream[at : at + piece])] == payloads


def test_reading_num_missing_bytes_never_reads_beyond_a_message():
    client, server = sides()
    from_server = server.greeting()
    assert client.num_missing == len(from_server)
    proof = client.receive(from_server)
    assert server.num_missing == len(client.greeting())
    server.receive(client.greeting())
    assert server.num_missing == len(proof)
    answer = server.receive(proof)
    assert client.num_missing == len(answer)
    client.receive(answer)
    stream, opener = server.sealer().seal(b"frame") + b"raw bytes", client.opener(10)
    got: list[bytes] = []
    while not got:
        count = opener.num_missing
        got, stream = opener.feed(stream[:count]), stream[count:]
    assert (got, stream) == ([b"frame"], b"raw bytes")

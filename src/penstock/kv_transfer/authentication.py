"""Mutual authentication of two processes that share a cluster key, over any byte stream (sans-IO).

    both       greeting: magic, version, nonce (32 random bytes)
    client     proof: HMAC-SHA256(key, version, purpose, "client", the client's nonce, the server's nonce)
    server     verifies it, then sends the same proof with the role "server"

Both nonces, the role and the purpose of the connection are part of every proof. So a proof is invalid on another
connection, in the other direction, or for another purpose, and a server proves nothing to a client without the key.

Both sides then derive the same session key, and from it one key for each direction. A `Sealer` frames payloads for the
`Opener` of the other side: length, payload, and an HMAC-SHA256 of the frame's number, its length and the payload. A
frame that was changed, repeated, dropped, reordered or reflected is a `PeerError`. Payloads are not encrypted: the key
protects integrity, not secrecy.

Lifecycle: send `greeting()`; pass received bytes to `receive` and send what it returns, until `is_done`; then call
`sealer()` and `opener()`, and pass `rest` to the opener first. Failure: all invalid input from a peer raises PeerError,
the same one again on each later call; the connection must then be closed. Memory: before authentication at most one
message of the handshake is kept, afterwards at most one frame of the length that the caller allows. Give `receive` the
bytes of one read from the socket at a time, of at most `MAX_READ_BYTES`.
"""

from __future__ import annotations

import hmac
import os
import struct

from penstock.utils.errors import PeerError

VERSION = 1
MAX_READ_BYTES = 64 << 10

_MAGIC = b"PSK"
_NONCE_BYTES = 32
_TAG_BYTES = 32
_GREETING_BYTES = len(_MAGIC) + 1 + _NONCE_BYTES
_LENGTH = struct.Struct("<I")
_NUMBER = struct.Struct("<Q")


def _prove(key: bytes, label: bytes, purpose: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    fields = (b"penstock", bytes([VERSION]), purpose, label, client_nonce, server_nonce)
    return hmac.digest(key, b"".join(_LENGTH.pack(len(each)) + each for each in fields), "sha256")


class Authentication:
    """One side of one connection. `purpose` names what the connection is for and must be equal on both sides.

    An empty key is allowed and proves nothing. `nonce` is for tests: it must be random and used once.
    """

    def __init__(self, key: bytes, is_client: bool, purpose: bytes, *, nonce: bytes | None = None) -> None:
        self._key = key
        self._is_client = is_client
        self._purpose = purpose
        self._nonce = os.urandom(_NONCE_BYTES) if nonce is None else nonce
        assert len(self._nonce) == _NONCE_BYTES, len(self._nonce)
        self._peer_nonce = b""
        self._buffer = b""
        self._error: PeerError | None = None
        self.is_done = False
        self.rest = b""
        """The bytes after the handshake: the beginning of the first frames."""

    def greeting(self) -> bytes:
        """Returns the first message of either side."""
        return _MAGIC + bytes([VERSION]) + self._nonce

    @property
    def num_missing(self) -> int:
        """Returns how many bytes complete the peer's next message; a caller that reads no more leaves `rest` empty."""
        return (_TAG_BYTES if self._peer_nonce else _GREETING_BYTES) - len(self._buffer)

    def receive(self, data: bytes) -> bytes:
        """Takes received bytes and returns the bytes to send, which may be empty. Raises PeerError."""
        if self._error is not None:
            raise self._error
        assert not self.is_done, "data after the handshake belongs to the opener"
        try:
            return self._receive(data)
        except PeerError as error:
            self._error = error
            self._buffer = b""
            raise

    def _receive(self, data: bytes) -> bytes:
        if len(data) > MAX_READ_BYTES:
            raise PeerError(f"the peer sent {len(data)} bytes at once before it was authenticated")
        self._buffer += data
        answer = b""
        if not self._peer_nonce:
            self._check_greeting()
            if len(self._buffer) < _GREETING_BYTES:
                return b""
            self._peer_nonce = self._buffer[_GREETING_BYTES - _NONCE_BYTES : _GREETING_BYTES]
            self._buffer = self._buffer[_GREETING_BYTES:]
            if self._is_client:
                answer = self._label(b"client")
        if len(self._buffer) < _TAG_BYTES:
            return answer
        proof, self._buffer = self._buffer[:_TAG_BYTES], self._buffer[_TAG_BYTES:]
        if not hmac.compare_digest(proof, self._label(b"server" if self._is_client else b"client")):
            raise PeerError(
                f"the peer has not proved that it has the cluster key for {self._purpose.decode(errors='replace')!r}: "
                "set the same key for all engines"
            )
        if not self._is_client:
            answer = self._label(b"server")
            if self._buffer:
                raise PeerError("the peer sent data before the server was authenticated")
        self.is_done = True
        self.rest, self._buffer = self._buffer, b""
        return answer

    def _check_greeting(self) -> None:
        """Checks the greeting as soon as its first bytes are received: another program may never send the rest."""
        if self._buffer[: len(_MAGIC)] != _MAGIC[: len(self._buffer)]:
            raise PeerError("the peer does not speak this protocol: check the address and the port")
        version = self._buffer[len(_MAGIC) : len(_MAGIC) + 1]
        if version and version[0] != VERSION:
            raise PeerError(f"the peer speaks version {version[0]} of the protocol, not {VERSION}: update both engines")

    def _label(self, label: bytes) -> bytes:
        ours, theirs = self._nonce, self._peer_nonce
        nonces = (ours, theirs) if self._is_client else (theirs, ours)
        return _prove(self._key, label, self._purpose, *nonces)

    def sealer(self) -> Sealer:
        """Returns the object that makes the frames to send."""
        return Sealer(self._direction_key(from_client=self._is_client))

    def opener(self, max_bytes: int) -> Opener:
        """Returns the object that verifies received frames, with payloads of at most `max_bytes`."""
        return Opener(self._direction_key(from_client=not self._is_client), max_bytes)

    def _direction_key(self, *, from_client: bool) -> bytes:
        assert self.is_done, "there is no session key before the end of the handshake"
        return hmac.digest(self._label(b"session"), b"client" if from_client else b"server", "sha256")


def _tag(key: bytes, number: int, length: bytes, payload: bytes | memoryview) -> bytes:
    mac = hmac.new(key, _NUMBER.pack(number) + length, "sha256")
    mac.update(payload)
    return mac.digest()


class Sealer:
    """Makes frames for one direction of one connection, to be sent in the order in which they were made."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0

    def seal(self, payload: bytes) -> bytes:
        length = _LENGTH.pack(len(payload))
        tag = _tag(self._key, self._number, length, payload)
        self._number += 1
        return b"".join((length, payload, tag))


class Opener:
    """Extracts payloads from the frames of one direction, each only after its MAC has been verified."""

    def __init__(self, key: bytes, max_bytes: int) -> None:
        self._key = key
        self._max_bytes = max_bytes
        self._number = 0
        self._buffer = bytearray()
        self._error: PeerError | None = None

    @property
    def num_missing(self) -> int:
        """Returns how many bytes are certain to follow: the rest of the next length or of the announced frame."""
        if len(self._buffer) < _LENGTH.size:
            return _LENGTH.size - len(self._buffer)
        return _LENGTH.size + _LENGTH.unpack_from(self._buffer)[0] + _TAG_BYTES - len(self._buffer)

    def feed(self, data: bytes) -> list[bytes]:
        """Returns the payloads that `data` completes. Raises PeerError, even after a valid frame in `data`."""
        if self._error is not None:
            raise self._error
        try:
            return self._feed(data)
        except PeerError as error:
            self._error = error
            self._buffer.clear()
            raise

    def _feed(self, data: bytes) -> list[bytes]:
        self._buffer += data
        payloads: list[bytes] = []
        start = 0
        with memoryview(self._buffer) as view:
            while len(view) - start >= _LENGTH.size:
                (num_bytes,) = _LENGTH.unpack_from(view, start)
                if num_bytes > self._max_bytes:
                    raise PeerError(f"the peer announces a frame of {num_bytes} bytes; the limit is {self._max_bytes}")
                payload_start = start + _LENGTH.size
                payload_end = payload_start + num_bytes
                end = payload_end + _TAG_BYTES
                if end > len(view):
                    break
                payload = bytes(view[payload_start:payload_end])
                tag = _tag(self._key, self._number, bytes(view[start:payload_start]), payload)
                if not hmac.compare_digest(tag, view[payload_end:end]):
                    raise PeerError(f"frame {self._number} of the peer has been altered, repeated or reordered")
                self._number += 1
                payloads.append(payload)
                start = end
        del self._buffer[:start]
        return payloads

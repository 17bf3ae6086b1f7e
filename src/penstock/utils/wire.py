"""Typed messages over a byte stream: what one process of Penstock says to another.

A frame is a header (payload length, uint32; message type, uint8; little-endian) and the message as msgpack. Both ends
hold the same table of types, and a payload is decoded into exactly the type that its header names, field by field:
whatever does not fit is a `WireError`. Nothing that arrives can run code, and no frame can ask for unbounded memory.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import msgspec

from penstock.utils.errors import WireError

_HEADER = struct.Struct("<IB")
MAX_PAYLOAD_BYTES = 256 << 20


class Codec:
    """Messages of the given dataclasses, to frames and back. A type's number is its place in the arguments."""

    def __init__(self, *types: type) -> None:
        self._numbers = {kind: number for number, kind in enumerate(types)}
        self._decoders = [msgspec.msgpack.Decoder(kind, dec_hook=_restored) for kind in types]
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_plain)

    def encode(self, message: Any) -> bytes:
        """One frame. Raises WireError when the message is larger than a frame may be."""
        payload = self._encoder.encode(message)
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise WireError(f"a {type(message).__name__} of {len(payload)} bytes exceeds {MAX_PAYLOAD_BYTES}")
        return _HEADER.pack(len(payload), self._numbers[type(message)]) + payload

    def decode(self, number: int, payload: memoryview) -> Any:
        if number >= len(self._decoders):
            raise WireError(f"there is no message type {number}")
        try:
            return self._decoders[number].decode(payload)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise WireError(f"a message of type {number} does not decode: {error}") from None


def _plain(value: Any) -> Any:
    """The built-in form of a number or a container of another library (numpy's, say), and of a path."""
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"{type(value).__name__} is not part of a message")


def _restored(kind: type, value: Any) -> Any:
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise NotImplementedError(f"{kind.__name__} is not part of a message")


class FrameReader:
    """Bytes in, messages out, without a socket of its own."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """The messages that `data` completes. Raises WireError."""
        self._buffer += data
        messages: list[Any] = []
        start = 0
        with memoryview(self._buffer) as view:
            while len(view) - start >= _HEADER.size:
                length, number = _HEADER.unpack_from(view, start)
                if length > MAX_PAYLOAD_BYTES:
                    raise WireError(f"a frame of {length} bytes exceeds {MAX_PAYLOAD_BYTES}")
                end = start + _HEADER.size + length
                if end > len(view):
                    break
                with view[start + _HEADER.size : end] as payload:
                    messages.append(self._codec.decode(number, payload))
                start = end
        del self._buffer[:start]
        return messages

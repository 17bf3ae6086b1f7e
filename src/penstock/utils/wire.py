"""Typed messages over a byte stream, between Penstock processes.

A frame is a header (payload length, uint32; message type, uint8; little-endian) and the message as msgpack. Both ends
hold the same table of types, and a payload is decoded into exactly the type that its header names, field by field;
anything else raises `WireError`. Received data cannot run code, and no frame can cause unbounded allocation.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from penstock.utils.errors import WireError

_HEADER = struct.Struct("<IB")
MAX_PAYLOAD_BYTES = 2 << 30
_ARRAY_KINDS = "biuf"
_PLAIN: dict[type, Callable[[Any], Any]] = {Integral: int, Real: float, Mapping: dict, Sequence: list, Path: str}

_Kind = TypeVar("_Kind", bound=type)


class OpenMessage:
    """Base class of messages with an open set of kinds: connectors, including out-of-tree ones, define their own. A
    field annotated with a subclass accepts any registered kind (`register_kind`), including nested ones.
    """

    __slots__ = ()


_KINDS: dict[str, type] = {}


def register_kind(kind: _Kind) -> _Kind:
    """Class decorator: makes an `OpenMessage` decodable in every process that imports its module.

    The class must also be a frozen `msgspec.Struct` with a tag of its own, usually `tag=True`.
    """
    config = getattr(kind, "__struct_config__", None)
    if config is None or config.tag is None or not config.frozen or not issubclass(kind, OpenMessage):
        raise TypeError(f"{kind.__name__} must be an OpenMessage and a frozen msgspec.Struct with a tag")
    known = _KINDS.setdefault(config.tag, kind)
    if (known.__module__, known.__qualname__) != (kind.__module__, kind.__qualname__):
        raise TypeError(f"the tag {config.tag!r} of {kind.__module__} is taken by {known.__module__}: choose another")
    _KINDS[config.tag] = kind
    return kind


def registered_kinds() -> tuple[type, ...]:
    """All kinds, in the order of their registration."""
    return tuple(_KINDS.values())


class Codec:
    """Encodes messages of the given Structs or dataclasses as frames and decodes them. A type's number is its index in
    the arguments. Arrays of numbers are sent as dtype, shape and bytes.
    """

    def __init__(self, *types: type) -> None:
        self.kinds = types
        self._numbers = {kind: number for number, kind in enumerate(types)}
        self._decoders = [msgspec.msgpack.Decoder(kind, dec_hook=_restored) for kind in types]
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_plain)

    def encode(self, message: Any) -> bytes:
        """Returns one frame. Raises WireError if the message exceeds the maximum size of a frame."""
        payload = self._encoder.encode(message)
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise WireError(f"a {type(message).__name__} of {len(payload)} bytes exceeds {MAX_PAYLOAD_BYTES}")
        return _HEADER.pack(len(payload), self._numbers[type(message)]) + payload

    def decode(self, number: int, payload: memoryview) -> Any:
        if number >= len(self._decoders):
            raise WireError(f"there is no message type {number}")
        try:
            return self._decoders[number].decode(payload)
        except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
            raise WireError(f"a message of type {number} does not decode: {error}") from None

    def copy(self, message: Any) -> Any:
        """Returns the message as a receiver would decode it."""
        return FrameReader(self).feed(self.encode(message))[0]


def _plain(value: Any) -> Any:
    """Converts a path, an array, or a number or container of another library to built-in types."""
    for kind, convert in _PLAIN.items():
        if isinstance(value, kind):
            return convert(value)
    if isinstance(value, np.ndarray) and value.dtype.kind in _ARRAY_KINDS:
        return value.dtype.str, value.shape, np.ascontiguousarray(value).tobytes()
    raise NotImplementedError(f"{type(value).__name__} is not part of a message")


def _restored(kind: type, value: Any) -> Any:
    if kind is Path and isinstance(value, str):
        return Path(value)
    if kind is np.ndarray:
        dtype, shape, data = msgspec.convert(value, tuple[str, tuple[int, ...], bytes])
        if np.dtype(dtype).kind not in _ARRAY_KINDS:
            raise ValueError(f"{dtype} is not a dtype of numbers")
        return np.frombuffer(bytearray(data), dtype).reshape(shape)
    if issubclass(kind, OpenMessage):
        tag = value.get("type") if isinstance(value, dict) else None
        registered = _KINDS.get(tag) if isinstance(tag, str) else None
        if registered is None or not issubclass(registered, kind):
            raise ValueError(f"{tag!r} is not a registered kind of {kind.__name__}: decorate it with register_kind")
        return msgspec.convert(value, registered, dec_hook=_restored, builtin_types=(bytes,))
    raise NotImplementedError(f"{kind.__name__} is not part of a message")


class FrameReader:
    """Splits a byte stream into messages; performs no I/O. A payload may have `max_payload_bytes`."""

    def __init__(self, codec: Codec, max_payload_bytes: int = MAX_PAYLOAD_BYTES) -> None:
        self._codec = codec
        self._max_payload_bytes = max_payload_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """Returns the messages that `data` completes. Raises WireError."""
        self._buffer += data
        messages: list[Any] = []
        start = 0
        with memoryview(self._buffer) as view:
            while len(view) - start >= _HEADER.size:
                length, number = _HEADER.unpack_from(view, start)
                if length > self._max_payload_bytes:
                    raise WireError(f"a frame of {length} bytes exceeds {self._max_payload_bytes}")
                end = start + _HEADER.size + length
                if end > len(view):
                    break
                with view[start + _HEADER.size : end] as payload:
                    messages.append(self._codec.decode(number, payload))
                start = end
        del self._buffer[:start]
        return messages

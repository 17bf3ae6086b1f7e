"""A transport over TCP, without a transfer library.

Every endpoint listens. A thread of the reader sends the ranges, and a thread of the peer answers with the bytes,
directly from its registered memory; the reader's thread receives them directly into its own. So registered memory is
only written by threads of its own process: once such a thread has ended, nothing can land any more. Connections are
authenticated with the cluster key, and the messages on them are sealed; the transferred bytes are neither sealed nor
encrypted.

    client                          server, after hello and answer
    request                    ->
                               <-   answer, then the bytes

A connection that breaks ends the transfer that it carries. When the last one breaks, or another one has broken too, the
peer is lost until `connect` is called again. Its transfers in progress become FAILED_UNSETTLED until the thread that
receives has noticed, which takes no longer than a system call, and then FAILED_SETTLED.

`close` waits for all threads. A peer that violates the protocol, or that stalls, loses only its connection.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

import msgspec
import numpy as np

from penstock.kv_transfer.topology.planner import merge
from penstock.kv_transfer.transports.base import PeerId, TransferHandle
from penstock.kv_transfer.transports.flat_memory import FlatMemory, check_ranges
from penstock.kv_transfer.transports.listener import listen_on
from penstock.kv_transfer.transports.peers import Lane, Peer, PeerTransport
from penstock.kv_transfer.transports.socket_protocol import (
    EPOCH_BYTES,
    FRAME_BYTES,
    Address,
    Answer,
    PeerAddress,
    SocketLimits,
    decode,
    dial,
    encode,
)
from penstock.kv_transfer.transports.stream import Stream
from penstock.utils.errors import PeerError
from penstock.utils.logging import get_logger

_logger = get_logger(__name__)

_RANGE_BYTES = 16


class Request(msgspec.Struct, frozen=True, tag="request"):
    """`ranges` of the server's memory: [n, 2] int64, little-endian, offset and bytes."""

    ranges: bytes


class _Link(Lane):
    """A connection to a peer. Without a `stream` it makes the connection in its own thread."""

    def __init__(self, dial: Callable[[], Stream], memory: FlatMemory, stream: Stream | None) -> None:
        self._dial = dial
        self._memory = memory
        self._stream = stream

    def open(self) -> None:
        if self._stream is None:
            self._stream = self._dial()

    def read(self, runs: np.ndarray) -> bool:
        assert self._stream is not None, "it is open"
        self._stream.send(encode(Request(runs[:, 1:].astype("<i8").tobytes())))
        segments = merge(self._memory.segments(runs[:, [0, 2]]))  # while the peer reads the request
        answer = decode(Answer, self._stream.receive())
        if answer.refusal:
            _logger.warning("the peer refuses a transfer: %s", answer.refusal)
            return False
        self._stream.receive_segments(segments)
        return True

    def is_alive(self) -> bool:
        return self._stream is None or self._stream.is_alive()

    def stop(self) -> None:
        if self._stream is not None:
            self._stream.cut()

    def end(self) -> None:
        if self._stream is not None:
            self._stream.close()


class SocketsTransport(PeerTransport[Address]):
    """One life of one endpoint (`DataTransport`).

    Peers connect to `host`; if that is an IP address, the endpoint listens only there. Raises ConfigError if the host
    has no such address.
    """

    def __init__(self, host: str, key: bytes, limits: SocketLimits | None = None) -> None:
        limits = limits or SocketLimits()
        listening = listen_on(host, limits)
        address = Address(host, listening.getsockname()[1], os.urandom(EPOCH_BYTES))
        super().__init__(listening, address, key, limits, FRAME_BYTES + limits.max_runs * _RANGE_BYTES)

    def _connect(self, address: Address) -> None:
        stream, num_bytes = self._dial(address)
        self._begin(Peer(address, num_bytes), self._link(address, stream))

    def submit(self, peer: PeerId, runs: np.ndarray) -> TransferHandle:
        with self._lock:
            transfer = super().submit(peer, runs)
            self._add_link(self._peers[peer])
        return transfer

    def _add_link(self, peer: Peer) -> None:
        """Makes one more connection if another transfer can run at once. If that fails, transfers wait."""
        num_idle = sum(lane.transfer is None for lane in peer.lanes)
        if num_idle < len(peer.queue) and len(peer.lanes) < self._limits.connections_per_peer:
            with contextlib.suppress(PeerError):
                self._start(peer, self._link(peer.address))

    def _link(self, address: PeerAddress, stream: Stream | None = None) -> _Link:
        return _Link(lambda: self._dial(address)[0], self._memory, stream)

    def _dial(self, address: PeerAddress) -> tuple[Stream, int]:
        """Returns a connection to that life of the peer, and the size of its memory. Raises PeerError."""
        stream, answer = dial(address, Answer, self._key, self._limits.connect_seconds)
        stream.allow_stalls(self._limits.stall_seconds)
        return stream, answer.num_bytes

    # ---- Serving ----

    def _serve(self, stream: Stream) -> None:
        stream.allow_stalls(self._limits.stall_seconds)
        stream.send(encode(Answer(num_bytes=self._memory.num_bytes)))
        while True:
            stream.wait_for_data()
            self._answer(stream, decode(Request, stream.receive()))

    def _answer(self, stream: Stream, request: Request) -> None:
        try:
            ranges = self._ranges(request)
        except PeerError as refusal:
            stream.send(encode(Answer(str(refusal))))
            return
        stream.send(encode(Answer()))
        stream.send_segments(merge(self._memory.segments(ranges)))

    def _ranges(self, request: Request) -> np.ndarray:
        """Returns the request's ranges, [n, 2] int64, checked. Raises PeerError."""
        limits = self._limits
        if len(request.ranges) % _RANGE_BYTES or len(request.ranges) > limits.max_runs * _RANGE_BYTES:
            raise PeerError(f"a request has {len(request.ranges)} bytes of runs; the limit is {limits.max_runs} runs")
        ranges = np.frombuffer(request.ranges, "<i8").reshape(-1, 2)
        check_ranges(ranges[:, 0], ranges[:, 1], self._memory.num_bytes, "peer's")
        if float(ranges[:, 1].sum(dtype=np.float64)) > limits.max_bytes:
            raise PeerError(f"a request is for more than {limits.max_bytes} bytes")
        return ranges

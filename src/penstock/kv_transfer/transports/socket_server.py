"""The listening half of `SocketsTransport`: a thread for each connection, which answers one request after the other."""

from __future__ import annotations

import contextlib
import socket
import threading

import numpy as np

from penstock.kv_transfer.transports.base import Notification, Operation
from penstock.kv_transfer.transports.board import MAX_NOTIFY_BYTES, TransferBoard
from penstock.kv_transfer.transports.flat_memory import FlatMemory, check_ranges, merged
from penstock.kv_transfer.transports.socket_protocol import (
    FRAME_BYTES,
    PURPOSE,
    RANGE_BYTES,
    Answer,
    Hello,
    Landed,
    Request,
    SocketLimits,
    decode,
    decode_request,
    encode,
)
from penstock.kv_transfer.transports.stream import Stream
from penstock.kv_transfer.transports.threads import ThreadGroup
from penstock.utils.errors import ConfigError, PeerError
from penstock.utils.logging import get_logger

_logger = get_logger(__name__)


class SocketServer:
    """Listens from the constructor on. `memory` is what it serves."""

    def __init__(self, host: str, key: bytes, epoch: bytes, limits: SocketLimits, board: TransferBoard) -> None:
        self.memory = FlatMemory()
        self._key = key
        self._epoch = epoch
        self._limits = limits
        self._board = board
        self._streams: set[Stream] = set()
        self._handshakes: dict[Stream, None] = {}
        self._closing = threading.Event()
        try:
            self._listener = socket.create_server(
                (host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=limits.max_connections
            )
        except OSError as error:
            raise ConfigError(f"cannot listen on {host!r}: {error}: give an address of this host") from error
        self.port: int = self._listener.getsockname()[1]
        self._threads = ThreadGroup(f"kv-data-{self.port}")
        self._threads.start(self._accept)

    def close(self, seconds: float) -> None:
        """Ends all connections and waits for their threads: then nothing writes the memory any more."""
        with self._board.lock:
            self._closing.set()
            for stream in self._streams:
                stream.cut()
        with contextlib.suppress(OSError):  # it may have been closed before
            self._listener.shutdown(socket.SHUT_RDWR)
        assert self._threads.join(seconds), f"a thread has not ended within {seconds} seconds"
        self._listener.close()
        self.memory = FlatMemory()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if not self._closing.is_set():
                    _logger.warning("cannot accept connections: %s", error)
                    self._closing.wait(0.1)
                continue
            self._begin(connection)

    def _begin(self, connection: socket.socket) -> None:
        """Gives the connection a thread, if there is room for one more."""
        try:
            stream = Stream(connection, self._limits.connect_seconds)
        except OSError:
            connection.close()
            return
        with self._board.lock:
            if len(self._handshakes) >= self._limits.max_handshakes:
                self._end_handshake(next(iter(self._handshakes)))
            if self._closing.is_set() or len(self._streams) >= self._limits.max_connections:
                stream.close()
                return
            try:
                self._threads.start(self._run, stream)
            except PeerError as error:
                _logger.warning("a connection is closed: %s", error)
                stream.close()
                return
            self._streams.add(stream)
            self._handshakes[stream] = None

    def _end_handshake(self, stream: Stream) -> None:
        """Returns when its thread has ended: until then the connection takes up room. Called with the lock held."""
        stream.cut()
        self._board.lock.wait_for(lambda: stream not in self._streams, self._limits.connect_seconds)

    def _run(self, stream: Stream) -> None:
        try:
            self._serve(stream)
        except PeerError as error:
            _logger.debug("a connection has ended: %s", error)
        except Exception:
            _logger.exception("a connection has ended because of a bug")
        finally:
            stream.close()
            with self._board.lock:
                self._streams.remove(stream)
                self._handshakes.pop(stream, None)
                self._board.lock.notify_all()

    def _serve(self, stream: Stream) -> None:
        limits = self._limits
        seconds, max_bytes = limits.connect_seconds, limits.max_runs * RANGE_BYTES + FRAME_BYTES
        stream.authenticate(self._key, is_client=False, purpose=PURPOSE, seconds=seconds, max_frame_bytes=max_bytes)
        hello = decode(Hello, stream.receive())
        with self._board.lock:
            self._handshakes.pop(stream, None)
        if hello.epoch != self._epoch:
            stream.send(encode(Answer("this endpoint has been restarted since its descriptor was made")))
            return
        stream.allow_stalls(limits.stall_seconds)
        stream.send(encode(Answer(num_bytes=self.memory.num_bytes)))
        sender = hello.sender[:256]
        while True:
            stream.wait_for_data()
            request = decode_request(stream.receive())
            if isinstance(request, Landed):
                self._notify(sender, request.notify)
            else:
                self._answer(stream, request, sender)

    def _answer(self, stream: Stream, request: Request, sender: str) -> None:
        try:
            ranges = self._ranges(request)
        except PeerError as refusal:
            stream.send(encode(Answer(str(refusal))))
            return
        segments = merged(self.memory.segments(ranges))
        stream.send(encode(Answer()))
        if request.operation is Operation.READ:
            stream.send_segments(segments)
        else:
            stream.receive_segments(segments)
            self._notify(sender, request.notify)
            stream.send(encode(Answer()))

    def _ranges(self, request: Request) -> np.ndarray:
        """[n, 2] int64, checked. Raises PeerError."""
        limits = self._limits
        if len(request.ranges) % RANGE_BYTES or len(request.ranges) > limits.max_runs * RANGE_BYTES:
            raise PeerError(f"a request has {len(request.ranges)} bytes of runs; the limit is {limits.max_runs} runs")
        ranges = np.frombuffer(request.ranges, "<i8").reshape(-1, 2)
        check_ranges(ranges[:, 0], ranges[:, 1], self.memory.num_bytes, "peer's")
        if float(ranges[:, 1].sum(dtype=np.float64)) > limits.max_bytes:
            raise PeerError(f"a request is for more than {limits.max_bytes} bytes")
        return ranges

    def _notify(self, sender: str, message: bytes) -> None:
        if len(message) > MAX_NOTIFY_BYTES:
            raise PeerError(f"a notification of {len(message)} bytes exceeds {MAX_NOTIFY_BYTES}")
        if message:
            self._board.deliver(Notification(sender, message))

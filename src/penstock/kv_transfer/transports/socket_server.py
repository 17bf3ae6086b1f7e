"""The listening half of `SocketsTransport`: answers the requests of a connection one after the other."""

from __future__ import annotations

import numpy as np

from penstock.kv_transfer.transports.base import Notification, Operation
from penstock.kv_transfer.transports.board import MAX_NOTIFY_BYTES, TransferBoard
from penstock.kv_transfer.transports.flat_memory import FlatMemory, check_ranges, merged
from penstock.kv_transfer.transports.listener import Listener
from penstock.kv_transfer.transports.socket_protocol import (
    FRAME_BYTES,
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
from penstock.kv_transfer.transports.windows import Windows
from penstock.utils.errors import PeerError


class SocketServer:
    """Listens as soon as it is made. `memory` is the memory that it serves."""

    def __init__(self, host: str, key: bytes, epoch: bytes, limits: SocketLimits, board: TransferBoard) -> None:
        self.memory = FlatMemory()
        self.windows = Windows(board.lock)
        self._epoch = epoch
        self._limits = limits
        self._board = board
        max_frame_bytes = limits.max_runs * RANGE_BYTES + FRAME_BYTES
        self._listener = Listener(host, key, max_frame_bytes, limits, board.lock, self._serve)
        self._listener.start()

    @property
    def port(self) -> int:
        return self._listener.port

    def close(self, seconds: float) -> None:
        """Ends all connections and waits for their threads: then nothing writes the memory any more."""
        self._listener.close(seconds)
        self.memory = FlatMemory()

    def _serve(self, stream: Stream) -> None:
        hello = decode(Hello, stream.receive())
        self._listener.has_introduced_itself(stream)
        if hello.epoch != self._epoch:
            stream.send(encode(Answer("this endpoint has been restarted since its descriptor was made")))
            return
        stream.allow_stalls(self._limits.stall_seconds)
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
        is_write = request.operation is Operation.WRITE
        try:
            ranges = self._ranges(request)
            if is_write:
                self.windows.enter(request.window, ranges, stream)
        except PeerError as refusal:
            stream.send(encode(Answer(str(refusal))))
            return
        segments = merged(self.memory.segments(ranges))
        if not is_write:
            stream.send(encode(Answer()))
            stream.send_segments(segments)
            return
        try:
            stream.send(encode(Answer()))
            stream.receive_segments(segments)
        finally:
            self.windows.leave(request.window, stream)
        self._notify(sender, request.notify)
        stream.send(encode(Answer()))

    def _ranges(self, request: Request) -> np.ndarray:
        """Returns the request's ranges, [n, 2] int64, checked. Raises PeerError."""
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

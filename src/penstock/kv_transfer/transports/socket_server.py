"""The listening half of `SocketsTransport`: answers the requests of a connection one after the other."""

from __future__ import annotations

import threading

import numpy as np

from penstock.kv_transfer.transports.flat_memory import FlatMemory, check_ranges, merged
from penstock.kv_transfer.transports.listener import Listener
from penstock.kv_transfer.transports.socket_protocol import (
    FRAME_BYTES,
    RANGE_BYTES,
    Answer,
    Hello,
    Request,
    SocketLimits,
    decode,
    encode,
)
from penstock.kv_transfer.transports.stream import Stream
from penstock.utils.errors import PeerError


class SocketServer:
    """Listens as soon as it is made. `memory` is the memory that it serves."""

    def __init__(self, host: str, key: bytes, epoch: bytes, limits: SocketLimits, lock: threading.Condition) -> None:
        self.memory = FlatMemory()
        self._epoch = epoch
        self._limits = limits
        max_frame_bytes = limits.max_runs * RANGE_BYTES + FRAME_BYTES
        self._listener = Listener(host, key, max_frame_bytes, limits, lock, self._serve)
        self._listener.start()

    @property
    def port(self) -> int:
        return self._listener.port

    def close(self, seconds: float) -> None:
        """Ends all connections and waits for their threads: then nothing reads the memory any more."""
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
        stream.send_segments(merged(self.memory.segments(ranges)))

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

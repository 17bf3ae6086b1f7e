"""A transport within one host: the reader maps the memory of the other side by its name, and copies.

The reader has a thread for each peer. Copies are divided into pieces, so that giving a peer up takes no longer than one
piece, and after its thread has ended nothing can move.

Every endpoint also listens on a Unix socket without a file (an abstract address, which contains a random epoch). A peer
keeps a connection to it open for as long as it copies. The end of the connection means the end of that life, because
the kernel closes it however the process ends. Both sides verify with the kernel that the other process belongs to the
same user or to root, which could open the memory anyway, so the key is only the epoch. `close` shuts the connections of
peers down and waits until they have ended their copies.

It works if processes share /proc and the network namespace: on one host, and not in different containers.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence

import msgspec
import numpy as np

from penstock.kv_transfer.transports.base import PeerId
from penstock.kv_transfer.transports.flat_memory import (
    FlatMemory,
    NamedRegion,
    check_registered,
    named_regions,
    pair_segments,
)
from penstock.kv_transfer.transports.memory_copy import copy_in_pieces
from penstock.kv_transfer.transports.peers import Lane, Peer, PeerTransport
from penstock.kv_transfer.transports.socket_protocol import EPOCH_BYTES, Answer, SocketLimits, dial, encode
from penstock.kv_transfer.transports.stream import Stream
from penstock.messages.kv_layout import MemoryRegion
from penstock.utils.errors import PeerError
from penstock.utils.shared_memory import attach_memory

_LIMITS = SocketLimits(max_connections=256, max_runs=sys.maxsize)


class _Endpoint(msgspec.Struct, frozen=True, tag="shared_memory", forbid_unknown_fields=True):
    """The descriptor of one life of an endpoint."""

    epoch: bytes
    regions: tuple[NamedRegion, ...]

    @property
    def peer_id(self) -> PeerId:
        return f"shared_memory#{self.epoch.hex()}"

    @property
    def path(self) -> bytes:
        return b"\0penstock-kv-" + self.epoch.hex().encode()

    def reach(self, seconds: float) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.settimeout(seconds)
            connection.connect(self.path)
        except OSError:
            connection.close()
            raise
        return connection


class _Copier(Lane):
    """Copies from the mapped memory of a peer."""

    def __init__(self, local: FlatMemory, remote: FlatMemory) -> None:
        self._local = local
        self._remote = remote
        self._is_stopped = False

    def read(self, runs: np.ndarray) -> bool:
        pieces = copy_in_pieces(pair_segments(self._local, self._remote, runs))
        return all(not self._is_stopped for _ in pieces)

    def stop(self) -> None:
        self._is_stopped = True

    def end(self) -> None:
        self._remote = FlatMemory()


class SharedMemoryTransport(PeerTransport[_Endpoint]):
    """One life of one endpoint (`DataTransport`). `regions` have the paths by which the registered ones are mapped."""

    _grace_seconds = 10.0

    def __init__(self, regions: Sequence[MemoryRegion]) -> None:
        endpoint = _Endpoint(os.urandom(EPOCH_BYTES), named_regions(regions, "shared_memory"))
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(endpoint.path)
        listening.listen(_LIMITS.max_connections)
        super().__init__(listening, endpoint, endpoint.epoch, _LIMITS)

    def register(self, regions: Sequence[memoryview]) -> None:
        check_registered(regions, self._address.regions)
        super().register(regions)

    def _connect(self, address: _Endpoint) -> None:
        control, _ = dial(address, Answer, address.epoch, self._limits.connect_seconds)
        try:
            # While the connection exists, a path names memory of that life, and not of a later process.
            mappings = [attach_memory(region.path, region.num_bytes, writable=False) for region in address.regions]
            if not control.is_alive():
                raise PeerError(f"{address.peer_id} has ended")
        except (OSError, ValueError, OverflowError, PeerError) as error:
            control.close()
            raise PeerError(f"the memory of {address.peer_id} cannot be mapped: {error}") from error
        memory = FlatMemory([mapping.view for mapping in mappings])
        self._begin(Peer(address, memory.num_bytes, control), _Copier(self._memory, memory))

    def _serve(self, stream: Stream) -> None:
        stream.send(encode(Answer()))
        # The client sends nothing more: it has closed the connection and ended its copies.
        stream.wait_for_data()

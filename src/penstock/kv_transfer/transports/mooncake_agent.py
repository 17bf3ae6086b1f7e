"""Mooncake's transfer engine as an `Agent`. This is the only module that imports mooncake.

The engine listens for handshakes and, with TCP, for data on ports of its own choice on all interfaces, whatever host it
is given. A read returns when it has ended or failed, which may take very long if the peer is stopped.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.kv_transfer.transports.agents import AgentSettings, why_not_loaded
from penstock.utils.errors import ConfigError, PeerError
from penstock.utils.hosts import in_url

_PEER_TO_PEER = "P2PHANDSHAKE"


class MooncakeAgent:
    """See `Agent`."""

    # Its queue for one peer is limited: with 4096 pieces or more, version 0.3.13 fails the whole batch.
    max_pieces = 2048

    def __init__(self, settings: AgentSettings) -> None:
        try:
            from mooncake.engine import TransferEngine  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ConfigError(why_not_loaded("mooncake", error)) from None
        self._host = in_url(settings.host)
        self._engine = TransferEngine()
        if self._engine.initialize(self._host, _PEER_TO_PEER, settings.protocol, "") != 0:
            raise ConfigError(
                f"Mooncake's transfer engine does not start on {settings.host} with mooncake_protocol="
                f"{settings.protocol}; its messages on stderr give the reason"
            )

    def register(self, regions: Sequence[tuple[int, int]]) -> None:
        for address, num_bytes in regions:
            if self._engine.register_memory(address, num_bytes) != 0:
                raise ConfigError(f"Mooncake cannot register {num_bytes} bytes of KV memory")

    def descriptor(self) -> bytes:
        return f"{self._host}:{self._engine.get_rpc_port()}".encode()

    def connect(self, descriptor: bytes) -> None:
        self._peer = descriptor.decode()

    def read(self, pieces: np.ndarray) -> None:
        code = self._engine.batch_transfer_sync_read(self._peer, *pieces.T.tolist())
        if code != 0:
            raise PeerError(f"Mooncake's read has failed with code {code}")

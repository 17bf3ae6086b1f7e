"""NIXL's agent as an `Agent`. This is the only module that imports nixl.

It uses the bindings below NIXL's Python interface, because that interface gives its progress thread no pause, so an
agent that serves would keep a core busy all the time. With a pause the thread sleeps until something arrives.

UCX, the usual backend, is configured by its own environment variables, such as UCX_TLS and UCX_NET_DEVICES. Over some
of its transports `postXferReq` returns only at the end of the transfer.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.kv_transfer.transports.agents import AgentSettings, why_not_loaded
from penstock.utils.errors import ConfigError, PeerError

_PROGRESS_PAUSE = 100_000  # maximum sleep of the progress thread, in microseconds
# Seconds between polls of a transfer: short at first, longer for a slow one, such as from a peer that is stopped.
_SHORT_PAUSE, _LONG_PAUSE, _NUM_SHORT_PAUSES = 50e-6, 2e-3, 20_000


class NixlAgent:
    """See `Agent`."""

    max_pieces = 1 << 16

    def __init__(self, settings: AgentSettings) -> None:
        self._nixl = _bindings()
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = True
        config.useListenThread = False
        config.pthrDelay = _PROGRESS_PAUSE
        config.syncMode = self._nixl.NIXL_THREAD_SYNC_RW
        self._agent = self._nixl.nixlAgent(uuid.uuid4().hex, config)
        available = self._agent.getAvailPlugins()
        for backend in settings.backends:
            if backend not in available:
                raise ConfigError(f"NIXL has no backend {backend!r} here: available are {', '.join(available)}")
            self._agent.createBackend(backend, {})

    def register(self, regions: Sequence[tuple[int, int]]) -> None:
        entries = [(address, num_bytes, 0, "") for address, num_bytes in regions]
        self._agent.registerMem(self._nixl.nixlRegDList(self._nixl.DRAM_SEG, entries))

    def descriptor(self) -> bytes:
        return self._agent.getLocalMD()

    def connect(self, descriptor: bytes) -> None:
        self._peer = self._agent.loadRemoteMD(descriptor)

    def read(self, pieces: np.ndarray) -> None:
        nixl = self._nixl
        local, remote = self._list(pieces[:, [0, 2]]), self._list(pieces[:, 1:])
        request = self._agent.createXferReq(nixl.NIXL_READ, local, remote, self._peer)
        status = self._agent.postXferReq(request)
        pause, number = threading.Event(), 0
        while status == nixl.NIXL_IN_PROG:
            pause.wait(_SHORT_PAUSE if number < _NUM_SHORT_PAUSES else _LONG_PAUSE)
            number += 1
            status = self._agent.getXferStatus(request)
        if status != nixl.NIXL_SUCCESS:
            raise PeerError(f"NIXL's read has failed with {status}")
        self._agent.releaseXferReq(request)

    def _list(self, segments: np.ndarray) -> Any:
        """Makes a list from [n, 2] int64 of address and bytes; its third column is the device."""
        entries = np.zeros((len(segments), 3), np.uint64)
        entries[:, :2] = segments
        return self._nixl.nixlXferDList(self._nixl.DRAM_SEG, entries)


def _bindings() -> Any:
    """Imports the wheel for CUDA 12 or 13; neither needs a GPU."""
    try:
        from nixl_cu12 import _bindings as bindings  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]
    except ImportError as error:
        try:
            from nixl_cu13 import _bindings as bindings  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]
        except ImportError:
            raise ConfigError(why_not_loaded("nixl", error)) from None
    return bindings

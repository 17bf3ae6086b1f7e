"""Transfers whose states the owner of a transport shares with the threads that move its bytes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.kv_transfer.transports.base import TransferHandle, TransferState


@dataclass(slots=True, eq=False)
class Transfer:
    """A handle. `state` changes under the transport's lock; `polled` is the state that the owner last saw."""

    runs: np.ndarray  # [n, 3] int64
    state: TransferState = TransferState.PENDING
    polled: TransferState = TransferState.PENDING


class PolledTransport:
    """The common part of transports with threads. `_lock` also guards other data that the threads share."""

    def __init__(self) -> None:
        self._lock = threading.Condition()

    def poll(self, handle: TransferHandle) -> TransferState:
        assert isinstance(handle, Transfer), handle
        with self._lock:
            handle.polled = handle.state
            return handle.state

    def wait(self, handles: Sequence[TransferHandle], seconds: float) -> None:
        transfers = [handle for handle in handles if isinstance(handle, Transfer)]
        with self._lock:
            self._lock.wait_for(lambda: any(each.state is not each.polled for each in transfers), max(0.0, seconds))

    def _set_state(self, transfers: Sequence[Transfer], state: TransferState) -> None:
        """Sets the state of transfers that have not settled. Must not be called with the lock held."""
        with self._lock:
            for transfer in transfers:
                if not transfer.state.is_settled:
                    transfer.state = state
            self._lock.notify_all()

    def _finish(self, transfer: Transfer) -> None:
        """Called when the last byte has landed. The transfer is DONE unless it has been given up in the meantime."""
        with self._lock:
            if transfer.state is TransferState.PENDING:
                transfer.state = TransferState.DONE
        self._set_state([transfer], TransferState.FAILED_SETTLED)

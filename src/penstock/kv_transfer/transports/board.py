"""The state that the owner of a transport shares with the threads that move its bytes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.kv_transfer.transports.base import Notification, Operation, TransferHandle, TransferState
from penstock.utils.errors import PeerError
from penstock.utils.logging import get_logger

_logger = get_logger(__name__)

MAX_NOTIFICATIONS = 1 << 16
MAX_NOTIFY_BYTES = 32 << 10


@dataclass(slots=True, eq=False)
class Transfer:
    """A handle. `state` changes under the board's lock; `polled` is the state that the owner last saw."""

    operation: Operation
    runs: np.ndarray  # [n, 3] int64
    notify: bytes
    window: bytes = b""
    state: TransferState = TransferState.PENDING
    polled: TransferState = TransferState.PENDING


class TransferBoard:
    """Keeps states of transfers, and notifications. `lock` also guards other data that the threads share."""

    def __init__(self) -> None:
        self.lock = threading.Condition()
        self._inbox: deque[Notification] = deque()

    def set_state(self, transfers: Sequence[Transfer], state: TransferState) -> None:
        """Sets the state of transfers that have not settled. Must not be called with the lock held."""
        with self.lock:
            for transfer in transfers:
                if not transfer.state.is_settled:
                    transfer.state = state
            self.lock.notify_all()

    def finish(self, transfer: Transfer) -> None:
        """Called when the last byte has landed. The transfer is DONE unless it has been given up in the meantime."""
        with self.lock:
            if transfer.state is TransferState.PENDING:
                transfer.state = TransferState.DONE
        self.set_state([transfer], TransferState.FAILED_SETTLED)

    def poll(self, handle: TransferHandle) -> TransferState:
        assert isinstance(handle, Transfer), handle
        with self.lock:
            handle.polled = handle.state
            return handle.state

    def wait(self, handles: Sequence[TransferHandle], seconds: float) -> None:
        transfers = [handle for handle in handles if isinstance(handle, Transfer)]
        with self.lock:
            self.lock.wait_for(lambda: any(each.state is not each.polled for each in transfers), max(0.0, seconds))

    def deliver(self, notification: Notification) -> None:
        with self.lock:
            is_full = len(self._inbox) >= MAX_NOTIFICATIONS
            if not is_full:
                self._inbox.append(notification)
        if is_full:
            _logger.warning("dropping a notification from %s: %d are waiting", notification.peer, MAX_NOTIFICATIONS)

    def take_notifications(self) -> list[Notification]:
        with self.lock:
            news = list(self._inbox)
            self._inbox.clear()
            return news


class OnBoard:
    """The common part of transports whose threads report to their owner through a board."""

    def __init__(self) -> None:
        self._board = TransferBoard()

    can_settle_incoming_writes = False

    def open_window(self, ranges: np.ndarray) -> bytes:
        raise PeerError("this transport cannot end writes of its peers")

    def close_window(self, name: bytes) -> None: ...

    def is_window_closed(self, name: bytes) -> bool:
        return True

    def poll(self, handle: TransferHandle) -> TransferState:
        return self._board.poll(handle)

    def wait(self, handles: Sequence[TransferHandle], seconds: float) -> None:
        self._board.wait(handles, seconds)

    def notifications(self) -> list[Notification]:
        return self._board.take_notifications()

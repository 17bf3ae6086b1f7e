"""An authenticated connection for blocking threads: sealed frames, and raw bytes from and to memory.

One thread at a time reads and writes a stream, and only it may close it. Any thread may `cut` it: then a call in
progress soon raises PeerError, and every later one does at once. Every failure of a connection is a PeerError.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import NoReturn

import numpy as np

from penstock.kv_transfer.authentication import Authentication
from penstock.utils.errors import PeerError
from penstock.utils.hosts import keep_alive

_LIBC = ctypes.CDLL(None, use_errno=True)
_MAX_SEGMENTS = 1024  # in one system call (IOV_MAX)
_CREDENTIALS = struct.Struct("3i")  # `struct ucred`: process, user, group


class _MessageHeader(ctypes.Structure):
    """`struct msghdr` of Linux."""

    _fields_ = [
        ("name", ctypes.c_void_p),
        ("name_bytes", ctypes.c_uint32),
        ("segments", ctypes.c_void_p),
        ("num_segments", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_bytes", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    ]


def _system_call(name: str) -> Callable[[int, object, int], int]:
    function = getattr(_LIBC, name)
    function.argtypes = (ctypes.c_int, ctypes.POINTER(_MessageHeader), ctypes.c_int)
    function.restype = ctypes.c_ssize_t
    return function


def check_user(connection: socket.socket) -> None:
    """Raises PeerError unless the other process of a Unix socket belongs to the same user or to root."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user = _CREDENTIALS.unpack(credentials)[1]
    if user not in (os.geteuid(), 0):
        raise PeerError(f"the peer belongs to user {user}: both engines must run as the same user")


_sendmsg, _recvmsg = _system_call("sendmsg"), _system_call("recvmsg")


class Stream:
    """`stall_seconds`: how long a peer may move no byte while it is its turn."""

    def __init__(self, connection: socket.socket, stall_seconds: float) -> None:
        self._socket = connection
        self._stall_seconds = stall_seconds
        self._lock = threading.Lock()
        self._is_cut = False
        connection.setblocking(True)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            keep_alive(connection)
        self._limit(stall_seconds)

    def allow_stalls(self, seconds: float) -> None:
        """Changes `stall_seconds` from now on."""
        self._stall_seconds = seconds
        self._limit(seconds)

    def _limit(self, seconds: float) -> None:
        timeout = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6) or 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)

    def authenticate(self, key: bytes, is_client: bool, purpose: bytes, seconds: float, max_frame_bytes: int) -> None:
        """Authenticates both sides, over a Unix socket also by their users.

        Raises PeerError after this many seconds, even if the peer is still sending.
        """
        if self._socket.family == socket.AF_UNIX:
            check_user(self._socket)
        deadline = time.monotonic() + seconds
        authentication = Authentication(key, is_client, purpose)
        self._limit(seconds)
        self._send(authentication.greeting())
        while not authentication.is_done:
            left = deadline - time.monotonic()
            if left <= 0:
                raise PeerError(f"the peer has not authenticated itself within {seconds} seconds")
            self._limit(left)
            self._send(authentication.receive(self._receive(authentication.num_missing)))
        self._limit(self._stall_seconds)
        self._sealer = authentication.sealer()
        self._opener = authentication.opener(max_frame_bytes)

    def send(self, payload: bytes) -> None:
        """Sends one frame."""
        self._send(self._sealer.seal(payload))

    def receive(self) -> bytes:
        """Receives one frame."""
        while True:
            payloads = self._opener.feed(self._receive(self._opener.num_missing))
            if payloads:
                return payloads[0]

    def wait_for_data(self) -> None:
        """Waits, without a limit, until the peer sends something, or the connection ends."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.poll()

    def is_alive(self) -> bool:
        """Returns whether the peer has not closed the connection; for streams on which it is not the peer's turn."""
        try:
            return not self._is_cut and self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def send_segments(self, segments: np.ndarray) -> None:
        """Sends memory: [n, 2] int64 of address and bytes. Releases the GIL meanwhile."""
        self._move(segments, _sendmsg, socket.MSG_NOSIGNAL)

    def receive_segments(self, segments: np.ndarray) -> None:
        """Fills memory. The kernel writes it during this call only."""
        self._move(segments, _recvmsg, socket.MSG_WAITALL)

    def _move(self, segments: np.ndarray, call: Callable[[int, object, int], int], flags: int) -> None:
        ends = np.cumsum(segments[:, 1])
        total, done = int(ends[-1]) if len(ends) else 0, 0
        # An array of `struct iovec`, whose first unfinished entry is shortened to its missing part.
        vector = segments.copy()
        while done < total:
            self._check()
            first = int(np.searchsorted(ends, done, "right"))
            missing = int(ends[first]) - done
            vector[first] = (segments[first].sum() - missing, missing)
            header = _MessageHeader(
                segments=vector[first:].ctypes.data, num_segments=min(_MAX_SEGMENTS, len(vector) - first)
            )
            moved = call(self._socket.fileno(), ctypes.byref(header), flags)
            if moved < 0:
                code = ctypes.get_errno()
                if code != errno.EINTR:
                    self._fail(OSError(code, os.strerror(code)))
            elif moved == 0:
                raise PeerError("the peer has closed the connection")
            else:
                done += moved

    def _send(self, data: bytes) -> None:
        self._check()
        try:
            self._socket.sendall(data)
        except OSError as error:
            self._fail(error)

    def _receive(self, num_bytes: int) -> bytes:
        """Returns at least one byte and at most `num_bytes`."""
        self._check()
        try:
            data = self._socket.recv(min(num_bytes, 1 << 20))
        except OSError as error:
            self._fail(error)
        if not data:
            raise PeerError("the peer has closed the connection; if it has just begun, compare the cluster keys")
        return data

    def _check(self) -> None:
        if self._is_cut:
            raise PeerError("the connection was cancelled")

    def _fail(self, error: OSError) -> NoReturn:
        self._check()
        if error.errno in (errno.EAGAIN, errno.EWOULDBLOCK):
            raise PeerError(f"the peer has moved no byte for {self._stall_seconds} seconds") from None
        raise PeerError(f"the connection is lost: {error}") from error

    def cut(self, how: int = socket.SHUT_RDWR) -> None:
        """Ends one or both directions. Memory is no longer written, except by a call in progress, which this ends."""
        self._is_cut = True
        with self._lock, contextlib.suppress(OSError):  # the connection has ended
            self._socket.shutdown(how)

    def close(self) -> None:
        self._is_cut = True
        with self._lock:
            self._socket.close()

"""A stream whose instance reports its tokens, so that another instance can continue it (`utils.stream_reports`).

Without I/O. The client gets the events without the reports. Of the end it gets nothing before the body has ended, so
that a stream is either complete or can be continued: nothing may follow the last token.
"""

from __future__ import annotations

import enum

from penstock.utils.errors import PeerError
from penstock.utils.stream_reports import ReportKind, name_of, read_event

_END = b"\n\n"
_MAX_EVENT_BYTES = 64 << 20


class Reason(enum.StrEnum):
    """Why a stream is continued elsewhere."""

    DIED = "died"
    DRAINED = "drained"
    STOPPED = "stopped"


class ReportedStream:
    """What the client has received. `token_ids` are those of all instances; `name` is the header's value that names the
    stream, empty until an instance has answered with it. `interruption` is why the router ends the current answer, None
    while it does not; `reason` is why the answer last ended too early. `last_part_at` is when its last part arrived.
    """

    def __init__(self) -> None:
        self.name = ""
        self.token_ids: list[int] = []
        self.interruption: Reason | None = None
        self.reason: Reason | None = None
        self.last_part_at = 0.0
        self._pending = b""
        self._is_ending = False

    @property
    def fingerprint(self) -> str:
        """What the tokens depend on; empty without a name."""
        name = name_of(self.name)
        return "" if name is None else name.fingerprint

    def restart(self) -> None:
        """Drops the part of an event that the client has not received: another instance continues."""
        self._pending, self._is_ending, self.interruption = b"", False, None

    def feed(self, part: bytes, is_last: bool) -> bytes:
        """Takes a part of the body; returns what the client gets. Raises PeerError if the stream must be continued."""
        self._pending += part
        if len(self._pending) > _MAX_EVENT_BYTES:
            raise PeerError(f"an event of its stream is larger than {_MAX_EVENT_BYTES} bytes")
        passed: list[bytes] = []
        while not self._is_ending and _END in self._pending:
            size = self._pending.index(_END) + len(_END)
            try:
                kind, token_ids, data = read_event(self._pending[:size])
            except ValueError as error:
                raise PeerError(f"its report of the stream is invalid: {error}") from None
            if kind is ReportKind.DIED:
                raise PeerError("its engine has died")
            if kind is ReportKind.LAST:
                self._is_ending = True
                self._pending = data + self._pending[size:]
            else:
                self.token_ids += token_ids
                self._pending = self._pending[size:]
                passed.append(data)
        if is_last:
            passed.append(self._pending)
            self._pending = b""
        return b"".join(passed)

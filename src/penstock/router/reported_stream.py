"""A stream whose instance reports its tokens, so that another instance can continue it (`utils.stream_reports`).

Without I/O. The client gets the events without the reports, and no event before its report. Of the end it gets nothing
before the body has ended, so that a stream is either complete or can be continued: nothing may follow the last token.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence

import msgspec

from penstock.utils.errors import PeerError
from penstock.utils.stream_reports import Report, ReportKind, StreamName, header_value, read_event

_END = b"\n\n"
_MAX_EVENT_BYTES = 64 << 20


class Reason(enum.StrEnum):
    """Why a stream is continued elsewhere."""

    DIED = "died"
    DRAINED = "drained"
    STOPPED = "stopped"


class ReportedStream:
    """What the client has received. `token_ids` are those of all instances, by completion, and `finished` the
    completions that have ended; `name` is None until an instance has answered with it. `num_events` counts the events.
    `interruption` is why the router ends the current answer, None while it does not; `reason` is why the answer last
    ended too early. `last_part_at` is when its last part arrived.
    """

    def __init__(self, num_completions: int = 1, finished: Iterable[int] = ()) -> None:
        self.name: StreamName | None = None
        self.token_ids: list[list[int]] = [[] for _ in range(num_completions)]
        self.finished = set(finished)
        self.num_events = 0
        self.interruption: Reason | None = None
        self.reason: Reason | None = None
        self.last_part_at = 0.0
        self._pending = b""
        self._held: list[bytes] = []  # complete events whose report has not arrived
        self._num_held_bytes = 0
        self._is_ending = False

    @property
    def fingerprint(self) -> str:
        """What the tokens depend on; empty without a name."""
        return "" if self.name is None else self.name.fingerprint

    @property
    def header(self) -> str:
        """The header's value in a request for the rest of the stream, which has a name."""
        assert self.name is not None, "a stream goes on that has not begun"
        return header_value(msgspec.structs.replace(self.name, num_events=self.num_events))

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids))

    def restart(self) -> None:
        """Drops what has arrived and was not passed to the client: another instance continues."""
        self._pending, self._is_ending, self.interruption = b"", False, None
        self._hold_nothing()

    def _hold_nothing(self) -> None:
        self._held, self._num_held_bytes = [], 0

    def feed(self, part: bytes, is_last: bool) -> bytes:
        """Takes a part of the body; returns what the client gets. Raises PeerError if the stream must be continued."""
        self._pending += part
        if len(self._pending) + self._num_held_bytes > _MAX_EVENT_BYTES:
            raise PeerError(f"an event of its stream is larger than {_MAX_EVENT_BYTES} bytes")
        passed: list[bytes] = []
        start = 0
        while not self._is_ending and (end := self._pending.find(_END, start) + len(_END)) >= len(_END):
            try:
                reports, data = read_event(self._pending[start:end])
            except ValueError as error:
                raise PeerError(f"its report of the stream is invalid: {error}") from None
            start = end
            if data:
                self._held.append(data)
                self._num_held_bytes += len(data)
            if reports and self._advance(reports):
                passed += self._held
                self.num_events += len(self._held)
                self._hold_nothing()
        self._pending = self._pending[start:]
        if is_last:
            passed += [*self._held, self._pending]
            self._pending = b""
            self._hold_nothing()
        return b"".join(passed)

    def _advance(self, reports: Sequence[Report]) -> bool:
        """Adds what the client gets with the events so far; returns False, and adds nothing, if they are the last."""
        if any(each.kind is ReportKind.DIED for each in reports):
            raise PeerError("its engine has died")
        if not all(0 <= each.index < len(self.token_ids) for each in reports):
            raise PeerError(f"it reports a completion that is not among the {len(self.token_ids)} of its stream")
        ended = {each.index for each in reports if each.kind is ReportKind.LAST}
        if len(ended | self.finished) == len(self.token_ids):
            self._is_ending = True
            return False
        self.finished |= ended
        for each in reports:
            self.token_ids[each.index] += each.token_ids
        return True

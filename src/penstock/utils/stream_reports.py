"""How an instance reports a stream to a router, so that another instance can continue it.

The router asks with the header `X-Penstock-Stream`. An instance that reports the stream answers with the same header,
whose value names the stream and what its tokens depend on, and precedes each event with a comment line:

    : tokens 17 4              the token ids of this event; it may have no data if nothing can be shown yet
    : last 99                  the same, and the answer ends with this event
    : died                     the engine has died; what follows is an error

A request with that value and with the tokens so far as `output_token_ids` continues the stream: events, ids and times
are those that the first instance would have sent. An instance whose tokens would differ refuses it with status 409.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

import msgspec

STREAM_HEADER = "X-Penstock-Stream"
ASK = "report"
"""The header's value in the first request of a stream."""
MISMATCH_STATUS = 409
_MAX_HEADER = 2048
_MAX_CREATED = 2**53


class StreamName(msgspec.Struct, frozen=True):
    """A reported stream: the `id` and the time of its chunks. `fingerprint` covers all that its tokens depend on."""

    fingerprint: str
    id: str
    created: int


class ReportKind(enum.StrEnum):
    TOKENS = "tokens"
    LAST = "last"
    DIED = "died"


_decode = msgspec.json.Decoder(StreamName).decode


def name_of(value: str) -> StreamName | None:
    """Returns the stream that the header's value names; None for an invalid value."""
    try:
        name = _decode(value) if len(value) <= _MAX_HEADER else None
    except (msgspec.MsgspecError, UnicodeEncodeError):
        return None
    is_valid = name is not None and name.id.isprintable() and name.id.isascii() and 0 <= name.created <= _MAX_CREATED
    return name if is_valid else None


def header_value(name: StreamName) -> str:
    return msgspec.json.encode(name).decode()


def report_line(kind: ReportKind, token_ids: Iterable[int] = ()) -> bytes:
    """Returns the comment line that precedes an event."""
    return f": {' '.join((kind, *map(str, token_ids)))}\n".encode()


def read_event(block: bytes) -> tuple[ReportKind | None, list[int], bytes]:
    """Divides an event, with the empty line at its end, into its report and the rest, which is empty if there is no
    data. The kind is None without a report. Raises ValueError if a report is malformed.
    """
    if not block.startswith(b": "):
        return None, [], block
    line, _, rest = block.partition(b"\n")
    kind, *token_ids = line[2:].decode("ascii").split()
    return ReportKind(kind), [int(each) for each in token_ids], b"" if rest == b"\n" else rest

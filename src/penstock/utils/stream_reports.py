"""How an instance reports a stream to a router, so that another instance can continue it.

The router asks with the header `X-Penstock-Stream`. An instance that reports the stream answers with the same header,
whose value names the stream and what its tokens depend on, and precedes events with comment lines:

    : tokens 17 4              the token ids that the client has with this event and those before it, back to the last
                               report; the event may have no data if nothing can be shown yet
    : last 99                  the same, and the completion ends with this event
    : tokens@2 17              the same for completion 2 of several; without a number it is completion 0
    : died                     the engine has died; what follows is an error

An event without a report belongs to the next one that has one: all of them have been received, or none. A request with
that value, how many events the client has received, and the tokens so far as `output_token_ids` continues the stream:
events, ids and times are those that the first instance would have sent. An instance whose tokens would differ refuses
it with status 409.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

STREAM_HEADER = "X-Penstock-Stream"
ASK = "report"
"""The header's value in the first request of a stream."""
_MAX_HEADER = 2048
_MAX_NUMBER = 2**53
_ID_BYTES = 16


class StreamName(msgspec.Struct, frozen=True, omit_defaults=True):
    """A reported stream: the `id` and the time of its events. `fingerprint` covers all that its tokens depend on.

    Ids within the stream, and the noise of a request without a seed, are made from `seed`. `num_events`: how many
    events the client has received, in a request that continues the stream.
    """

    fingerprint: str
    id: str
    created: int
    seed: int = 0
    num_events: int = 0

    def make_id(self, *place: object) -> str:
        """Returns 32 hexadecimal digits that are the same wherever the stream is continued."""
        text = repr((self.seed, self.id, *place))
        return hashlib.blake2b(text.encode(), digest_size=_ID_BYTES).hexdigest()


class ReportKind(enum.StrEnum):
    TOKENS = "tokens"
    LAST = "last"
    DIED = "died"


class Report(NamedTuple):
    """The tokens that one completion has gained."""

    kind: ReportKind
    index: int
    token_ids: Sequence[int]


_decode = msgspec.json.Decoder(StreamName).decode


def name_of(value: str) -> StreamName | None:
    """Returns the stream that the header's value names; None for an invalid value."""
    try:
        name = _decode(value) if len(value) <= _MAX_HEADER else None
    except (msgspec.MsgspecError, UnicodeEncodeError):
        return None
    is_valid = (
        name is not None
        and name.id.isprintable()
        and name.id.isascii()
        and all(0 <= each <= _MAX_NUMBER for each in (name.created, name.seed, name.num_events))
    )
    return name if is_valid else None


def header_value(name: StreamName) -> str:
    return msgspec.json.encode(name).decode()


def report_line(kind: ReportKind, token_ids: Iterable[int] = (), index: int = 0) -> bytes:
    """Returns the comment line that precedes an event."""
    name = f"{kind}@{index}" if index else kind
    return f": {' '.join((name, *map(str, token_ids)))}\n".encode()


def read_event(block: bytes) -> tuple[list[Report], bytes]:
    """Divides an event, with the empty line at its end, into its reports and the rest, which is empty if there is no
    data. Raises ValueError if a report is malformed.
    """
    reports: list[Report] = []
    while block.startswith(b": "):
        line, _, block = block.partition(b"\n")
        name, *token_ids = line[2:].decode("ascii").split()
        kind, _, index = name.partition("@")
        reports.append(Report(ReportKind(kind), int(index or 0), [int(each) for each in token_ids]))
    return reports, b"" if block == b"\n" else block

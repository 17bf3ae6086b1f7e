"""Records which transfers are open and which shards have reported: completion by identity, never by count."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from penstock.messages.kv_transfer import BadRange, ShardId, TransferId, TransferReport, TransferStatus

Owner = TypeVar("Owner")


@dataclass(slots=True)
class _Open(Generic[Owner]):
    owner: Owner
    expected: frozenset[ShardId]
    reports: dict[ShardId, TransferReport] = field(default_factory=dict[ShardId, TransferReport])


class TransferLedger(Generic[Owner]):
    """Tracks every transfer, with its owner's record, from `open` to the report of its last expected shard.

    Reports may be out of order, repeated, late, or about an unknown transfer: such reports are counted and have no
    other effect. If a shard contradicts itself while the transfer is open, its failure counts.
    """

    def __init__(self) -> None:
        self._open: dict[TransferId, _Open[Owner]] = {}
        self.num_duplicates = 0
        self.num_unknown = 0

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, transfer_id: TransferId) -> bool:
        return transfer_id in self._open

    def __iter__(self) -> Iterator[Owner]:
        return (entry.owner for entry in self._open.values())

    def open(self, transfer_id: TransferId, expected: Iterable[ShardId], owner: Owner) -> None:
        assert transfer_id not in self._open, f"transfer {transfer_id} is opened twice"
        shards = frozenset(expected)
        assert shards, f"transfer {transfer_id} expects no rank"
        self._open[transfer_id] = _Open(owner, shards)

    def drop(self, transfer_id: TransferId) -> None:
        """Forgets an open transfer whose result is not needed; its reports are unknown from now on."""
        del self._open[transfer_id]

    def apply(self, report: TransferReport) -> tuple[Owner, tuple[TransferReport, ...]] | None:
        """Records a report; returns the owner and the reports of all shards if this was the last missing one."""
        entry = self._open.get(report.transfer_id)
        if entry is None or report.shard not in entry.expected:
            self.num_unknown += 1
            return None
        if report.shard in entry.reports:
            self.num_duplicates += 1
            if report.status is TransferStatus.FAILED and entry.reports[report.shard].status is TransferStatus.DONE:
                entry.reports[report.shard] = report
            return None
        entry.reports[report.shard] = report
        if len(entry.reports) < len(entry.expected):
            return None
        del self._open[report.transfer_id]
        return entry.owner, tuple(entry.reports[shard] for shard in sorted(entry.reports))

    def check_integrity(self) -> None:
        for transfer_id, entry in self._open.items():
            assert entry.reports.keys() < entry.expected, f"{transfer_id} is complete and still open"


def bad_ranges(reports: Iterable[TransferReport], num_groups: int, first: int, end: int) -> tuple[BadRange, ...]:
    """Returns the missing ranges of a load of tokens [first, end), by the reports of all shards; empty if complete."""
    bad: dict[BadRange, None] = {}
    for report in reports:
        if report.status is TransferStatus.FAILED:
            everything = [BadRange(group, first, end) for group in range(num_groups)]
            bad.update(dict.fromkeys(report.bad_ranges or everything))
    return tuple(bad)

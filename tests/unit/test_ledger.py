"""Completion by identity: which reports complete a transfer, and which change nothing."""

from __future__ import annotations

import itertools

import pytest

from penstock.kv_transfer.aggregate import aggregate
from penstock.kv_transfer.ledger import TransferLedger, bad_ranges
from penstock.messages.kv_transfer import (
    NO_OUTPUT,
    BadRange,
    KVConnectorOutput,
    TransferId,
    TransferReport,
    TransferStatus,
)

DONE, FAILED = TransferStatus.DONE, TransferStatus.FAILED
NAME, OTHER = TransferId("r", 0, part=1), TransferId("r", 0, part=2)
SHARDS = frozenset({(0, 0), (0, 1), (1, 0)})


def report(
    shard: tuple[int, int], status: TransferStatus = DONE, *bad: BadRange, name: TransferId = NAME
) -> TransferReport:
    return TransferReport(name, shard, status, bad)


@pytest.mark.parametrize("order", list(itertools.permutations(sorted(SHARDS))))
def test_a_transfer_is_complete_when_every_shard_has_reported(order: tuple[tuple[int, int], ...]) -> None:
    ledger = TransferLedger[str]()
    ledger.open(NAME, SHARDS, "owner")
    for shard in order[:-1]:
        assert ledger.apply(report(shard)) is None
        assert ledger.apply(report(shard)) is None, "a duplicate completes nothing"
    assert list(ledger) == ["owner"]
    ended = ledger.apply(report(order[-1]))
    assert ended is not None
    assert (ended[0], [each.shard for each in ended[1]]) == ("owner", sorted(SHARDS))
    assert ledger.apply(report(order[0])) is None, "a late one is about an unknown transfer"
    assert (ledger.num_duplicates, ledger.num_unknown, len(ledger)) == (2, 1, 0)
    ledger.check_integrity()


def test_as_many_reports_as_shards_are_not_enough() -> None:
    ledger = TransferLedger[str]()
    ledger.open(NAME, SHARDS, "owner")
    strange = [report((0, 0)), report((0, 0), FAILED), report((9, 9)), report((0, 1), name=OTHER)]
    assert [ledger.apply(each) for each in strange] == [None] * 4
    assert NAME in ledger
    assert (ledger.num_duplicates, ledger.num_unknown) == (1, 2)


@pytest.mark.parametrize("order", [(DONE, FAILED), (FAILED, DONE)])
def test_a_shard_that_contradicts_itself_has_failed(order: tuple[TransferStatus, TransferStatus]) -> None:
    ledger = TransferLedger[str]()
    ledger.open(NAME, SHARDS, "owner")
    bad = BadRange(0, 16, 32)
    for status in order:
        assert ledger.apply(report((0, 0), status, *([bad] if status is FAILED else []))) is None
    assert ledger.apply(report((0, 1))) is None, "a contradiction completes nothing"
    ended = ledger.apply(report((1, 0)))
    assert ended is not None
    first, *others = ended[1]
    assert (first.status, first.bad_ranges) == (FAILED, (bad,))
    assert [each.status for each in others] == [DONE, DONE]
    assert ledger.num_duplicates == 1


def test_a_transfer_name_is_used_once() -> None:
    ledger = TransferLedger[str]()
    ledger.open(NAME, SHARDS, "owner")
    with pytest.raises(AssertionError, match="twice"):
        ledger.open(NAME, SHARDS, "owner")
    with pytest.raises(AssertionError, match="no rank"):
        ledger.open(OTHER, (), "owner")


def test_the_missing_ranges_are_the_union_over_shards() -> None:
    first, second = BadRange(0, 16, 32), BadRange(1, 48, 64)
    assert bad_ranges([report((0, 0)), report((0, 1))], 2, 16, 64) == ()
    assert bad_ranges([report((0, 0), FAILED, first), report((0, 1), FAILED, second, first)], 2, 16, 64) == (
        first,
        second,
    )
    # A failure without ranges has loaded nothing.
    assert bad_ranges([report((0, 0)), report((0, 1), FAILED)], 2, 16, 64) == (BadRange(0, 16, 64), BadRange(1, 16, 64))


def test_aggregation_is_a_union() -> None:
    one = KVConnectorOutput((report((0, 0)), report((0, 1))))
    other = KVConnectorOutput((report((1, 0)), report((0, 1))))
    both, reverse = aggregate([one, other, NO_OUTPUT]), aggregate([other, NO_OUTPUT, one])
    assert set(both.reports) == set(reverse.reports) == {report(shard) for shard in SHARDS}
    assert len(both.reports) == 3
    assert aggregate([one]) == one
    assert aggregate([]).reports == ()

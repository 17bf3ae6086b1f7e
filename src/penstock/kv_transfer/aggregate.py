"""Merges the results of one step from all its ranks: a union by identity, the same for one rank and for many."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.messages.kv_transfer import KVConnectorOutput, TransferReport


def aggregate(outputs: Iterable[KVConnectorOutput]) -> KVConnectorOutput:
    """Returns the union of the ranks' reports. Their order has no meaning, and a duplicate report counts once."""
    reports: dict[TransferReport, None] = {}
    for output in outputs:
        reports.update(dict.fromkeys(output.reports))
    return KVConnectorOutput(tuple(reports))

"""Prometheus metrics made from a table, in a separate registry, and the text of a scrape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

from penstock.metrics.table import Kind, Metric

_OPENMETRICS = "application/openmetrics-text"
_T = TypeVar("_T", Counter, Gauge, Histogram)


class Families:
    """The families by kind and name, all with `labels` before their own, and the process's own metrics."""

    def __init__(self, table: Sequence[Metric], labels: Sequence[str] = ()) -> None:
        self._table = table
        self._labels = labels
        self._registry = CollectorRegistry()
        self.counters = self._make(Kind.COUNTER, Counter)
        self.gauges = self._make(Kind.GAUGE, Gauge)
        self.histograms = self._make(Kind.HISTOGRAM, Histogram)
        ProcessCollector(registry=self._registry)

    def render(self, accept: str) -> tuple[bytes, str]:
        """Returns the response to a scrape with this Accept header, and its content type."""
        if _OPENMETRICS not in accept:
            return generate_latest(self._registry), CONTENT_TYPE_PLAIN_0_0_4
        # The library's other escaping schemes would replace the colons of these names with underscores.
        return openmetrics.generate_latest(self._registry, openmetrics.ALLOWUTF8), openmetrics.CONTENT_TYPE_LATEST

    def children(self, families: dict[str, _T], *values: str) -> dict[str, _T]:
        """Returns by name the metrics of the families that have only the common labels, with these values."""
        return {
            metric.name: families[metric.name].labels(*values) if values else families[metric.name]
            for metric in self._table
            if metric.name in families and not metric.labels
        }

    def _make(self, kind: Kind, make: Callable[..., _T]) -> dict[str, _T]:
        return {
            metric.name: make(
                metric.name,
                metric.help,
                (*self._labels, *metric.labels),
                registry=self._registry,
                **({"buckets": metric.buckets} if metric.buckets else {}),
            )
            for metric in self._table
            if metric.kind is kind
        }

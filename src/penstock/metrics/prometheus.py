"""The server's Prometheus metrics of HTTP and of each engine core, and the text of a scrape.

The metrics are those of `penstock.metrics.table`. Belongs to the event loop's thread.
"""

from __future__ import annotations

from penstock.metrics.engine_metrics import EngineMetrics
from penstock.metrics.families import Families
from penstock.metrics.table import COMMON_LABELS, METRICS

# The engine label of counts that concern no engine.
_ENGINE = "0"
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


class PrometheusMetrics:
    """One for each server; `engine` adds those of an engine core."""

    def __init__(self, model_name: str) -> None:
        self._families = Families(METRICS, COMMON_LABELS)
        self._model_name = model_name
        self._engines: dict[int, EngineMetrics] = {}
        self._common = (model_name, _ENGINE)
        counters = self._families.counters
        self._http_requests = counters["penstock:http_requests"]
        self._disconnects = counters["penstock:client_disconnects"].labels(*self._common)

    def engine(self, rank: int) -> EngineMetrics:
        """Returns the metrics of the engine core with this data parallel rank, the value of their label `engine`."""
        if rank not in self._engines:
            self._engines[rank] = EngineMetrics(self._families, self._model_name, rank)
        return self._engines[rank]

    def on_http(self, route: str, method: str, status: int) -> None:
        """Counts a response. `route` is one of the app's paths, never a client's, so that their number is bounded."""
        method = method if method in _METHODS else "other"
        self._http_requests.labels(*self._common, route, method, str(status)).inc()

    def on_disconnect(self) -> None:
        """A client disconnected before its response was complete."""
        self._disconnects.inc()

    def render(self, accept: str) -> tuple[bytes, str]:
        """Returns the response to a scrape with this Accept header, and its content type."""
        for engine in self._engines.values():
            engine.read()
        return self._families.render(accept)

"""The router's metrics. Names under `vllm_router_` are those of vLLM's router; others are under `penstock_router_`.

`worker` is an instance's URL. `route` is a path of the OpenAI API, or `other`, so that clients cannot create series.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.metrics.families import Families
from penstock.metrics.table import Kind, Metric, counter, gauge

ROUTES = (
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/models",
    "/tokenize", "/detokenize",
)  # fmt: skip
_OTHER = "other"
_ERRORS = ("no_instance", "cut", "client_left")
_SECONDS = (
    0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 30.0, 60.0, 90.0, 120.0, 180.0,
    240.0,
)  # fmt: skip


ROUTER_METRICS = (
    counter("vllm_router_requests", "Requests, by route.", "route"),
    Metric("vllm_router_request_duration_seconds", Kind.HISTOGRAM, "Until an answer's end.", ("route",), _SECONDS),
    counter("vllm_router_request_errors", "Requests without a whole answer.", "route", "error_type"),
    counter("vllm_router_retries", "Requests that were given to another instance, by route.", "route"),
    counter("vllm_router_retries_exhausted", "Requests that were tried as often as they may be.", "route"),
    gauge("vllm_router_active_workers", "Instances that get requests."),
    gauge("vllm_router_worker_health", "1 while the instance gets requests.", "worker"),
    gauge("vllm_router_worker_load", "Requests that the instance has, and its prompt tokens to compute.", "worker"),
    gauge("vllm_router_running_requests", "Requests that the instance has.", "worker"),
    counter("vllm_router_processed_requests", "Requests that the instance was given.", "worker"),
    counter("vllm_router_pd_requests", "Requests whose prompt went to a prefill instance.", "route"),
    counter("vllm_router_pd_prefill_requests", "Prompts that the prefill instance was given.", "worker"),
    counter("vllm_router_pd_decode_requests", "Requests that the decode instance was given.", "worker"),
    counter("vllm_router_pd_prefill_errors", "Prompts on which the prefill instance failed.", "worker"),
    counter("vllm_router_pd_decode_errors", "Requests on which the decode instance failed.", "worker"),
    # Metrics without an equivalent in vLLM's router.
    gauge("penstock_router_queued_requests", "Requests that wait for an instance."),
    gauge("penstock_router_instances", "Instances, by role and state.", "role", "state"),
    counter("penstock_router_responses", "Answers, by route and status.", "route", "status"),
    counter("penstock_router_migrations", "Streams that another instance was to continue.", "reason", "outcome"),
    counter("penstock_router_prompts", "Prompts, by where they are computed.", "computing"),
    gauge("penstock_router_prefill_tokens_per_second", "Measured speed of prompts.", "worker"),
    gauge("penstock_router_prefill_seconds", "Measured time of a prompt besides that for its tokens.", "worker"),
    gauge("penstock_router_load_tokens_per_second", "Measured speed of KV from another instance.", "worker"),
    gauge("penstock_router_load_seconds", "Measured time of such a load besides that for its tokens.", "worker"),
    gauge("penstock_router_share_tokens_per_second", "Measured speed of offers of KV to another instance.", "worker"),
    gauge("penstock_router_share_seconds", "Measured time of such an offer besides that for its tokens.", "worker"),
    gauge("penstock_router_expected_first_token_seconds", "The last estimates, by where it is computed.", "computing"),
    counter("penstock_router_self_prefills", "Prompts that a decode instance computed, for want of a prefill one."),
    counter("penstock_router_prompt_tokens", "Prompt tokens, by the usage of the instance's answers.", "worker"),
    counter("penstock_router_cached_tokens", "Those of them that the instance had cached or loaded.", "worker"),
    counter("penstock_router_generation_tokens", "Output tokens, by the usage of the instance's answers.", "worker"),
    counter("penstock_router_expected_cached_tokens", "Prompt tokens expected in the instance's cache.", "worker"),
    gauge("penstock_router_known_blocks", "Blocks that the instance holds, by its KV events.", "worker"),
)


@dataclass(frozen=True, slots=True)
class InstanceView:
    """An instance's values for a scrape. `num_blocks` is None if it publishes no KV events. `prompts`, `loads` and
    `shares` are measured seconds, of each and for each token; None if they are unknown.
    """

    url: str
    role: str
    state: str
    is_ready: bool
    num_outstanding: int
    load: int
    num_blocks: int | None
    prompts: tuple[float, float] | None = None
    loads: tuple[float, float] | None = None
    shares: tuple[float, float] | None = None


class RouterMetrics:
    """Counts reported events. The registry gets their sums, and the gauges, at each scrape: its counters take a lock
    for every addition.
    """

    def __init__(self) -> None:
        self._families = Families(ROUTER_METRICS)
        # By name and labels: what has been counted since the last scrape.
        self._counted: defaultdict[tuple[str, tuple[str, ...]], float] = defaultdict(float)
        self._durations: dict[str, Any] = {}
        counters = self._families.counters
        for route in (*ROUTES, _OTHER):
            # All series exist from the start, with 0, so that the first event is an increase and appears in rates.
            counters["vllm_router_requests"].labels(route)
            for error in _ERRORS:
                counters["vllm_router_request_errors"].labels(route, error)

    def count(self, name: str, amount: float = 1, *labels: str) -> None:
        """`name` is one of the table's counters."""
        self._counted[name, labels] += amount

    def on_answer(self, path: str, status: int, seconds: float) -> None:
        route = route_of(path)
        durations = self._durations.get(route)
        if durations is None:
            family = self._families.histograms["vllm_router_request_duration_seconds"]
            durations = self._durations[route] = family.labels(route)
        durations.observe(seconds)
        self.count("penstock_router_responses", 1, route, str(status))

    def on_error(self, path: str, kind: str) -> None:
        """`kind`: no_instance, cut, client_left."""
        assert kind in _ERRORS, kind
        self.count("vllm_router_request_errors", 1, route_of(path), kind)

    def _show_line(self, name: str, url: str, line: tuple[float, float] | None) -> None:
        if line is None:
            return
        base, slope = line
        self._families.gauges[f"penstock_router_{name}_seconds"].labels(url).set(base)
        if slope:
            self._families.gauges[f"penstock_router_{name}_tokens_per_second"].labels(url).set(1 / slope)

    def render(
        self, accept: str, instances: Iterable[InstanceView], num_queued: int, estimates: Mapping[str, float]
    ) -> tuple[bytes, str]:
        """Returns the response to a scrape with this Accept header, and its content type. `estimates` are the last ones
        of the time to the first token, by where the prompt is computed.
        """
        for (name, labels), amount in self._counted.items():
            family = self._families.counters[name]
            (family.labels(*labels) if labels else family).inc(amount)
        self._counted.clear()
        gauges = self._families.gauges
        known_blocks = gauges["penstock_router_known_blocks"]
        known_blocks.clear()
        for name in ("worker_health", "worker_load", "running_requests"):
            gauges[f"vllm_router_{name}"].clear()
        by_state = gauges["penstock_router_instances"]
        by_state.clear()
        for name in ("prefill", "load", "share"):
            gauges[f"penstock_router_{name}_seconds"].clear()
            gauges[f"penstock_router_{name}_tokens_per_second"].clear()
        num_ready = 0
        for each in instances:
            self._show_line("prefill", each.url, each.prompts)
            self._show_line("load", each.url, each.loads)
            self._show_line("share", each.url, each.shares)
            num_ready += each.is_ready
            gauges["vllm_router_worker_health"].labels(each.url).set(each.is_ready)
            gauges["vllm_router_worker_load"].labels(each.url).set(each.load)
            gauges["vllm_router_running_requests"].labels(each.url).set(each.num_outstanding)
            by_state.labels(each.role, each.state).inc()
            if each.num_blocks is not None:
                known_blocks.labels(each.url).set(each.num_blocks)
        gauges["vllm_router_active_workers"].set(num_ready)
        gauges["penstock_router_queued_requests"].set(num_queued)
        for computing, seconds in estimates.items():
            gauges["penstock_router_expected_first_token_seconds"].labels(computing).set(seconds)
        return self._families.render(accept)


def route_of(path: str) -> str:
    return path if path in ROUTES else _OTHER

"""Prometheus metrics, traces, and the Grafana dashboard: scrapes and spans show what the request log recorded."""

from __future__ import annotations

import json
import logging
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import combinations
from pathlib import Path
from typing import Any

import msgspec
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client import parser
from prometheus_client.openmetrics import parser as openmetrics_parser

from penstock.messages.engine_info import EngineInfo
from penstock.messages.outputs import EngineOutput, FinishReason
from penstock.messages.stats import (
    ExpertStats,
    RemoteKVStats,
    RequestEvent,
    RequestEventKind,
    SchedulerStats,
    SpeculationStats,
    StepReport,
)
from penstock.metrics import tracing
from penstock.metrics.prometheus import PrometheusMetrics
from penstock.metrics.request_log import RequestLog, RequestRecord
from penstock.metrics.table import METRICS, Kind
from penstock.metrics.tracing import RequestTracer, make_tracer
from penstock.utils.clock import SystemClock
from penstock.utils.errors import ConfigError

DASHBOARD = Path(__file__).parents[2] / "examples/observability/grafana/penstock.json"
COMMON = {"model_name": "m", "engine": "0"}
SCHEDULED, PREEMPTED = RequestEventKind.SCHEDULED, RequestEventKind.PREEMPTED
SUFFIXES = {Kind.COUNTER: ("_total",), Kind.GAUGE: ("",), Kind.HISTOGRAM: ("_bucket", "_sum", "_count")}

# It logs errors about unreachable collectors long after their test has ended.
logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)

# A new name needs a decision: dashboards and alerts are built on these.
NAMES = {
    "vllm:lora_requests_info{max_lora,running_lora_adapters,waiting_lora_adapters}",
    "vllm:cache_config_info{block_size,num_gpu_blocks}", "vllm:e2e_request_latency_seconds", "vllm:generation_tokens",
    "vllm:inter_token_latency_seconds", "vllm:iteration_tokens_total", "vllm:kv_cache_usage_perc",
    "vllm:num_preemptions", "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:prefix_cache_hits",
    "vllm:spec_decode_num_accepted_tokens", "vllm:spec_decode_num_accepted_tokens_per_pos{position}",
    "vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_drafts",
    "vllm:prefix_cache_queries", "vllm:prompt_tokens", "vllm:prompt_tokens_cached", "vllm:request_decode_time_seconds",
    "vllm:request_generation_tokens", "vllm:request_inference_time_seconds", "vllm:request_params_max_tokens",
    "vllm:request_params_n", "vllm:request_prefill_time_seconds", "vllm:request_prompt_tokens",
    "vllm:request_queue_time_seconds", "vllm:request_success{finished_reason}",
    "vllm:request_time_per_output_token_seconds", "vllm:time_to_first_token_seconds", "penstock:client_disconnects",
    "penstock:engine_info{version,dtype,device,kernels,num_threads,max_model_len}", "penstock:engine_up",
    "penstock:http_requests{route,method,status}", "penstock:requests{phase}",
    "penstock:expert_balancedness", "penstock:expert_moves_failed", "penstock:experts_moved",
    "penstock:seconds_without_progress", "penstock:steps", "penstock:tokens_computed", "penstock:kv_loads",
    "penstock:kv_loads_failed", "penstock:kv_load_timeouts", "penstock:kv_loaded_tokens",
    "penstock:kv_connector{name}", "penstock:graph_replays", "penstock:kv_peer_transfers{direction,peer}",
    "penstock:engine_restarts",
    "penstock:kv_peer_tokens{direction,peer}", "penstock:kv_peer_bytes{direction,peer}",
    "penstock:kv_peer_seconds{direction,peer}", "penstock:kv_peer_failed{direction,peer}",
}  # fmt: skip
ATTRIBUTES = {
    "gen_ai.latency.e2e", "gen_ai.latency.time_in_model_decode", "gen_ai.latency.time_in_model_inference",
    "gen_ai.latency.time_in_model_prefill", "gen_ai.latency.time_in_queue", "gen_ai.latency.time_to_first_token",
    "gen_ai.request.id", "gen_ai.request.max_tokens", "gen_ai.request.n", "gen_ai.response.finish_reasons",
    "gen_ai.response.model", "gen_ai.usage.completion_tokens", "gen_ai.usage.prompt_tokens", "penstock.cached_tokens",
    "penstock.preemptions",
}  # fmt: skip


INFO = EngineInfo(
    dtype="bfloat16",
    device="cpu",
    device_name="",
    kernels="avx2",
    num_threads=2,
    max_model_len=64,
    num_blocks=512,
    block_size=16,
    kv_cache_bytes=1 << 20,
    kv_cache_dtype="bfloat16",
    load_seconds=0.5,
    max_loras=2,
)
DRAFTS = SpeculationStats(2, 5, (2, 1))
PEER_COUNTS = ("transfers", "tokens", "bytes", "seconds", "failed")


def transfers(direction: str, peer: str, *counts: float) -> dict[str, float]:
    """Returns a connector's counters of transfers between its engine and one peer."""
    return {f"p2p_{direction}/{peer}/{what}": count for what, count in zip(PEER_COUNTS, counts, strict=True)}


IDLE = SchedulerStats(
    0, 0, 0.0, 0, 0, 0, connector={"num_stored": 3, **transfers("from", "prefill", 1, 100, 6400, 0.25, 0)}
)


@pytest.fixture(autouse=True, scope="module")
def _no_thread_remains() -> Iterator[None]:
    """An exporter that still retries draws random numbers, which Hypothesis attributes to strategies of later tests."""
    before = set(threading.enumerate())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracing, "_SEND_TIMEOUT_SECONDS", 1.0)
        yield
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
        assert not thread.is_alive(), thread.name


@dataclass
class World:
    """A request log with its observers, to which tests report what an engine would; also the engine that is watched."""

    metrics: PrometheusMetrics = field(default_factory=lambda: PrometheusMetrics("m"))
    observers: tuple[RequestTracer, ...] = ()
    stats: SchedulerStats = IDLE
    seconds_without_progress: float = 0.0
    outage: Exception | None = None
    num_restarts: int = 0
    info: EngineInfo = INFO

    def __post_init__(self) -> None:
        self.log = RequestLog([self.metrics.engine(0), *self.observers])
        self.metrics.engine(0).watch(self)

    def add(self, request_id: str, at: float, num_prompt_tokens: int = 10, **facts) -> None:
        self.log.add(RequestRecord(request_id, at, num_prompt_tokens, **facts))

    def step(self, now: float, tokens: dict[str, int], events=(), num_tokens=0, **stats: Any) -> None:
        """Reports a step that gave each of these requests this number of tokens."""
        self.stats = msgspec.structs.replace(self.stats, **stats)
        outputs = tuple(
            EngineOutput(request_id=request_id, new_token_ids=(7,) * count, num_cached_tokens=4)
            for request_id, count in tokens.items()
        )
        events = tuple(RequestEvent(*event) for event in events)
        self.log.on_report(StepReport(outputs=outputs, events=events, num_tokens=num_tokens, stats=self.stats), now)

    def complete(self, request_id: str, at: float, reason: str = "stop", **facts) -> None:
        """Reports a request that waits 1 s, prefills 2 s, then gets 1 + 2 + 1 tokens within 1 s."""
        self.add(request_id, at, **facts)
        self.step(at + 3, {request_id: 1}, [(request_id, SCHEDULED, at + 1)], num_tokens=10)
        self.step(at + 3.75, {request_id: 2}, num_tokens=1)
        self.step(at + 4, {request_id: 1}, num_tokens=1, speculation=DRAFTS)
        self.log.end([request_id], reason, at + 4)

    def scrape(self) -> Scrape:
        return Scrape(self.metrics.render("")[0].decode())


class Scrape:
    def __init__(self, text: str) -> None:
        self.families = {
            family.name: family
            for family in parser.text_string_to_metric_families(text)
            if not family.name.endswith("_created")
        }
        self._values = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in self.families.values()
            for sample in family.samples
        }

    def __call__(self, name: str, **labels: str) -> float:
        return self._values[name, frozenset((COMMON | labels).items())]

    def histogram(self, name: str) -> tuple[float, float]:
        """Returns the histogram's count and sum."""
        return self(f"{name}_count"), self(f"{name}_sum")


def test_the_names_of_metrics() -> None:
    assert {m.name + (f"{{{','.join(m.labels)}}}" if m.labels else "") for m in METRICS} == NAMES
    assert len({m.name for m in METRICS}) == len(METRICS)


def test_a_scrape_shows_the_table() -> None:
    world = World()
    world.metrics.on_http("/v1/models", "GET", 200)
    world.step(0.0, {}, speculation=DRAFTS)
    scrape = world.scrape()
    assert {name for name in scrape.families if not name.startswith("process_")} == {m.name for m in METRICS}
    assert "process_resident_memory_bytes" in scrape.families
    for metric in METRICS:
        family = scrape.families[metric.name]
        assert (family.type, family.documentation) == (metric.kind, metric.help)
        assert {s.name for s in family.samples} == {metric.name + suffix for suffix in SUFFIXES[metric.kind]}
        labels = {*COMMON, *metric.labels}
        assert all(set(sample.labels) - {"le"} == labels for sample in family.samples)
        bounds = [float(s.labels["le"]) for s in family.samples if s.name.endswith("_bucket")]
        assert bounds == [*metric.buckets, float("inf")] * (metric.kind is Kind.HISTOGRAM)
    assert scrape("vllm:cache_config_info", block_size="16", num_gpu_blocks="512") == 1
    assert scrape("penstock:engine_info", version="0.1.0", dtype="bfloat16", device="cpu", kernels="avx2",
                  num_threads="2", max_model_len="64") == 1  # fmt: skip


def test_adapters_of_running_and_waiting_requests() -> None:
    world = World()
    world.add("a", 100.0, adapter="sql")
    world.add("b", 100.0, adapter="fr")
    world.add("c", 100.0, adapter="fr")
    world.add("d", 100.0)

    def shown() -> list[tuple[str, str]]:
        samples = world.scrape().families["vllm:lora_requests_info"].samples
        assert all(sample.labels["max_lora"] == "2" and sample.value > 1e9 for sample in samples)
        return [(s.labels["running_lora_adapters"], s.labels["waiting_lora_adapters"]) for s in samples]

    assert shown() == [("", "fr,sql")]
    scheduled = RequestEventKind.SCHEDULED
    world.step(101.0, {"a": 1}, events=[("a", scheduled, 100.5), ("b", scheduled, 100.5)])
    assert shown() == [("fr,sql", "fr")]
    world.log.end(["a", "b", "c"], "stop", 102.0)
    assert shown() == [("", "")]


def test_the_times_of_a_request() -> None:
    world = World()
    world.complete("a", at=100.0, max_tokens=4)
    scrape = world.scrape()
    expected = {
        "vllm:time_to_first_token_seconds": (1, 3.0),
        "vllm:inter_token_latency_seconds": (2, 1.0),
        "vllm:request_time_per_output_token_seconds": (1, 1 / 3),
        "vllm:e2e_request_latency_seconds": (1, 4.0),
        "vllm:request_queue_time_seconds": (1, 1.0),
        "vllm:request_prefill_time_seconds": (1, 2.0),
        "vllm:request_decode_time_seconds": (1, 1.0),
        "vllm:request_inference_time_seconds": (1, 3.0),
        "vllm:request_prompt_tokens": (1, 10),
        "vllm:request_generation_tokens": (1, 4),
        "vllm:request_params_n": (1, 1),
        "vllm:request_params_max_tokens": (1, 4),
        "vllm:iteration_tokens_total": (3, 12),
    }
    for name, count_and_sum in expected.items():
        assert scrape.histogram(name) == pytest.approx(count_and_sum), name
    assert set(expected) == {metric.name for metric in METRICS if metric.kind is Kind.HISTOGRAM}
    assert scrape("vllm:prompt_tokens_total") == 10
    assert scrape("vllm:prompt_tokens_cached_total") == 4
    assert scrape("vllm:generation_tokens_total") == 4
    assert (scrape("penstock:steps_total"), scrape("penstock:tokens_computed_total")) == (3, 12)
    assert scrape("vllm:time_to_first_token_seconds_bucket", le="2.5") == 0
    assert scrape("vllm:time_to_first_token_seconds_bucket", le="5.0") == 1


def test_every_end_is_counted_but_only_completed_requests_are_timed() -> None:
    world = World()
    before = world.scrape()
    assert [before("vllm:request_success_total", finished_reason=reason) for reason in FinishReason] == [0, 0, 0, 0]
    for place, reason in enumerate(FinishReason):
        world.complete(reason.value, at=10.0 * place, reason=reason.value)
    world.add("never scheduled", at=50.0)
    world.log.end(["never scheduled", "unknown"], "abort", 51.0)
    after = world.scrape()
    counts = {reason.value: after("vllm:request_success_total", finished_reason=reason) for reason in FinishReason}
    assert counts == {"stop": 1, "length": 1, "abort": 2, "error": 1}
    assert after.histogram("vllm:e2e_request_latency_seconds") == (2, 8.0)
    assert after("vllm:prompt_tokens_total") == 40


def test_one_token_has_no_time_per_token() -> None:
    world = World()
    world.add("a", at=0.0)
    world.step(1.0, {"a": 1}, [("a", SCHEDULED, 0.5)], num_tokens=10)
    world.log.end(["a"], "length", 1.0)
    scrape = world.scrape()
    assert scrape.histogram("vllm:request_time_per_output_token_seconds") == (0, 0)
    assert scrape.histogram("vllm:inter_token_latency_seconds") == (0, 0)
    assert scrape.histogram("vllm:request_params_max_tokens") == (0, 0)


def test_n_completions_count_as_one_request() -> None:
    world = World()
    for index in range(3):
        world.complete(f"a#{index}", at=0.0, n=3)
    assert world.scrape().histogram("vllm:request_params_n") == (1, 3)
    assert world.scrape().histogram("vllm:request_generation_tokens") == (3, 12)


def test_the_schedulers_totals_become_counters() -> None:
    world = World()
    for totals in ((0, 16, 0), (2, 32, 16), (2, 32, 16), (5, 48, 32)):
        preemptions, queries, hits = totals
        world.step(0.0, {}, num_preemptions=preemptions, prefix_cache_queries=queries, prefix_cache_hits=hits)
        names = ("num_preemptions", "prefix_cache_queries", "prefix_cache_hits")
        assert tuple(world.scrape()(f"vllm:{name}_total") for name in names) == totals
    # Steps that computed nothing are not counted.
    assert world.scrape()("penstock:steps_total") == 0


def test_gauges_are_read_when_scraped() -> None:
    world = World()
    for request_id in "abcd":
        world.add(request_id, at=0.0)
    events = [(request_id, SCHEDULED, 0.5) for request_id in "abc"]
    world.step(1.0, {"a": 1}, [*events, ("c", PREEMPTED, 0.75)], num_running=2, num_waiting=2, kv_cache_usage=0.25)
    world.seconds_without_progress = 1.5
    scrape = world.scrape()
    phases = {sample.labels["phase"]: sample.value for sample in scrape.families["penstock:requests"].samples}
    assert phases == {"queued": 1, "prefill": 1, "decode": 1, "preempted": 1}
    assert (scrape("vllm:num_requests_running"), scrape("vllm:num_requests_waiting")) == (2, 2)
    assert scrape("vllm:kv_cache_usage_perc") == 0.25
    assert (scrape("penstock:engine_up"), scrape("penstock:seconds_without_progress")) == (1, 1.5)
    # No step follows the last abort, or the engine's death.
    world.log.end("abcd", "abort", 2.0)
    world.stats, world.outage = IDLE, RuntimeError()
    scrape = world.scrape()
    assert {sample.value for sample in scrape.families["penstock:requests"].samples} == {0}
    assert (scrape("vllm:num_requests_running"), scrape("penstock:engine_up")) == (0, 0)


def test_counters_continue_when_a_new_engine_core_counts_from_0() -> None:
    world = World()
    world.step(1.0, {}, num_preemptions=5, remote_kv=RemoteKVStats(num_loads=4), experts=ExpertStats(0.75, 6, 1))
    world.num_restarts = 1
    world.stats = SchedulerStats(0, 0, 0.0, 0, 0, 0)
    world.step(2.0, {}, num_preemptions=2, connector=IDLE.connector)
    scrape = world.scrape()
    assert scrape("vllm:num_preemptions_total") == 7
    assert scrape("penstock:kv_loads_total") == 4
    assert scrape("penstock:experts_moved_total") == 6
    assert scrape("penstock:expert_moves_failed_total") == 1
    assert scrape("penstock:engine_restarts_total") == 1
    world.outage = RuntimeError()
    world.num_restarts = 3
    scrape = world.scrape()
    assert (scrape("penstock:engine_restarts_total"), scrape("penstock:engine_up")) == (3, 0)


def test_transfers_are_counted_by_peer() -> None:
    world = World()

    def shown(from_prefill: tuple[float, ...], **others: float) -> tuple[Scrape, list[list[float]]]:
        sent = transfers("to", "decode", 1, 7, 448, 0.5, 0)
        received = transfers("from", "prefill", *from_prefill)
        world.stats = msgspec.structs.replace(IDLE, connector={**others, **received, **sent})
        scrape = world.scrape()
        peers = [{"direction": "from", "peer": "prefill"}, {"direction": "to", "peer": "decode"}]
        return scrape, [[scrape(f"penstock:kv_peer_{what}_total", **peer) for what in PEER_COUNTS] for peer in peers]

    sent = [1, 7, 448, 0.5, 0]
    for _ in range(2):  # A second scrape adds nothing.
        assert shown((1, 100, 6400, 0.25, 0))[1] == [[1, 100, 6400, 0.25, 0], sent]
    scrape, counts = shown((2, 150, 9600, 0.75, 1), p2p_held=1)
    assert counts == [[2, 150, 9600, 0.75, 1], sent]
    # Nothing is exported twice.
    names = [sample.labels["name"] for sample in scrape.families["penstock:kv_connector"].samples]
    assert names == ["p2p_held"]


@pytest.mark.parametrize("child", ["", "fast.", "a.b/c."], ids=["alone", "child", "child_with_signs"])
@pytest.mark.parametrize("peer", ["", "10.0.0.7", "a/b/tokens", "x.p2p_to/y", 'quote " and \\', "two\nlines", "<b>é"])
def test_a_peer_may_have_any_name(peer: str, child: str) -> None:
    world = World()
    counts = transfers("from", peer, 1, 100, 6400, 0.25, 0)
    world.stats = msgspec.structs.replace(IDLE, connector={f"{child}{name}": each for name, each in counts.items()})
    scrape = world.scrape()
    assert scrape("penstock:kv_peer_tokens_total", direction="from", peer=peer) == 100
    assert scrape.families["penstock:kv_connector"].samples == []


def test_http_requests_are_counted() -> None:
    world = World()
    for method, status in (("POST", 200), ("POST", 200), ("POST", 503), ("BREW", 405), ("PROPFIND", 405)):
        world.metrics.on_http("/v1/completions", method, status)
    world.metrics.on_disconnect()
    scrape = world.scrape()
    counts = {
        (sample.labels["method"], sample.labels["status"]): sample.value
        for sample in scrape.families["penstock:http_requests"].samples
    }
    assert counts == {("POST", "200"): 2, ("POST", "503"): 1, ("other", "405"): 2}
    assert scrape("penstock:client_disconnects_total") == 1


PLAIN, OPENMETRICS = (
    "text/plain; version=0.0.4; charset=utf-8",
    "application/openmetrics-text; version=1.0.0; charset=utf-8",
)


def test_drafts_are_counted_by_difference() -> None:
    world = World()
    world.step(0.0, {}, speculation=SpeculationStats(1, 3, (1, 1, 0)))
    world.step(1.0, {}, speculation=SpeculationStats(3, 8, (2, 1, 1)))
    samples = {
        (sample.name, sample.labels.get("position")): sample.value
        for family in world.scrape().families.values()
        for sample in family.samples
    }
    assert samples["vllm:spec_decode_num_drafts_total", None] == 3
    assert samples["vllm:spec_decode_num_draft_tokens_total", None] == 8
    assert samples["vllm:spec_decode_num_accepted_tokens_total", None] == 4
    by_position = [samples["vllm:spec_decode_num_accepted_tokens_per_pos_total", str(place)] for place in range(3)]
    assert by_position == [2, 1, 1]


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        ("", PLAIN),
        ("*/*", PLAIN),
        ("text/html, text/plain; version=latest", PLAIN),
        ("\N{SNOWMAN};;,=,", PLAIN),
        ("application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75", OPENMETRICS),
        ("application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;q=0.3", OPENMETRICS),
        ("application/openmetrics-text; version=latest; escaping=", OPENMETRICS),
    ],
)
def test_every_format_has_the_same_names(accept: str, content_type: str) -> None:
    world = World()
    world.complete("a", at=0.0)
    body, given = world.metrics.render(accept)
    assert given == content_type
    parse = (openmetrics_parser if given == OPENMETRICS else parser).text_string_to_metric_families
    samples = {sample.name: sample.value for family in parse(body.decode()) for sample in family.samples}
    assert samples["vllm:generation_tokens_total"] == 4
    assert {metric.name + suffix for metric in METRICS for suffix in SUFFIXES[metric.kind]} - set(samples) == {
        "penstock:http_requests_total",
    }


def test_two_servers_in_one_process_have_separate_metrics() -> None:
    one, other = World(), World()
    one.complete("a", at=0.0)
    assert other.scrape()("vllm:generation_tokens_total") == 0


def _expressions() -> list[str]:
    return [target["expr"] for panel in _panels() for target in panel.get("targets", ())]


def _panels() -> list[dict]:
    return json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]


def test_the_dashboard_queries_existing_metrics() -> None:
    series = {metric.name + suffix: metric for metric in METRICS for suffix in SUFFIXES[metric.kind]}
    assert len(_expressions()) > 30
    for expression in _expressions():
        for name, selector in re.findall(r"([a-z]+:[a-z0-9_]+)(\{[^}]*\})?", expression):
            assert name in series, expression
            assert 'model_name=~"$model_name"' in selector, expression
            used = set(re.findall(r"(\w+)=", selector)) | set(re.findall(r"\w+", _grouping(expression))) - {"le"}
            assert used <= {*COMMON, *series[name].labels}, expression


def _grouping(expression: str) -> str:
    found = re.search(r"by \(([^)]*)\)", expression)
    return found.group(1) if found else ""


def test_the_dashboards_panels_are_in_order() -> None:
    panels = _panels()
    assert [p["title"] for p in panels if p["type"] == "row"] == [
        "Traffic",
        "Latency",
        "Engine",
        "Tokens",
        "Transfers between engines",
    ]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for one, other in combinations([panel["gridPos"] for panel in panels], 2):
        apart_x = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        apart_y = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert apart_x or apart_y, (one, other)


class Collector:
    """An OTLP/HTTP receiver that keeps what it receives."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.resources: list = []
        self.spans: list = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.paths.append(self.path)
                for resource_spans in ExportTraceServiceRequest.FromString(body).resource_spans:
                    collector.resources.append(resource_spans.resource)
                    for scope_spans in resource_spans.scope_spans:
                        collector.spans.extend(scope_spans.spans)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Collector:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _attributes(span) -> dict[str, object]:
    found = {}
    for attribute in span.attributes:
        kind = attribute.value.WhichOneof("value")
        value = getattr(attribute.value, kind)
        found[attribute.key] = [v.string_value for v in value.values] if kind == "array_value" else value
    return found


def _trace(collector: Collector, path: str = "", **facts) -> World:
    """Runs one traced request to its end."""
    tracer = make_tracer(collector.url + path, "m")
    world = World(observers=(tracer,))
    world.complete("a", at=1000.0, **facts)
    tracer.shutdown()
    tracer.shutdown()
    return world


@pytest.mark.parametrize("path", ["", "/", "/v1/traces", "/elsewhere"])
def test_a_trace_continues_its_callers(path: str) -> None:
    trace_id, parent_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    clock = SystemClock()
    offset = clock.wall() - clock.now()
    with Collector() as collector:
        _trace(collector, path, trace=f"00-{trace_id}-{parent_id}-01", max_tokens=4)
    assert collector.paths == [path if len(path) > 1 else "/v1/traces"]
    [resource] = collector.resources
    assert _attributes(resource)["service.name"] == "penstock"
    spans = {span.name: span for span in collector.spans}
    assert set(spans) == {"llm_request", "queue", "prefill", "decode"}
    assert {span.trace_id.hex() for span in collector.spans} == {trace_id}
    root = spans.pop("llm_request")
    assert root.parent_span_id.hex() == parent_id
    assert root.kind == root.SPAN_KIND_SERVER
    assert root.status.code == root.status.STATUS_CODE_UNSET
    assert {span.parent_span_id for span in spans.values()} == {root.span_id}
    assert len({span.span_id for span in collector.spans}) == 4
    seconds = {
        name: (span.start_time_unix_nano / 1e9 - offset, span.end_time_unix_nano / 1e9 - offset)
        for name, span in (spans | {"llm_request": root}).items()
    }
    expected = {
        "llm_request": (1000, 1004), "queue": (1000, 1001), "prefill": (1001, 1003), "decode": (1003, 1004)
    }  # fmt: skip
    for name, times in expected.items():
        assert seconds[name] == pytest.approx(times, abs=0.1), name
    assert spans["queue"].end_time_unix_nano - root.start_time_unix_nano == 1_000_000_000
    assert spans["decode"].end_time_unix_nano == root.end_time_unix_nano


def test_a_spans_attributes() -> None:
    with Collector() as collector:
        _trace(collector, max_tokens=4)
    root = _attributes(next(span for span in collector.spans if span.name == "llm_request"))
    assert set(root) == ATTRIBUTES
    assert root["gen_ai.request.id"] == "a"
    assert root["gen_ai.response.model"] == "m"
    assert root["gen_ai.response.finish_reasons"] == ["stop"]
    assert (root["gen_ai.request.n"], root["gen_ai.request.max_tokens"]) == (1, 4)
    assert (root["gen_ai.usage.prompt_tokens"], root["gen_ai.usage.completion_tokens"]) == (10, 4)
    names = ("time_in_queue", "time_to_first_token", "e2e", "time_in_model_prefill", "time_in_model_decode")
    assert [root[f"gen_ai.latency.{name}"] for name in names] == [1.0, 3.0, 4.0, 2.0, 1.0]
    assert root["penstock.cached_tokens"] == 4
    assert all(not span.attributes for span in collector.spans if span.name != "llm_request")


@pytest.mark.parametrize(
    "trace", [None, "", "nonsense", "00-" + "0" * 32 + "-b7ad6b7169203331-01", "00-12-34-01", "é\n"]
)
def test_a_malformed_parent_is_ignored(trace: str | None) -> None:
    with Collector() as collector:
        _trace(collector, trace=trace)
    [root] = [span for span in collector.spans if span.name == "llm_request"]
    assert root.parent_span_id == b""
    assert any(root.trace_id)
    assert len(collector.spans) == 4


def test_requests_that_the_caller_does_not_sample_are_not_traced() -> None:
    with Collector() as collector:
        world = _trace(collector, trace="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00")
    assert collector.spans == []
    assert world.scrape()("vllm:request_success_total", finished_reason="stop") == 1


def test_traces_of_aborted_and_failed_requests() -> None:
    with Collector() as collector:
        tracer = make_tracer(collector.url, "m")
        world = World(observers=(tracer,))
        world.add("waiting", at=0.0)
        world.add("prefilling", at=0.0)
        world.step(1.0, {}, [("prefilling", SCHEDULED, 0.5), ("prefilling", PREEMPTED, 0.75)])
        world.log.end(["waiting"], "abort", 2.0)
        world.log.end(["prefilling"], "error", 2.0)
        tracer.shutdown()
    roots = {_attributes(span)["gen_ai.request.id"]: span for span in collector.spans if span.name == "llm_request"}
    stages = {
        request_id: [span.name for span in collector.spans if span.parent_span_id == root.span_id]
        for request_id, root in roots.items()
    }
    assert stages == {"waiting": ["queue"], "prefilling": ["queue", "prefill"]}
    assert roots["waiting"].status.code == roots["waiting"].status.STATUS_CODE_UNSET
    assert roots["prefilling"].status.code == roots["prefilling"].status.STATUS_CODE_ERROR
    [event] = roots["prefilling"].events
    assert (event.name, event.time_unix_nano - roots["prefilling"].start_time_unix_nano) == ("preempted", 750_000_000)
    assert _attributes(roots["prefilling"])["penstock.preemptions"] == 1


@pytest.mark.parametrize("accepts", [True, False])
def test_an_unreachable_collector_does_not_delay_requests(accepts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector refuses connections, or accepts them and never answers."""
    monkeypatch.setattr(tracing, "_SHUTDOWN_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        if not accepts:
            listening.close()
        tracer = make_tracer(url, "m")
        world = World(observers=(tracer,))
        # Four spans each: more than the queue holds.
        num_requests = 1500
        start = time.perf_counter()
        for index in range(num_requests):
            world.complete(str(index), at=10.0 * index)
        assert (time.perf_counter() - start) / num_requests < 0.01
        start = time.perf_counter()
        tracer.shutdown()
        assert time.perf_counter() - start < 5
        world.complete("late", at=0.0)
    assert world.scrape()("vllm:request_success_total", finished_reason="stop") == num_requests + 1


@pytest.mark.parametrize("endpoint", ["", "localhost:4317", "grpc://localhost:4317", "http://", "file:///etc/passwd"])
def test_an_endpoint_that_is_not_a_url_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"otlp_traces_endpoint must be an http:// or https:// URL"):
        make_tracer(endpoint, "m")


def test_without_the_tracing_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"pip install 'penstock\[tracing\]'"):
        make_tracer("http://localhost:4318", "m")


def test_a_server_without_traces_imports_no_opentelemetry() -> None:
    code = "import sys, penstock.metrics.tracing; assert not [m for m in sys.modules if m.startswith('opentelemetry')]"
    subprocess.run([sys.executable, "-c", code], check=True)

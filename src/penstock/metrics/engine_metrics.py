"""The metrics of one engine core behind the server (`metrics.table`). Belongs to the event loop's thread."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import zip_longest
from operator import attrgetter
from typing import Protocol

from penstock import __version__
from penstock.messages.engine_info import EngineInfo
from penstock.messages.outputs import FinishReason
from penstock.messages.stats import SchedulerStats, SpeculationStats, StepReport
from penstock.metrics.families import Families, Gauge
from penstock.metrics.request_log import Phase, RequestLog, RequestRecord
from penstock.utils.clock import SystemClock
from penstock.utils.errors import EngineDeadError

_TOTALS = (
    ("vllm:num_preemptions", attrgetter("num_preemptions")),
    ("vllm:prefix_cache_queries", attrgetter("prefix_cache_queries")),
    ("vllm:prefix_cache_hits", attrgetter("prefix_cache_hits")),
    ("vllm:spec_decode_num_drafts", attrgetter("speculation.num_drafts")),
    ("vllm:spec_decode_num_draft_tokens", attrgetter("speculation.num_draft_tokens")),
    ("vllm:spec_decode_num_accepted_tokens", attrgetter("speculation.num_accepted_tokens")),
    ("penstock:graph_replays", attrgetter("num_graph_replays")),
    ("penstock:experts_moved", attrgetter("experts.num_moved")),
    ("penstock:expert_moves_failed", attrgetter("experts.num_failed")),
    ("penstock:kv_loads", attrgetter("remote_kv.num_loads")),
    ("penstock:kv_loads_failed", attrgetter("remote_kv.num_failed")),
    ("penstock:kv_load_timeouts", attrgetter("remote_kv.num_timeouts")),
    ("penstock:kv_loaded_tokens", attrgetter("remote_kv.num_tokens")),
)
# The names of `penstock.kv_transfer.p2p.traffic`; a MultiConnector prefixes them with a child's name and a dot. A
# peer's id may contain any character.
_PEER_COUNT = re.compile(r"(?:.*?\.)??p2p_(from|to)/(.*)/(transfers|tokens|bytes|seconds|failed)", re.DOTALL)
_COMPLETED_REASONS = (FinishReason.STOP, FinishReason.LENGTH)
_NOTHING = SchedulerStats(0, 0, 0.0, 0, 0, 0)


class WatchedEngine(Protocol):
    """The engine's interface for a scrape, implemented by `Replica`."""

    log: RequestLog
    info: EngineInfo

    @property
    def stats(self) -> SchedulerStats: ...

    @property
    def seconds_without_progress(self) -> float: ...

    @property
    def outage(self) -> EngineDeadError | None: ...

    @property
    def num_restarts(self) -> int: ...


class EngineMetrics:
    """The metrics of one engine core and its requests: an observer that counts from its creation. Gauges, and the
    counters by peer, are read from the engine at each scrape, after `watch` has set it.
    """

    def __init__(self, families: Families, model_name: str, rank: int) -> None:
        self._common = (model_name, str(rank))
        counters, gauges = families.counters, families.gauges
        # Each child is looked up once here instead of with every token.
        self._counters = families.children(counters, *self._common)
        self._gauges = families.children(gauges, *self._common)
        self._histograms = families.children(families.histograms, *self._common)
        # All values exist from the start, with 0, so that rates include the first event.
        self._ends = {
            reason.value: counters["vllm:request_success"].labels(*self._common, reason.value)
            for reason in FinishReason
        }
        self._phases = {
            phase: gauges["penstock:requests"].labels(*self._common, phase.value)
            for phase in Phase
            if phase is not Phase.FINISHED
        }
        self._cache_info = gauges["vllm:cache_config_info"]
        self._engine_info = gauges["penstock:engine_info"]
        self._lora_info = gauges["vllm:lora_requests_info"]
        self._shown_lora: tuple[str, ...] = ()
        self._shown: list[tuple[Gauge, tuple[str, ...]]] = []  # the last values of these two
        self._accepted_per_position = counters["vllm:spec_decode_num_accepted_tokens_per_pos"]
        self._kv_connector = gauges["penstock:kv_connector"]
        self._peers = {
            what: counters[f"penstock:kv_peer_{what}"] for what in ("transfers", "tokens", "bytes", "seconds", "failed")
        }
        self._peers_counted: dict[str, float] = {}
        self._counted = _NOTHING
        self._num_restarts = 0
        self._engine: WatchedEngine | None = None

    def set_info(self, info: EngineInfo) -> None:
        """Replaces the info metrics: the engine's configuration, and the number and size of its KV cache's blocks."""
        for family, labels in self._shown:
            family.remove(*labels)
        values = (__version__, info.dtype, info.device, info.kernels, str(info.num_threads), str(info.max_model_len))
        self._shown = [
            (self._cache_info, (*self._common, str(info.block_size), str(info.num_blocks))),
            (self._engine_info, (*self._common, *values)),
        ]
        for family, labels in self._shown:
            family.labels(*labels).set(1)

    def watch(self, engine: WatchedEngine) -> None:
        """Sets the engine that is observed."""
        self._engine = engine
        self.set_info(engine.info)

    def read(self) -> None:
        """Updates the metrics that are not counted as events occur."""
        if self._engine is not None:
            self._read_gauges(self._engine)

    def on_step(self, report: StepReport) -> None:
        self._note_restarts()
        if report.num_tokens:
            self._counters["penstock:steps"].inc()
            self._counters["penstock:tokens_computed"].inc(report.num_tokens)
            self._histograms["vllm:iteration_tokens_total"].observe(report.num_tokens)
        for name, total in _TOTALS:
            self._counters[name].inc(total(report.stats) - total(self._counted))
        self._count_accepted(report.stats.speculation, self._counted.speculation)
        self._counted = report.stats

    def _note_restarts(self) -> None:
        """A restarted engine core counts from 0, while the counters here continue."""
        if self._engine is not None and self._engine.num_restarts > self._num_restarts:
            self._counters["penstock:engine_restarts"].inc(self._engine.num_restarts - self._num_restarts)
            self._num_restarts = self._engine.num_restarts
            self._counted = _NOTHING
            self._peers_counted.clear()
            self.set_info(self._engine.info)

    def _count_accepted(self, now: SpeculationStats, before: SpeculationStats) -> None:
        if now is before or now.num_accepted_per_position == before.num_accepted_per_position:
            return
        for position, (count, counted) in enumerate(
            zip_longest(now.num_accepted_per_position, before.num_accepted_per_position, fillvalue=0)
        ):
            self._accepted_per_position.labels(*self._common, str(position)).inc(count - counted)

    def on_tokens(self, record: RequestRecord, num_tokens: int, seconds: float) -> None:
        self._counters["vllm:generation_tokens"].inc(num_tokens)
        if record.num_output_tokens > num_tokens:
            self._histograms["vllm:inter_token_latency_seconds"].observe(seconds)
            return
        self._histograms["vllm:time_to_first_token_seconds"].observe(seconds)
        self._count_prompt(record)

    def _count_prompt(self, record: RequestRecord) -> None:
        self._counters["vllm:prompt_tokens"].inc(record.num_prompt_tokens)
        self._counters["vllm:prompt_tokens_cached"].inc(record.num_cached_tokens)

    def on_end(self, record: RequestRecord) -> None:
        assert record.finish_reason is not None and record.ended is not None, record.request_id
        self._ends[record.finish_reason].inc()
        if record.is_pooled:
            self._count_prompt(record)
        if record.finish_reason not in _COMPLETED_REASONS:
            return
        observe = self._observe
        stages = {name: end - start for name, (start, end) in record.stages().items()}
        for name, seconds in stages.items():
            observe(f"vllm:request_{name}_time_seconds", seconds)
        decode = stages.get("decode", 0.0)
        observe("vllm:request_inference_time_seconds", stages.get("prefill", 0.0) + decode)
        observe("vllm:e2e_request_latency_seconds", record.ended - record.arrived)
        if record.num_output_tokens > 1:
            observe("vllm:request_time_per_output_token_seconds", decode / (record.num_output_tokens - 1))
        observe("vllm:request_prompt_tokens", record.num_prompt_tokens)
        observe("vllm:request_generation_tokens", record.num_output_tokens)
        if record.max_tokens is not None:
            observe("vllm:request_params_max_tokens", record.max_tokens)
        if record.stands_for_request:
            observe("vllm:request_params_n", record.n)

    def _read_gauges(self, engine: WatchedEngine) -> None:
        self._note_restarts()
        gauges, stats = self._gauges, engine.stats
        gauges["vllm:num_requests_running"].set(stats.num_running)
        gauges["vllm:num_requests_waiting"].set(stats.num_waiting)
        gauges["vllm:kv_cache_usage_perc"].set(stats.kv_cache_usage)
        gauges["penstock:expert_balancedness"].set(stats.experts.balancedness)
        gauges["penstock:engine_up"].set(engine.outage is None)
        gauges["penstock:seconds_without_progress"].set(engine.seconds_without_progress)
        self._read_connector(stats.connector)
        if engine.info.max_loras:
            self._show_adapters(engine)
        num_by_phase = engine.log.num_by_phase()
        for phase, gauge in self._phases.items():
            gauge.set(num_by_phase[phase])

    def _show_adapters(self, engine: WatchedEngine) -> None:
        if self._shown_lora:
            self._lora_info.remove(*self._shown_lora)
        names = (",".join(each) for each in engine.log.adapters())
        self._shown_lora = (*self._common, str(engine.info.max_loras), *names)
        self._lora_info.labels(*self._shown_lora).set(SystemClock().wall())

    def _read_connector(self, counts: Mapping[str, float]) -> None:
        """Exports counts by peer as counters, and all others as one gauge."""
        for name, value in counts.items():
            found = _PEER_COUNT.fullmatch(name)
            if found is None:
                self._kv_connector.labels(*self._common, name).set(value)
                continue
            direction, peer, what = found.groups()
            self._peers[what].labels(*self._common, direction, peer).inc(value - self._peers_counted.get(name, 0))
            self._peers_counted[name] = value

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)

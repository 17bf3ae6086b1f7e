"""Every metric that the server exports. Adding one is a deliberate decision: a test compares this table with a scrape.

Names under `vllm:`, their labels and their buckets are the ones that vLLM's dashboards, gateways and autoscalers
expect; all others are under `penstock:`. Counters are named without the `_total` that a scrape shows.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

COMMON_LABELS = ("model_name", "engine")


class Kind(enum.StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """`labels` come on top of the common ones; `buckets` are a histogram's upper bounds."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


def counter(name: str, help_text: str, *labels: str) -> Metric:
    return Metric(name, Kind.COUNTER, help_text, labels)


def gauge(name: str, help_text: str, *labels: str) -> Metric:
    return Metric(name, Kind.GAUGE, help_text, labels)


def histogram(name: str, help_text: str, buckets: tuple[float, ...]) -> Metric:
    return Metric(name, Kind.HISTOGRAM, help_text, buckets=buckets)


def _one_two_five(end: int) -> Iterator[float]:
    power = 1
    while power <= end:
        yield from (step * power for step in (1, 2, 5) if step * power <= end)
        power *= 10


# vLLM ends these at the model's length, which is unknown when the observers are built; a million covers all models.
_TOKENS = tuple(_one_two_five(1_000_000))
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_TTFT_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
_TOKEN_SECONDS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_REQUEST_SECONDS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip

METRICS = (
    # The scheduler's state at the scrape.
    gauge("vllm:num_requests_running", "Requests in the running batch."),
    gauge("vllm:num_requests_waiting", "Requests in the queue."),
    gauge("vllm:kv_cache_usage_perc", "Share of the KV blocks that requests hold; 1 is all of them."),
    gauge("vllm:cache_config_info", "The KV cache; always 1.", "block_size", "num_gpu_blocks"),
    gauge(
        "vllm:lora_requests_info",
        "Adapters of running and of waiting requests, with commas between them; the time of the scrape.",
        "max_lora",
        "running_lora_adapters",
        "waiting_lora_adapters",
    ),
    # The scheduler's totals.
    counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    counter("vllm:spec_decode_num_drafts", "Verifications: a request's drafts of one step."),
    counter("vllm:spec_decode_num_draft_tokens", "Draft tokens that were verified."),
    counter("vllm:spec_decode_num_accepted_tokens", "Draft tokens that were accepted."),
    counter("vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted draft tokens, by position.", "position"),
    counter("vllm:num_preemptions", "Preemptions of requests."),
    histogram("vllm:iteration_tokens_total", "Tokens that one step computed.", _STEP_TOKENS),
    # Tokens, as they are generated.
    counter("vllm:prompt_tokens", "Prompt tokens of requests that have their first output token."),
    counter("vllm:prompt_tokens_cached", "Those of vllm:prompt_tokens that came from the prefix cache."),
    counter("vllm:generation_tokens", "Output tokens."),
    histogram("vllm:time_to_first_token_seconds", "From a request's arrival to its first token.", _TTFT_SECONDS),
    histogram("vllm:inter_token_latency_seconds", "Time between two outputs of a request.", _TOKEN_SECONDS),
    # Requests, when they end. The histograms include only those with the reason stop or length: the client determines
    # the times of aborted ones.
    counter("vllm:request_success", "Requests that ended, by reason.", "finished_reason"),
    histogram(
        "vllm:request_time_per_output_token_seconds", "A request's mean time per token after its first.", _TOKEN_SECONDS
    ),
    histogram("vllm:e2e_request_latency_seconds", "From a request's arrival to its end.", _REQUEST_SECONDS),
    histogram("vllm:request_queue_time_seconds", "From a request's arrival to its first step.", _REQUEST_SECONDS),
    histogram("vllm:request_prefill_time_seconds", "From a request's first step to its first token.", _REQUEST_SECONDS),
    histogram("vllm:request_decode_time_seconds", "From a request's first token to its last.", _REQUEST_SECONDS),
    histogram(
        "vllm:request_inference_time_seconds", "From a request's first step to its last token.", _REQUEST_SECONDS
    ),
    histogram("vllm:request_prompt_tokens", "A request's prompt tokens.", _TOKENS),
    histogram("vllm:request_generation_tokens", "A request's output tokens.", _TOKENS),
    histogram("vllm:request_params_n", "A request's parameter n.", (1, 2, 5, 10, 20)),
    histogram("vllm:request_params_max_tokens", "A request's parameter max_tokens.", _TOKENS),
    # Metrics without a name in vLLM.
    counter("penstock:steps", "Steps that computed tokens."),
    counter("penstock:tokens_computed", "Tokens that the model computed, including repeated ones."),
    counter("penstock:graph_replays", "Steps that were replayed from a CUDA graph."),
    gauge("penstock:expert_balancedness", "Mean load of a stage's ranks by their experts, divided by the highest."),
    counter("penstock:experts_moved", "Experts that were copied to another rank."),
    counter("penstock:expert_moves_failed", "Copies of experts that failed."),
    counter("penstock:kv_loads", "Started loads of KV into the engine."),
    counter("penstock:kv_loads_failed", "Incomplete loads of KV."),
    counter("penstock:kv_load_timeouts", "Requests whose wait for KV timed out, and that were computed instead."),
    counter("penstock:kv_loaded_tokens", "Prompt tokens whose KV was loaded instead of computed."),
    gauge("penstock:kv_connector", "The KV connector's counters, by name.", "name"),
    # KV transfers between this engine and others. `direction` is "from" the peer or "to" it.
    counter("penstock:kv_peer_transfers", "Successful KV transfers.", "direction", "peer"),
    counter("penstock:kv_peer_tokens", "Tokens whose KV these transfers moved.", "direction", "peer"),
    counter("penstock:kv_peer_bytes", "Bytes of KV that these transfers moved.", "direction", "peer"),
    counter("penstock:kv_peer_seconds", "Time that the readers waited for these transfers.", "direction", "peer"),
    counter("penstock:kv_peer_failed", "Incomplete KV transfers from a peer.", "direction", "peer"),
    gauge("penstock:requests", "Requests that have not ended, by phase.", "phase"),
    gauge(
        "penstock:engine_info",
        "The engine's configuration; always 1.",
        "version",
        "dtype",
        "device",
        "kernels",
        "num_threads",
        "max_model_len",
    ),
    gauge("penstock:engine_up", "1 while the engine core is alive."),
    counter("penstock:engine_restarts", "Successful restarts of an engine core after it had died."),
    gauge("penstock:seconds_without_progress", "How long the engine has had work without computing anything."),
    counter("penstock:http_requests", "HTTP answers.", "route", "method", "status"),
    counter("penstock:client_disconnects", "Clients that disconnected before their response was complete."),
)

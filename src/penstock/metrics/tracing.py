"""One OpenTelemetry trace per completion, sent over OTLP/HTTP, with its times in queue, prefill and decode.

Spans are made from a completion's record when it has ended. They wait in a bounded queue that a separate thread sends,
so that a slow or unreachable collector costs spans but never a request. OpenTelemetry is an optional extra, imported
where it is used. No span contains text of a prompt or an output.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

from penstock.messages.outputs import FinishReason
from penstock.messages.stats import StepReport
from penstock.metrics.request_log import Phase, RequestRecord
from penstock.utils.clock import SystemClock
from penstock.utils.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_DEFAULT_PATH = "/v1/traces"
_MAX_QUEUED_SPANS = 4096
_MAX_SPANS_PER_MESSAGE = 512
_SEND_EVERY_MILLISECONDS = 2000
_SEND_TIMEOUT_SECONDS = 5.0
_SHUTDOWN_SECONDS = 5.0
_NANOSECONDS = 1_000_000_000


class RequestTracer:
    """An observer that turns ended requests into spans and gives them to `provider`, which it owns."""

    def __init__(self, provider: TracerProvider, model: str, clock: SystemClock) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._model = model
        self._tracer = provider.get_tracer("penstock")
        self._propagator = TraceContextTextMapPropagator()
        # Determined once: with one offset per span, a jump of the wall clock would split a trace.
        self._epoch_offset = round((clock.wall() - clock.now()) * _NANOSECONDS)

    def on_step(self, report: StepReport) -> None:
        pass

    def on_tokens(self, record: RequestRecord, num_tokens: int, seconds: float) -> None:
        pass

    def on_end(self, record: RequestRecord) -> None:
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context

        assert record.ended is not None, record.request_id
        # A malformed traceparent is ignored: the span then begins a new trace.
        parent = self._propagator.extract({"traceparent": record.trace or ""}, Context())
        span = self._tracer.start_span(
            "llm_request", parent, SpanKind.SERVER, self._attributes(record), start_time=self._epoch(record.arrived)
        )
        if not span.is_recording():
            return
        for name, (start, end) in record.stages().items():
            stage = self._tracer.start_span(name, set_span_in_context(span, parent), start_time=self._epoch(start))
            stage.end(self._epoch(end))
        for phase, time in record.phases:
            if phase is Phase.PREEMPTED:
                span.add_event("preempted", timestamp=self._epoch(time))
        if record.finish_reason == FinishReason.ERROR:
            span.set_status(StatusCode.ERROR)
        span.end(self._epoch(record.ended))

    def shutdown(self) -> None:
        """Sends queued spans for at most a few seconds; the rest is lost. Blocks; idempotent."""
        # The provider's own shutdown may take half a minute if the collector does not respond.
        flushing = threading.Thread(target=self._provider.shutdown, name="trace-flush", daemon=True)
        flushing.start()
        flushing.join(_SHUTDOWN_SECONDS)

    def _epoch(self, time: float) -> int:
        """Monotonic seconds as nanoseconds since the epoch."""
        return round(time * _NANOSECONDS) + self._epoch_offset

    def _attributes(self, record: RequestRecord) -> Mapping[str, str | int | float | list[str]]:
        """The GenAI semantic conventions' attributes, and additional ones of vLLM; times in seconds."""
        assert record.ended is not None and record.finish_reason is not None, record.request_id
        attributes: dict[str, str | int | float | list[str]] = {
            "gen_ai.response.model": self._model,
            "gen_ai.response.finish_reasons": [record.finish_reason],
            "gen_ai.request.id": record.request_id,
            "gen_ai.request.n": record.n,
            "gen_ai.usage.prompt_tokens": record.num_prompt_tokens,
            "gen_ai.usage.completion_tokens": record.num_output_tokens,
            "gen_ai.latency.e2e": record.ended - record.arrived,
            "penstock.cached_tokens": record.num_cached_tokens,
            "penstock.preemptions": record.num_preemptions,
        }
        if record.max_tokens is not None:
            attributes["gen_ai.request.max_tokens"] = record.max_tokens
        if record.first_scheduled is not None:
            attributes["gen_ai.latency.time_in_queue"] = record.first_scheduled - record.arrived
        if record.first_scheduled is not None and record.first_token is not None and record.last_token is not None:
            attributes["gen_ai.latency.time_to_first_token"] = record.first_token - record.arrived
            attributes["gen_ai.latency.time_in_model_prefill"] = record.first_token - record.first_scheduled
            attributes["gen_ai.latency.time_in_model_decode"] = record.last_token - record.first_token
            attributes["gen_ai.latency.time_in_model_inference"] = record.last_token - record.first_scheduled
        return attributes


def make_tracer(endpoint: str, model: str, service_name: str = "penstock") -> RequestTracer:
    """A tracer that sends to an OTLP/HTTP `endpoint`; `/v1/traces` is added to a URL without a path.

    The standard variables OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES, OTEL_TRACES_SAMPLER and
    OTEL_EXPORTER_OTLP_HEADERS are read by the OpenTelemetry SDK. Raises ConfigError if the endpoint is not a URL, or
    OpenTelemetry is not installed.
    """
    url = urlsplit(endpoint)
    if url.scheme not in ("http", "https") or not url.netloc:
        raise ConfigError(
            f"otlp_traces_endpoint must be an http:// or https:// URL, such as http://localhost:4318{_DEFAULT_PATH}, "
            f"got {endpoint!r}"
        )
    if url.path in ("", "/"):
        endpoint = urlunsplit(url._replace(path=_DEFAULT_PATH))
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            f"otlp_traces_endpoint needs OpenTelemetry ({error}): pip install 'penstock[tracing]'"
        ) from None
    # The environment's attributes of the service override the default.
    resource = Resource.create({SERVICE_NAME: service_name}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(
        BatchSpanProcessor(
            OTLPSpanExporter(endpoint=endpoint, timeout=_SEND_TIMEOUT_SECONDS),
            max_queue_size=_MAX_QUEUED_SPANS,
            schedule_delay_millis=_SEND_EVERY_MILLISECONDS,
            max_export_batch_size=_MAX_SPANS_PER_MESSAGE,
        )
    )
    return RequestTracer(provider, model, SystemClock())

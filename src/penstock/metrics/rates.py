"""Rates and latencies over a sliding window, and totals, for the dashboard."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from dataclasses import dataclass

import numpy as np

from penstock.messages.outputs import FinishReason
from penstock.messages.stats import StepReport
from penstock.metrics.request_log import RequestRecord
from penstock.utils.clock import Clock, SystemClock

WINDOW_SECONDS = 10.0
# Enough samples for a quantile, and a bound on the window.
_MAX_SAMPLES = 4096


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of the last `window` seconds. Latencies are in seconds, None if nothing was measured. `requests_per_second`
    counts requests that ended for any reason. End-to-end latency and queue time exclude aborted and failed requests.
    """

    window: float
    tokens_per_second: float
    requests_per_second: float
    ttft_p50: float | None
    ttft_p90: float | None
    itl_p50: float | None
    itl_p90: float | None
    e2e_p50: float | None
    e2e_p90: float | None
    queue_p50: float | None
    queue_p90: float | None


class _Window:
    """Samples of the last seconds: (time, value)."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=_MAX_SAMPLES)

    def add(self, now: float, value: float) -> None:
        self._samples.append((now, value))

    def count(self, now: float, value: float) -> None:
        """Adds to the sample of this hundredth of a second, so that there is room for any number of them."""
        start = now - now % 0.01
        if self._samples and self._samples[-1][0] == start:
            value += self._samples.pop()[1]
        self.add(start, value)

    def values(self, now: float) -> list[float]:
        while self._samples and self._samples[0][0] < now - WINDOW_SECONDS:
            self._samples.popleft()
        return [value for _, value in self._samples]


class RecentRates:
    """An observer that keeps the samples of the last ten seconds, and counts tokens and ended requests since the
    start.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0
        self._ends: Counter[str] = Counter()
        self._tokens, self._ended, self._ttft, self._itl, self._e2e, self._queue = (_Window() for _ in range(6))

    def on_step(self, report: StepReport) -> None:
        self._tokens.count(self._clock.now(), sum(len(output.new_token_ids) for output in report.outputs))

    def on_tokens(self, record: RequestRecord, num_tokens: int, seconds: float) -> None:
        is_first = record.num_output_tokens == num_tokens
        self._num_prompt_tokens += record.num_prompt_tokens if is_first else 0
        self._num_output_tokens += num_tokens
        (self._ttft if is_first else self._itl).add(self._clock.now(), seconds)

    def on_end(self, record: RequestRecord) -> None:
        assert record.finish_reason is not None and record.ended is not None, record.request_id
        now = self._clock.now()
        self._ends[record.finish_reason] += 1
        self._ended.count(now, 1.0)
        if record.finish_reason not in (FinishReason.ABORT, FinishReason.ERROR):
            self._e2e.add(now, record.ended - record.arrived)
            start, end = record.stages()["queue"]
            self._queue.add(now, end - start)

    def totals(self) -> dict[str, int]:
        """Tokens and requests since the start; a prompt counts when its first output token is generated."""
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "generation_tokens": self._num_output_tokens,
            "num_errors": self._ends[FinishReason.ERROR],
            "num_aborts": self._ends[FinishReason.ABORT],
        }

    def rates(self) -> Rates:
        now = self._clock.now()
        latencies = (_quantiles(each.values(now)) for each in (self._ttft, self._itl, self._e2e, self._queue))
        return Rates(
            WINDOW_SECONDS,
            sum(self._tokens.values(now)) / WINDOW_SECONDS,
            sum(self._ended.values(now)) / WINDOW_SECONDS,
            *itertools.chain(*latencies),
        )


def _quantiles(values: list[float]) -> tuple[float | None, float | None]:
    """The median and the 90th percentile."""
    median, high = np.percentile(values, (50, 90)).tolist() if values else (None, None)
    return median, high

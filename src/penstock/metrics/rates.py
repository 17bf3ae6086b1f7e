"""What the last seconds were like: tokens per second and latencies over a sliding window, for the dashboard."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from penstock.messages.stats import StepReport
from penstock.metrics.request_log import RequestRecord
from penstock.utils.clock import SystemClock

_WINDOW_SECONDS = 10.0
# A quantile of so many samples is as good as one of more, and the window cannot grow without end.
_MAX_SAMPLES = 4096


@dataclass(frozen=True, slots=True)
class Rates:
    """Seconds, and tokens per second; None where nothing happened."""

    tokens_per_second: float
    ttft_p50: float | None
    ttft_p90: float | None
    itl_p50: float | None
    itl_p90: float | None


class RecentRates:
    """An observer that remembers the last ten seconds, and counts tokens since the start."""

    def __init__(self) -> None:
        self._clock = SystemClock()
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0
        self._tokens: deque[tuple[float, int]] = deque(maxlen=_MAX_SAMPLES)
        self._ttft: deque[tuple[float, float]] = deque(maxlen=_MAX_SAMPLES)
        self._itl: deque[tuple[float, float]] = deque(maxlen=_MAX_SAMPLES)

    def on_step(self, report: StepReport) -> None:
        self._tokens.append((self._clock.now(), sum(len(output.new_token_ids) for output in report.outputs)))

    def on_tokens(self, record: RequestRecord, num_tokens: int, seconds: float) -> None:
        is_first = record.num_output_tokens == num_tokens
        self._num_prompt_tokens += record.num_prompt_tokens if is_first else 0
        self._num_output_tokens += num_tokens
        (self._ttft if is_first else self._itl).append((self._clock.now(), seconds))

    def on_end(self, record: RequestRecord) -> None:
        pass

    def totals(self) -> dict[str, int]:
        """Tokens since the start; a prompt counts when its first output token comes."""
        return {"prompt_tokens": self._num_prompt_tokens, "generation_tokens": self._num_output_tokens}

    def rates(self) -> Rates:
        since = self._clock.now() - _WINDOW_SECONDS
        for samples in (self._tokens, self._ttft, self._itl):
            while samples and samples[0][0] < since:
                samples.popleft()
        ttft = [seconds for _, seconds in self._ttft]
        itl = [seconds for _, seconds in self._itl]
        return Rates(
            sum(count for _, count in self._tokens) / _WINDOW_SECONDS,
            *(float(np.percentile(ttft, p)) if ttft else None for p in (50, 90)),
            *(float(np.percentile(itl, p)) if itl else None for p in (50, 90)),
        )

"""The sliding window of the dashboard, on a manual clock."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from penstock.messages.outputs import EngineOutput, FinishReason
from penstock.metrics.rates import WINDOW_SECONDS, RecentRates
from penstock.metrics.request_log import RequestLog, RequestRecord
from penstock.utils.clock import ManualClock


def test_rates_cover_the_last_seconds_and_totals_everything() -> None:
    clock = ManualClock(100.0)
    rates = RecentRates(clock)
    log = RequestLog([rates])
    for number, reason in enumerate((FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ERROR)):
        record = RequestRecord(request_id=str(number), arrived=100.0, num_prompt_tokens=5)
        log.add(record)
        record.first_scheduled = 101.0
        log.end([str(number)], reason, 102.0 + 2 * number)
    found = rates.rates()
    assert found.window == WINDOW_SECONDS
    assert found.requests_per_second == 4 / WINDOW_SECONDS
    # The aborted and the failed request count as requests, but their times do not.
    assert (found.e2e_p50, found.queue_p50, found.queue_p90) == (3.0, 1.0, 1.0)
    assert (found.ttft_p50, found.itl_p90) == (None, None)
    clock.advance(WINDOW_SECONDS + 1)
    later = rates.rates()
    assert (later.requests_per_second, later.e2e_p50) == (0.0, None)
    totals = rates.totals()
    assert (totals["num_errors"], totals["num_aborts"]) == (1, 1)


def test_any_number_of_steps_counts() -> None:
    clock = ManualClock(100.0)
    rates = RecentRates(clock)
    report: Any = SimpleNamespace(outputs=[EngineOutput(request_id="a", new_token_ids=[1, 2])])
    for _ in range(10_000):
        clock.advance(WINDOW_SECONDS / 10_000)
        rates.on_step(report)
    assert abs(rates.rates().tokens_per_second - 20_000 / WINDOW_SECONDS) < 5

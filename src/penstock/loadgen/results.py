"""Computes figures from outcomes, with the names and definitions of `vllm bench serve`."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.loadgen.runner import Run
    from penstock.loadgen.stream import Outcome

REQUEST_METRICS: dict[str, Callable[[Outcome], float]] = {
    "ttft": lambda outcome: outcome.ttft,
    "tpot": lambda outcome: outcome.tpot,
    "e2el": lambda outcome: outcome.latency,
}
"""The metrics that can have objectives, in seconds of one outcome."""

METRICS = ("ttft", "tpot", "itl", "e2el")
_OUTPUT_FIGURES = {
    "total_output_tokens", "output_throughput", "max_output_tokens_per_s", "output_lens", "ttfts", "itls",
    "generated_texts",
}  # fmt: skip


def summarize(run: Run, objectives: Mapping[str, float]) -> dict[str, Any]:
    """Returns counts, tokens and rates per second. `objectives` maps names in REQUEST_METRICS to limits in ms."""
    completed = [outcome for outcome in run.outcomes if not outcome.error]
    good = sum(_meets(outcome, objectives) for outcome in completed)
    num_input = sum(outcome.prompt_len for outcome in completed)
    num_output = sum(outcome.output_len for outcome in completed)
    return {
        "duration": run.duration,
        "completed": len(completed),
        "failed": len(run.outcomes) - len(completed),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(completed) / run.duration,
        "request_goodput": good / run.duration if objectives else None,
        "output_throughput": num_output / run.duration,
        "total_token_throughput": (num_input + num_output) / run.duration,
        "max_output_tokens_per_s": _peak_tokens(completed),
        "max_concurrent_requests": _peak_concurrency(completed),
    }


def without_output(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the figures of `summarize` or `details` that apply to requests without output tokens."""
    return {name: value for name, value in figures.items() if name not in _OUTPUT_FIGURES}


def percentile(values: Sequence[float], percentage: float) -> float:
    """Returns a percentile, interpolated linearly between values."""
    # Imported here: the names above are part of a help text, which needs no numpy.
    import numpy as np

    return float(np.percentile(values, percentage))


def latency_figures(
    outcomes: Sequence[Outcome], metrics: Sequence[str], percentages: Sequence[float]
) -> dict[str, float]:
    """Returns mean, median, standard deviation and percentiles of each metric, in ms; zeros if nothing ended."""
    figures: dict[str, float] = {}
    completed = [outcome for outcome in outcomes if not outcome.error]
    for metric in metrics:
        values = [1000 * value for value in _values(completed, metric)] or [0.0]
        figures[f"mean_{metric}_ms"] = statistics.fmean(values)
        figures[f"median_{metric}_ms"] = statistics.median(values)
        figures[f"std_{metric}_ms"] = statistics.pstdev(values)
        for percentage in percentages:
            figures[f"p{percentage:g}_{metric}_ms"] = percentile(values, percentage)
    return figures


def details(outcomes: Sequence[Outcome]) -> dict[str, list[Any]]:
    """Returns lists with one entry per request that ended, including failed ones; times in seconds."""
    return {
        "input_lens": [outcome.prompt_len for outcome in outcomes],
        "output_lens": [0 if outcome.error else outcome.output_len for outcome in outcomes],
        "ttfts": [outcome.ttft for outcome in outcomes],
        "itls": [outcome.itls for outcome in outcomes],
        "latencies": [outcome.latency for outcome in outcomes],
        "start_times": [outcome.started for outcome in outcomes],
        "generated_texts": [outcome.text for outcome in outcomes],
        "errors": [outcome.error for outcome in outcomes],
    }


def _values(outcomes: Sequence[Outcome], metric: str) -> list[float]:
    if metric == "itl":
        return [gap for outcome in outcomes for gap in outcome.itls]
    if metric == "tpot":
        # A request with one token has no time per further token; its zero would only improve the figure.
        outcomes = [outcome for outcome in outcomes if outcome.output_len > 1]
    return [REQUEST_METRICS[metric](outcome) for outcome in outcomes]


def _meets(outcome: Outcome, objectives: Mapping[str, float]) -> bool:
    return all(1000 * REQUEST_METRICS[name](outcome) <= limit for name, limit in objectives.items())


def _peak_tokens(outcomes: Sequence[Outcome]) -> float:
    """Returns the most output tokens in one second. A response's tokens are spread evenly over its chunks."""
    if not outcomes:
        return 0.0
    start = min(outcome.started for outcome in outcomes)
    seconds: dict[int, float] = {}
    for outcome in outcomes:
        per_chunk = outcome.output_len / (1 + len(outcome.itls))
        for moment in itertools.accumulate(outcome.itls, initial=outcome.started - start + outcome.ttft):
            seconds[int(moment)] = seconds.get(int(moment), 0.0) + per_chunk
    return max(seconds.values())


def _peak_concurrency(outcomes: Sequence[Outcome]) -> int:
    """Returns the most requests in flight at once; one that ends as another starts does not overlap with it."""
    starts = [(outcome.started, 1) for outcome in outcomes]
    ends = [(outcome.started + outcome.latency, -1) for outcome in outcomes]
    return max(itertools.accumulate((change for _, change in sorted(starts + ends)), initial=0))

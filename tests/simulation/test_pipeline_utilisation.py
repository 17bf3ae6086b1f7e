"""Measures the utilisation of pipeline stages with the real scheduler and stages that take a set time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.config.engine import SchedulerConfig
from tests.unit.pipeline_fakes import make_config, make_core, make_request

NUM_STEPS = 200


def stage(layers: int) -> Callable[[int], float]:
    """Returns the seconds of a step: a stage mostly reads weights, and each token adds a little."""
    return lambda num_tokens: layers * (1.0 + 0.01 * num_tokens)


def busy_share(config: SchedulerConfig, layers: tuple[int, ...], num_requests: int, host_seconds: float) -> float:
    """Returns the average share of the time in which a stage computes, while all requests decode."""
    core, _, stages = make_core(config, [stage(count) for count in layers], host_seconds, debug=False)
    for number in range(num_requests):
        core.add_request(make_request(f"r{number}", max_tokens=2 * NUM_STEPS))
    for _ in range(20):
        core.step()
    begin, busy = stages.now, sum(stages.busy)
    for _ in range(NUM_STEPS):
        core.step()
    return (sum(stages.busy) - busy) / (stages.now - begin) / len(layers)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("layers", [(4, 4), (4, 4, 4), (3, 4), (4, 3, 4, 4)])
def test_stages_are_busy_while_enough_requests_decode(layers: tuple[int, ...], is_async: bool) -> None:
    config = make_config(len(layers), is_async)
    # The slowest stage limits the rate of steps.
    ideal = sum(layers) / len(layers) / max(layers)
    share = busy_share(config, layers, 4 * len(layers), host_seconds=0.1)
    print(f"{layers} {is_async}: {share / ideal:.3f} of the ideal {ideal:.3f}")  # noqa: T201 - the result
    assert share >= 0.9 * ideal


@pytest.mark.parametrize("num_stages", [2, 3])
def test_asynchronous_scheduling_hides_the_time_of_the_host(num_stages: int) -> None:
    shares = [
        busy_share(make_config(num_stages, is_async), (1,) * num_stages, 8 * num_stages, host_seconds=0.4)
        for is_async in (False, True)
    ]
    assert shares[0] < 0.9 < 0.95 < shares[1], shares


@pytest.mark.parametrize("num_stages", [2, 4])
def test_without_micro_batches_the_stages_take_turns(num_stages: int) -> None:
    """If every step takes all requests, utilisation is low: the measurement can detect the problem."""
    config = SchedulerConfig(
        max_num_batched_tokens=64, max_num_seqs=64, max_model_len=2048, max_num_in_flight=num_stages
    )
    share = busy_share(config, (4,) * num_stages, 4 * num_stages, host_seconds=0.1)
    assert share < 1.05 / num_stages


@pytest.mark.parametrize("is_async", [False, True])
def test_one_long_prompt_keeps_all_stages_busy(is_async: bool) -> None:
    core, _, stages = make_core(make_config(3, is_async, max_num_batched_tokens=16))
    core.add_request(make_request("long", num_prompt_tokens=60 * 16, max_tokens=1))
    while core.has_work:
        core.step()
    assert stages.busy == [60.0] * 3
    assert stages.now == 62.0

"""Sends requests when they are due and collects their outcomes."""

from __future__ import annotations

import asyncio
import gc
import itertools
import math
import random
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from penstock.loadgen.stream import Outcome
from penstock.utils.errors import ConfigError

Send = Callable[[int], Awaitable[Outcome]]
"""Sends the request of this index and returns its outcome when it has ended; does not raise for failures."""


@dataclass(frozen=True, slots=True)
class Run:
    """The result: `outcomes` of the requests that ended, in the order of the requests; `duration` in seconds."""

    outcomes: list[Outcome]
    duration: float
    interrupted: bool


def arrivals(num_requests: int, request_rate: float, burstiness: float, seed: int) -> list[float]:
    """Returns how many seconds after the start to send each request: 0 if `request_rate` (per second) is infinite.

    The gaps are gamma distributed with shape `burstiness`: 1 is a Poisson process, less is burstier, infinity gives
    equal gaps. They are scaled so that the last request is sent at exactly `num_requests / request_rate`: runs with
    different seeds offer the same load. Raises ConfigError if `burstiness` is so small that all gaps underflow to 0.
    """
    if math.isinf(request_rate):
        return [0.0] * num_requests
    rng = random.Random(seed)
    # From 1e30 on the gaps differ by less than a float can tell, and sums of larger ones overflow.
    gaps = [1.0 if burstiness > 1e30 else rng.gammavariate(burstiness, 1.0) for _ in range(num_requests)]
    times = list(itertools.accumulate(gaps))
    if times[-1] < sys.float_info.min:
        raise ConfigError(f"burstiness={burstiness:g} leaves no time between the requests: raise it")
    scale = num_requests / request_rate / times[-1]
    return [time * scale for time in times]


async def wait_until(moment: float) -> None:
    """Waits until the running loop's clock reaches `moment`; returns at once if that time has passed."""
    loop = asyncio.get_running_loop()
    if moment <= loop.time():
        return
    reached = asyncio.Event()
    timer = loop.call_at(moment, reached.set)
    try:
        await reached.wait()
    finally:
        timer.cancel()


async def run_load(
    send: Send, times: Sequence[float], max_concurrency: int | None, on_done: Callable[[], object]
) -> Run:
    """Sends request `index` `times[index]` seconds after the start, or later while `max_concurrency` are in flight.

    A cancellation (Ctrl-C) ends the run: requests in flight are dropped, and those that have ended are returned.
    """
    loop = asyncio.get_running_loop()
    outcomes: list[Outcome | None] = [None] * len(times)
    gate = asyncio.Semaphore(max_concurrency or max(len(times), 1))
    interrupted = False

    async def request(index: int) -> None:
        await wait_until(started + times[index])
        async with gate:
            outcomes[index] = await send(index)
        on_done()

    # A garbage collection would delay the timing of all streams, and would scan all prompts each time.
    gc.collect()
    gc.freeze()
    started = loop.time()
    try:
        async with asyncio.TaskGroup() as group:
            for index in range(len(times)):
                group.create_task(request(index))
    except asyncio.CancelledError:
        interrupted = True
        task = asyncio.current_task()
        assert task is not None
        task.uncancel()
    finally:
        gc.unfreeze()
    return Run([outcome for outcome in outcomes if outcome is not None], loop.time() - started, interrupted)

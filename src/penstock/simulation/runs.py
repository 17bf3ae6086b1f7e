"""Runs many worlds, in one process or several."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from penstock.simulation.scenarios import run_scenario
from penstock.simulation.world import RunResult
from penstock.utils.interrupts import interrupts_blocked
from penstock.utils.logging import errors_only

_SEEDS_PER_TASK = 10

Run = tuple[str, int]
"""A scenario and a seed."""


def run_worlds(runs: list[Run], jobs: int) -> Iterator[tuple[Run, RunResult]]:
    """Yields results in the order of `runs`, so that the first violation does not depend on the number of processes.

    More processes than processors have no use, and the system may not allow them.
    """
    jobs = min(jobs, os.cpu_count() or 1)
    if jobs == 1:
        for each in runs:
            with errors_only():
                result = run_scenario(*each)
            yield each, result
        return
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        try:
            tasks = [runs[start : start + _SEEDS_PER_TASK] for start in range(0, len(runs), _SEEDS_PER_TASK)]
            with interrupts_blocked():
                # The processes start here; at an interrupt they end with the tasks that they have begun.
                all_results = pool.map(_run_all, tasks)
            for results in all_results:
                yield from results
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _run_all(runs: list[Run]) -> list[tuple[Run, RunResult]]:
    with errors_only():
        return [(each, run_scenario(*each)) for each in runs]

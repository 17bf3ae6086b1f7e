"""`penstock simulate`: engines, clients and faults on one clock, from a seed (docs/SIMULATION.md)."""

from __future__ import annotations

import argparse
import fnmatch
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from tqdm import tqdm

from penstock.cli.parser import count, count_from_zero
from penstock.simulation.scenarios import SCENARIOS, replay_line, run_scenario
from penstock.simulation.world import RunResult
from penstock.utils.errors import ConfigError
from penstock.utils.interrupts import interrupts_blocked
from penstock.utils.logging import errors_only
from penstock.utils.names import did_you_mean

_VIOLATION = 1
_SEEDS_PER_TASK = 10

Run = tuple[str, int]
"""A scenario and a seed."""


DESCRIPTION = """\
Runs engines, clients and faults in a simulated world with one clock, and checks
that no token is computed from KV that belongs to another prompt."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "penstock simulate [flags]"
    group = parser.add_argument_group("runs")
    group.add_argument(
        "--scenario",
        default="all",
        metavar="NAME",
        help="a name from --list, a pattern such as 'pd_*', or all (default: all)",
    )
    group.add_argument("--seed", type=count_from_zero, default=0, metavar="N", help="the first seed (default: 0)")
    group.add_argument("--count", type=count, default=1, metavar="N", help="seeds per scenario (default: 1)")
    group.add_argument("--jobs", type=count, default=1, metavar="N", help="processes (default: 1)")
    group.add_argument("--list", action="store_true", help="list the scenarios and what they test")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Returns 0 if no check failed; otherwise 1, after printing the command that replays the first failing world."""
    if args.list:
        width = max(map(len, SCENARIOS))
        for scenario in SCENARIOS.values():
            print(f"{scenario.name:{width}}  {scenario.origin}")
        return 0
    names = list(SCENARIOS) if args.scenario == "all" else fnmatch.filter(SCENARIOS, args.scenario)
    if not names:
        hint = did_you_mean(args.scenario, tuple(SCENARIOS))
        raise ConfigError(f"--scenario: there is no {args.scenario!r}{hint}; `penstock simulate --list` shows all")
    runs = [(name, seed) for seed in range(args.seed, args.seed + args.count) for name in names]
    num_ticks = 0
    with tqdm(total=len(runs), unit="world", disable=not sys.stderr.isatty(), leave=False) as bar:
        for (name, seed), result in _results(runs, args.jobs):
            bar.update()
            num_ticks += result.num_ticks
            if result.violation:
                bar.close()
                _report(name, seed, result)
                return _VIOLATION
    print(f"{len(runs)} worlds, {num_ticks} ticks, no violation")
    return 0


def _results(runs: list[Run], jobs: int) -> Iterator[tuple[Run, RunResult]]:
    """Yields results in the order of `runs`, so that the first violation does not depend on the number of processes."""
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


def _report(name: str, seed: int, result: RunResult) -> None:
    print(f"tick {result.num_ticks}: {result.violation}")
    for line in result.trace:
        print(f"  {line}")
    print(replay_line(name, seed))

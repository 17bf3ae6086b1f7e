"""`penstock simulate`: engines, clients and faults on one clock, from a seed (docs/SIMULATION.md)."""

from __future__ import annotations

import argparse
import fnmatch
import sys

from penstock.cli.parser import count, count_from_zero
from penstock.utils.errors import ConfigError
from penstock.utils.interrupts import interrupts_end_at_once
from penstock.utils.names import did_you_mean

_VIOLATION = 1

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
    with interrupts_end_at_once():
        # Imported here: the help text needs no engine.
        from tqdm import tqdm

        from penstock.simulation.runs import run_worlds
        from penstock.simulation.scenarios import SCENARIOS, replay_line
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
        for (name, seed), result in run_worlds(runs, args.jobs):
            bar.update()
            num_ticks += result.num_ticks
            if result.violation:
                bar.close()
                print(f"tick {result.num_ticks}: {result.violation}", *(f"  {line}" for line in result.trace), sep="\n")
                print(replay_line(name, seed))
                return _VIOLATION
    print(f"{len(runs)} worlds, {num_ticks} ticks, no violation")
    return 0

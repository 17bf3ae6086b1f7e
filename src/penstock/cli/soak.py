"""The output of `penstock verify --soak`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.config.engine import EngineArgs
from penstock.utils.interrupts import interrupts_end_at_once

if TYPE_CHECKING:
    from penstock.verify.soak import Finding, SoakResult, Tally

_DIFFERS = 1
_SHOWN_TOKENS = 24


def minutes(text: str) -> float:
    """Parses a duration in minutes; fractions are allowed."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of minutes above 0, got {value:g}")
    return value


def run_soak(arguments: EngineArgs, prompts: Sequence[str], max_tokens: int, num_minutes: float) -> int:
    """Returns 1 if a process differed from the reference process or failed."""
    with interrupts_end_at_once():
        # Imported here: the help text needs no torch.
        from tqdm import tqdm

        from penstock.verify.soak import soak

    with tqdm(leave=False, disable=None, unit="process", desc="reference process") as bar:

        def show_progress(tally: Tally) -> None:
            bar.set_description(f"{tally.num_rounds} rounds, {tally.num_rows:,} rows equal", refresh=False)
            bar.update()

        result = soak(arguments, prompts, max_tokens, num_minutes, show_progress)
    print(_table(result))
    if result.finding is None:
        print(f"\nEvery row agrees, and each of the {result.num_tensors} tensors of the model in every process.")
        return 0
    print(f"\n{_describe(result.finding)}")
    print("a process differs from the reference" if result.finding.place else "a process failed", file=sys.stderr)
    return _DIFFERS


def _table(result: SoakResult) -> str:
    line = "{:<38} {:>9} {:>7} {:>13} {:>12}".format
    rows = [
        line("fresh processes", "processes", "rounds", "rows compared", "preemptions"),
        line("reference", 1, 1, f"{result.num_reference_rows:,}", 0),
    ]
    for name, tally in result.tallies.items():
        rows.append(line(name, tally.num_processes, tally.num_rounds, f"{tally.num_rows:,}", tally.num_preemptions))
    return "\n".join(rows)


def _describe(finding: Finding) -> str:
    from penstock.verify.soak import DRAWN_ARGUMENTS

    plan, place = finding.plan, finding.place
    lines = [f"the process of seed {plan.seed} {'FAILED: ' + finding.problem if place is None else 'DIFFERS'}"]
    if place is not None:
        lines.append(f"  first in   {place.what}")
        if place.request is not None:
            tokens = list(plan.prompts[place.request])
            shown = f"{tokens[:_SHOWN_TOKENS]}{' ...' if len(tokens) > _SHOWN_TOKENS else ''}"
            lines.append(f"  at         position {place.position} of request {place.request}")
            lines.append(f"  prompt     {len(tokens)} tokens {shown}, then {plan.max_tokens} greedy ones")
    rounds = "; ".join(f"{each.num_at_once} requests at once, threads: {each.num_threads}" for each in plan.rounds)
    drawn = ", ".join(f"{name}={plan.engine[name]}" for name in DRAWN_ARGUMENTS)
    lines += [
        f"  engine     {drawn}",
        f"  rounds     {rounds}",
        f"  beside it  {plan.num_noises} times python -m penstock.verify.contention, with seeds from {plan.seed} on",
        f"  recorded   {finding.folder}, to be compared with {finding.reference}",
        f"  again      {finding.command}",
    ]
    return "\n".join(lines)

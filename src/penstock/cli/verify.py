"""`penstock verify`: checks on this machine that no feature of the engine changes a token."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.dataclass_args import add_engine_args, add_model_argument, engine_kwargs
from penstock.cli.parser import count
from penstock.config.engine import EngineArgs
from penstock.messages.sampling_params import SamplingParams
from penstock.utils.errors import ConfigError, RequestError
from penstock.utils.interrupts import interrupts_end_at_once

if TYPE_CHECKING:
    from penstock.verify.matrix import Difference, RowResult
    from penstock.verify.soak import Finding, SoakResult, Tally

_DIFFERS = 1
_MAX_TOKENS, _QUICK_MAX_TOKENS = 32, 16
_SHOWN_TOKENS = 24


DESCRIPTION = """\
Runs the same requests in the simplest way and with every feature that could
change their tokens (batching, chunks, caching, drafts and more), and compares
each token."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "penstock verify [MODEL] [flags]"
    add_model_argument(parser)
    group = parser.add_argument_group("requests")
    group.add_argument(
        "--prompts", type=Path, metavar="FILE", help="text file with a prompt per line (default: built-in ones)"
    )
    group.add_argument("--max-tokens", type=count, metavar="N", help=f"tokens per request (default: {_MAX_TOKENS})")
    group.add_argument("--quick", action="store_true", help="fewer and shorter requests")
    group.add_argument(
        "--soak", type=minutes, metavar="MINUTES", help="run fresh processes under contention and compare every row"
    )
    add_engine_args(parser)
    parser.set_defaults(run=run)


def minutes(text: str) -> float:
    """Parses a duration in minutes; fractions are allowed."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of minutes above 0, got {value:g}")
    return value


def run(args: argparse.Namespace) -> int:
    """Returns 1 if a token differs or a row could not run."""
    prompts = _read_prompts(args.prompts)
    max_tokens = args.max_tokens or (_QUICK_MAX_TOKENS if args.quick else _MAX_TOKENS)
    arguments = EngineArgs.from_kwargs(**engine_kwargs(args))
    if args.soak is not None:
        return _run_soak(arguments, prompts, max_tokens, args.soak)
    with interrupts_end_at_once():
        # Imported here: the help text needs no torch.
        from tqdm import tqdm

        from penstock.verify.matrix import verify

    print(_line("row", "requests", "tokens", "agree", "seconds", "what happened"))
    results: list[RowResult] = []
    with tqdm(leave=False, disable=None, unit="request") as bar:

        def show_progress(name: str, done: int, total: int) -> None:
            bar.total = total
            bar.set_description(name, refresh=False)
            bar.update(done - bar.n)

        for result in verify(arguments, prompts, max_tokens, args.quick, show_progress):
            bar.clear()
            print(_row(result), flush=True)
            bar.reset()
            results.append(result)
    return _report(results)


def _read_prompts(file: Path | None) -> tuple[str, ...]:
    if file is None:
        return ()
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {file} cannot be read: {error}") from None
    prompts = tuple(line for line in lines if line.strip())
    if not prompts:
        raise RequestError(f"--prompts {file} holds no prompt", "prompts")
    return prompts


def _line(name: str, requests: Any, tokens: Any, agree: str, seconds: str, happened: str) -> str:
    return f"{name:<28} {requests:>8} {tokens:>7}  {agree:<7} {seconds:>7}  {happened}".rstrip()


def _row(result: RowResult) -> str:
    mark = "yes" if result.is_shown else "(yes)"
    if not result.agrees:
        mark = "NO" if result.difference else "FAILED"
    happened = result.happened if result.is_shown else f"{result.happened}: not exercised"
    return _line(
        result.name, result.num_requests, result.num_tokens, mark, f"{result.seconds:.1f}", result.problem or happened
    )


def _report(results: list[RowResult]) -> int:
    wrong = [result for result in results if not result.agrees]
    unshown = [result.name for result in results if result.agrees and not result.is_shown]
    num_tokens = sum(result.num_tokens for result in results[1:])
    print()
    if unshown:
        print(f"(yes): the tokens agree, but what the row tests did not occur: {'; '.join(unshown)}")
    for result in wrong:
        if result.difference is not None:
            print(_describe(result, result.difference))
    if wrong:
        print(f"{len(wrong)} of {len(results)} rows do not agree with the plain run.", file=sys.stderr)
        return _DIFFERS
    print(f"Every token agrees: {num_tokens} in {len(results) - 1} rows.")
    return 0


def _describe(result: RowResult, difference: Difference) -> str:
    request = difference.case.request
    return "\n".join(
        (
            f"{result.name}: {difference.num_differing} requests differ; the first is request {request.request_id}",
            f"  prompt     {difference.case.prompt[:100]!r}, {_shown(request.prompt_token_ids)}",
            f"  sampling   SamplingParams({_as_keywords(asdict(request.sampling_params), SamplingParams)})",
            f"  position   {difference.position} of the output: token {_token(difference.expected)} in the plain run, "
            f"{_token(difference.got)} here (which ended with {str(difference.ending)!r})",
            f"  engine     LLM({_as_keywords(result.arguments, EngineArgs)})",
            "",
        )
    )


def _as_keywords(values: Mapping[str, Any], kind: type) -> str:
    """Formats the values of a dataclass that differ from its defaults."""
    default = {each.name: each.default for each in fields(kind)}
    return ", ".join(f"{name}={value!r}" for name, value in values.items() if value != default[name])


def _token(token_id: int | None) -> str:
    return "its end" if token_id is None else str(token_id)


def _shown(token_ids: Sequence[int]) -> str:
    return f"{len(token_ids)} tokens {list(token_ids[:_SHOWN_TOKENS])}{' ...' * (len(token_ids) > _SHOWN_TOKENS)}"


# ---- penstock verify --soak ----


def _run_soak(arguments: EngineArgs, prompts: Sequence[str], max_tokens: int, num_minutes: float) -> int:
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
    print(_soak_table(result))
    if result.finding is None:
        print(f"\nEvery row agrees, and each of the {result.num_tensors} tensors of the model in every process.")
        return 0
    print(f"\n{_describe_finding(result.finding)}")
    print("a process differs from the reference" if result.finding.place else "a process failed", file=sys.stderr)
    return _DIFFERS


def _soak_table(result: SoakResult) -> str:
    line = "{:<38} {:>9} {:>7} {:>13} {:>12}".format
    rows = [
        line("fresh processes", "processes", "rounds", "rows compared", "preemptions"),
        line("reference", 1, 1, f"{result.num_reference_rows:,}", 0),
    ]
    for name, tally in result.tallies.items():
        rows.append(line(name, tally.num_processes, tally.num_rounds, f"{tally.num_rows:,}", tally.num_preemptions))
    return "\n".join(rows)


def _describe_finding(finding: Finding) -> str:
    from penstock.verify.soak import DRAWN_ARGUMENTS

    plan, place = finding.plan, finding.place
    lines = [f"the process of seed {plan.seed} {'FAILED: ' + finding.problem if place is None else 'DIFFERS'}"]
    if place is not None:
        lines.append(f"  first in   {place.what}")
        if place.request is not None:
            lines.append(f"  at         position {place.position} of request {place.request}")
            shown = _shown(plan.prompts[place.request])
            lines.append(f"  prompt     {shown}, then {plan.max_tokens[place.request]} greedy ones")
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

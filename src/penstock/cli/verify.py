"""`penstock verify`: checks on this machine that no feature of the engine changes a token."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.dataclass_args import add_engine_args, add_model_argument, engine_kwargs
from penstock.cli.parser import count
from penstock.cli.soak import minutes, run_soak
from penstock.config.engine import EngineArgs
from penstock.messages.sampling_params import SamplingParams
from penstock.utils.errors import ConfigError, RequestError
from penstock.utils.interrupts import interrupts_end_at_once

if TYPE_CHECKING:
    from penstock.verify.matrix import Difference, RowResult

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


def run(args: argparse.Namespace) -> int:
    """Returns 1 if a token differs or a row could not run."""
    prompts = _read_prompts(args.prompts)
    max_tokens = args.max_tokens or (_QUICK_MAX_TOKENS if args.quick else _MAX_TOKENS)
    arguments = EngineArgs.from_kwargs(**engine_kwargs(args))
    if args.soak is not None:
        return run_soak(arguments, prompts, max_tokens, args.soak)
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
    tokens = list(request.prompt_token_ids)
    shown = f"{tokens[:_SHOWN_TOKENS]}{' ...' if len(tokens) > _SHOWN_TOKENS else ''}"
    return "\n".join(
        (
            f"{result.name}: {difference.num_differing} requests differ; the first is request {request.request_id}",
            f"  prompt     {difference.case.prompt[:100]!r}, {len(tokens)} tokens {shown}",
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

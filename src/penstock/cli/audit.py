"""`penstock audit`: whether a server of the OpenAI API ever answers from another request's state (docs/AUDIT.md)."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.parser import add_values, at_most, positive_number, whole_number
from penstock.cli.startup import announce
from penstock.config import env
from penstock.utils.errors import ConfigError
from penstock.utils.interrupts import interrupts_end_at_once
from penstock.utils.names import one_line

if TYPE_CHECKING:
    from penstock.audit.endpoint import Endpoint
    from penstock.audit.plan import Case, Planner
    from penstock.audit.report import Finding, Report, Row

DESCRIPTION = """\
Sends seeded greedy requests to a server with the OpenAI API, of any engine:
alone first, then repeated, in company, after evictions and more. An answer that
differs is either rounding, or comes from the state of another request: the log
probabilities tell which. Nothing is installed on the server.

exit codes: 0 no corruption, 1 corruption, 2 the server could not be audited or
not completely."""

_SHOWN_FINDINGS = 5
_SHOWN_TEXT = 60
_LONGEST_URL = 2048
_LONGEST_TIMEOUT = 86400.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "penstock audit URL [--against URL] [flags]"
    parser.add_argument("url", metavar="URL", help="the server's address, such as http://127.0.0.1:8000")
    server = parser.add_argument_group("servers")
    server.add_argument("--against", metavar="URL", help="a second deployment of the same model, to be compared")
    server.add_argument("--model", metavar="NAME", help="model to request (default: the first of /v1/models)")
    server.add_argument("--api-key", metavar="KEY", help="sent as a bearer token (or PENSTOCK_API_KEY)")
    server.add_argument("--pause-for-restart", action="store_true", help="wait for a restart by hand, and repeat")
    requests = parser.add_argument_group("requests")
    add_values(
        requests,
        ("--seed", whole_number, 0, "N", "of the prompts and of the requests (default: 0)"),
        ("--num-prompts", at_most(1000), 8, "N", "short prompts (default: 8)"),
        ("--max-tokens", at_most(4096), 48, "N", "tokens per answer (default: 48)"),
        (
            "--long-tokens",
            at_most(1_000_000),
            2048,
            "N",
            "length of the long prompts (default: 2048, or what the model allows)",
        ),
        (
            "--pressure-tokens",
            at_most(100_000_000, low=0),
            16384,
            "N",
            "sent to evict cached KV, six times (default: 16384)",
        ),
        ("--margin", positive_number, 0.5, "X", "log probabilities this close are rounding, in nats (default: 0.5)"),
    )
    limits = parser.add_argument_group("limits")
    add_values(
        limits,
        ("--concurrency", at_most(4096), 16, "N", "most requests in flight (default: 16)"),
        ("--max-requests-per-second", positive_number, math.inf, "X", "(default: no limit)"),
        ("--timeout", seconds, 120.0, "SECONDS", "for each request (default: 120)"),
    )
    parser.add_argument_group("report").add_argument(
        "--json", type=Path, metavar="FILE", help="write the report as JSON"
    )
    parser.set_defaults(run=run)


def seconds(text: str) -> float:
    value = positive_number(text)
    if value > _LONGEST_TIMEOUT:
        raise argparse.ArgumentTypeError(f"must be at most {_LONGEST_TIMEOUT:g}, got {text}")
    return value


def run(args: argparse.Namespace) -> int:
    """Returns an exit code of `ExitCode`. Raises KeyboardInterrupt after it has reported what was found."""
    with interrupts_end_at_once():
        # Imported here: the help text needs no event loop, no HTTP client and no progress bar.
        import asyncio

        from penstock.audit.report import ExitCode

        _check(args)
    reports: list[Report] = []
    try:
        asyncio.run(_audit(args, reports))
    except KeyboardInterrupt:
        if reports:
            reports[0].problem = "interrupted"
            _finish(args, reports[0])
        raise
    _finish(args, reports[0])
    code = reports[0].exit_code
    if code is ExitCode.NOT_AUDITED:
        print("penstock: the server could not be audited completely", file=sys.stderr)
    return int(code)


def _check(args: argparse.Namespace) -> None:
    """Refuses what cannot work before anything is sent. Raises ConfigError."""
    args.url = _base_url("URL", args.url)
    if args.against is not None:
        args.against = _base_url("--against", args.against)
    if args.json is not None:
        try:
            args.json.open("a").close()
        except OSError as error:
            raise ConfigError(f"--json {args.json} cannot be written: {error.strerror}") from None


def _base_url(name: str, url: str) -> str:
    from urllib.parse import urlsplit

    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        has_user = parts.username is not None
    except ValueError:
        is_valid = has_user = False
    if has_user:
        raise ConfigError(f"{name} must have no user and password: pass a key with --api-key")
    if not is_valid or len(url) > _LONGEST_URL or not url.isprintable() or parts.query or parts.fragment:
        raise ConfigError(f"{name} must be an address such as http://127.0.0.1:8000, got {url[:80]!r}")
    return url.rstrip("/").removesuffix("/v1")


async def _audit(args: argparse.Namespace, reports: list[Report]) -> None:
    """Adds the report to `reports` before the first request, so that an interrupt finds it."""
    import asyncio
    from contextlib import AsyncExitStack

    from tqdm import tqdm

    from penstock.audit.audit import Audit, Hooks
    from penstock.audit.endpoint import Endpoint, Limits
    from penstock.audit.plan import Planner, Size
    from penstock.audit.prompts import PromptMaker
    from penstock.loadgen.client import Server
    from penstock.utils.clock import SystemClock

    maker = PromptMaker(args.seed)
    limits = Limits(args.concurrency, args.max_requests_per_second, args.timeout)
    key = args.api_key or next(iter(env.api_keys()), None)
    async with AsyncExitStack() as stack:
        sample = maker.document("sample", 6).own
        found: list[Endpoint] = []
        for url in (args.url, *([args.against] if args.against else ())):
            server = await stack.enter_async_context(Server(url, key))
            found.append(await Endpoint.find(server, url, args.model, limits, args.seed, sample))
        if found[0].served.path != found[-1].served.path:
            raise ConfigError("--against: one server completes texts and the other only chats: prompts would differ")
        lengths = [each.served.max_model_len for each in found if each.served.max_model_len is not None]
        size = Size(args.num_prompts, args.max_tokens, args.long_tokens, args.pressure_tokens)
        planner = Planner(maker, size, found[0].served.characters_per_token, min(lengths, default=None))
        cases = planner.cases(has_second=len(found) > 1, has_restart=args.pause_for_restart)
        _announce(found, planner, cases)
        print(
            _line("case", ("requests", "equal", "rounding", "CORRUPT", "unclear", "failed"), "largest", "seconds", "")
        )
        with tqdm(
            total=sum(len(list(case.requests)) for case in cases), leave=False, disable=None, unit="request"
        ) as bar:

            def on_request(name: str) -> None:
                bar.set_description(name, refresh=False)
                bar.update()

            def on_row(row: Row) -> None:
                bar.clear()
                print(_row(row), flush=True)

            async def pause() -> None:
                bar.clear()
                announce("Restart the server now, and press Enter when it is up again.")
                if not await asyncio.to_thread(sys.stdin.readline):
                    raise ConfigError("--pause-for-restart: standard input has ended")

            audit = Audit(found[0], found[1] if len(found) > 1 else None, args.margin, SystemClock(),
                          Hooks(on_request, on_row, pause))  # fmt: skip
            reports.append(audit.report)
            await audit.run(cases)
        for each in found:
            announce(f"{each.num_requests} requests were sent to {each.url}")


def _announce(found: list[Endpoint], planner: Planner, cases: list[Case]) -> None:
    """States what the servers serve, and what the audit costs at most."""
    from penstock.audit.audit import MAX_EXTRA_REQUESTS

    for each in found:
        announce(f"{each.url}: {one_line(str(each.served.model))} at {each.served.describe()}")
        if not each.served.num_top:
            announce(
                "  It reports no log probabilities: rounding and corruption cannot be told apart, except by words of\n"
                "  other prompts in an answer. Differences are listed as unclear, and the exit code is then 2."
            )
    planned = [each for case in cases for each in case.requests]
    num_prompt = sum(planner.num_tokens(each.prompt) for each in planned)
    num_output = sum(each.max_tokens for each in planned)
    announce(
        f"{len(planned):,} requests with about {num_prompt:,} prompt tokens, and at most {num_output:,} output tokens; "
        f"at most {MAX_EXTRA_REQUESTS} further ones of one token, to examine differences"
    )


# ---- The table and what was found ----


def _line(name: str, counts: tuple[Any, ...], largest: str, seconds: str, note: str) -> str:
    return f"{name:<28}" + "".join(f" {each:>8}" for each in counts) + f" {largest:>8} {seconds:>8}  {note}".rstrip()


def _row(row: Row) -> str:
    from penstock.audit.compare import Verdict

    counts = (row.num_requests, *(row.verdicts[verdict] for verdict in Verdict), row.num_failed)
    cached = [] if row.num_cached_tokens is None else [f"{row.num_cached_tokens:,} tokens from the cache"]
    note = "; ".join([*cached, *([row.note] if row.note else [])])
    return _line(row.name, counts, f"{row.largest:.3f}", f"{row.seconds:.1f}", note)


def _finish(args: argparse.Namespace, report: Report) -> None:
    from penstock.audit.compare import Verdict

    for row in report.rows:
        for failure in row.failures:
            print(f"failed in {row.name!r}: {failure}")
    corrupt = [each for each in report.findings if each.verdict is Verdict.CORRUPTION]
    for finding in corrupt[:_SHOWN_FINDINGS]:
        print(f"\n{_describe(finding)}")
    if len(corrupt) > _SHOWN_FINDINGS:
        print(f"\n{len(corrupt) - _SHOWN_FINDINGS} more are in the JSON report (--json FILE)")
    if args.json is not None:
        text = json.dumps({"url": args.url, "against": args.against, "seed": args.seed, "margin": args.margin,
                           **report.to_json()}, indent=1)  # fmt: skip
        args.json.write_text(text + "\n", encoding="utf-8")
    totals = report.totals()
    if report.problem:
        print(f"\nThe audit ended early: {report.problem}")
    print(
        f"\n{totals[Verdict.EQUAL]} answers are equal, {totals[Verdict.ROUNDING]} differ by rounding, "
        f"{totals[Verdict.CORRUPTION]} are corrupt, {totals[Verdict.UNCLEAR]} differ for reasons that cannot be told"
    )


def _describe(finding: Finding) -> str:
    lines = [f"CORRUPT: {finding.prompt}, in the case {finding.case!r}"]
    difference = finding.difference
    if difference is not None:
        place = "" if difference.position is None else f" at token {difference.position}"
        lines.append(f"  after      {difference.common[-_SHOWN_TEXT:]!r}{place}")
        for side, token in (("expected", difference.expected), ("observed", difference.observed)):
            lines.append(f"  {side}   {'the end, or unknown' if token is None else repr(token.text)}")
        for run, values in finding.witnesses.items():
            shown = ", ".join(f"{side} {'not listed' if v is None else f'{v:.2f}'}" for side, v in values.items())
            lines.append(f"  {run}: {shown}")
    else:
        lines.append(f"  answer     {finding.output[:_SHOWN_TEXT]!r}")
    if finding.size is not None:
        lines.append(f"  apart      {finding.size:.2f} nats")
    if finding.wrong is not None:
        lines.append(f"  wrong is   {finding.wrong}")
    if finding.blame is not None:
        lines.append(f"  state of   {finding.blame.name or 'unknown'}: {finding.blame.evidence}")
    if finding.in_flight:
        lines.append(f"  beside     {', '.join(finding.in_flight[:8])}")
    lines.append(f"  repeat     {finding.curl}")
    return "\n".join(lines)

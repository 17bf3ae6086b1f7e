"""Kills, stops and restarts the processes of a disaggregated service under load, and checks the answers to clients.

    python bench/pd_faults.py [--rounds 12] [--seed 0] [--only ROUND] [--decodes 1] [--max-local-prefill 512]
        [--all-apis]

Real processes: a prefill and two decode instances of the built-in model, with a router in front of them and 32 streams
of greedy requests. Half of the rounds drive them one after the other over TCP, half at once over shared memory. In each
round a fault happens to one process at a random moment; then

- every request must have ended within its deadline, and every token that a client got must be the one that a single
  engine gives. A request may fail only if the only decode instance (`--decodes 1`) was killed or restarted: otherwise
  its stream goes on at the other one;
- all instances, including restarted ones, must become idle again: no request, no block in use or held, no process and
  no shared memory left over, and requests must again be answered with KV that was transferred.

The fault of a round depends on the arguments and its number, which is at the end of its line: `--only 17` with the same
arguments repeats round 17. The exit code is 1 if any check failed.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp
from pd_parts.cluster import Cluster, Server, private_folder
from pd_parts.load import Answer, Case, Outcome, ask, make_cases, make_text_cases

KINDS = ("kill prefill", "kill decode", "stop prefill", "stop decode", "restart prefill", "restart decode")
# How the router drives the instances, and which transport moves the KV.
STYLES = {"serial": "sockets", "concurrent": "shared_memory"}
NUM_STREAMS = 32
LEASE, HOLD, LOAD_TIMEOUT, PREFILL_TIMEOUT = 1.0, 2.0, 2.0, 2.5
# A request may wait for a stopped process, for its KV and for the processor on a busy machine.
DEADLINE = 60.0
IDLE_SECONDS = 30.0
_TRIES = 20


@dataclass
class Row:
    """One round, or the sum of some. `problems` are failed checks."""

    name: str
    outcomes: Counter[Outcome] = field(default_factory=Counter[Outcome])
    num_recomputed: int = 0
    slowest: float = 0.0
    num_held: int = 0
    problems: list[str] = field(default_factory=list[str])

    def add(self, answers: Sequence[Answer], may_fail: bool) -> None:
        for each in answers:
            self.outcomes[each.outcome] += 1
            self.num_recomputed += each.is_recomputed
            self.slowest = max(self.slowest, each.seconds)
            is_failure = each.outcome in (Outcome.ERROR, Outcome.CUT)
            if each.outcome in (Outcome.WRONG, Outcome.LATE) or (is_failure and not may_fail):
                self.problems.append(f"{each.outcome}: {each.detail}")

    def include(self, other: Row) -> None:
        self.outcomes += other.outcomes
        self.num_recomputed += other.num_recomputed
        self.slowest = max(self.slowest, other.slowest)
        self.num_held += other.num_held
        self.problems += other.problems

    def __str__(self) -> str:
        of = self.outcomes
        cells = (self.name, of.total(), of[Outcome.RIGHT], of[Outcome.ERROR], of[Outcome.CUT], of[Outcome.WRONG])
        cells += (of[Outcome.LATE], self.num_recomputed, f"{self.slowest:.1f}", self.num_held)
        return f"| {' | '.join(map(str, cells))} |"


HEADER = (
    "| round | requests | right | error | cut | wrong | late | recomputed | slowest, s | held at idle |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Plan:
    """The fault of a round. `which` of the instance's processes it affects, and when, as a fraction of a fault-free
    round's time; a stop lasts `seconds`."""

    number: int
    action: str
    name: str
    which: str
    moment: float
    seconds: float
    cases: tuple[int, ...]

    @property
    def kind(self) -> str:
        return f"{self.action} {self.name}"

    @property
    def is_survived(self) -> bool:
        return self.action == "stop"


def make_plan(seed: int, number: int, kind: str, num_cases: int) -> Plan:
    rng = random.Random(f"{seed}/{number}")
    action, name = kind.split()
    which = {"kill": ("server", "engine"), "stop": ("server", "engine", "both"), "restart": ("server",)}[action]
    cases = tuple(rng.randrange(num_cases) for _ in range(2 * NUM_STREAMS))
    return Plan(number, action, name, rng.choice(which), rng.uniform(0, 0.8), LEASE * rng.uniform(1.2, 3.2), cases)


class Rounds:
    """Rounds on one running cluster."""

    def __init__(self, cluster: Cluster, session: aiohttp.ClientSession, cases: Sequence[Case]) -> None:
        self._cluster = cluster
        self._session = session
        self._cases = cases
        self._span = 1.0

    async def warm_up(self) -> None:
        """Runs a round without a fault to measure its time. KV must be transferred in it."""
        plan = make_plan(0, 0, "stop prefill", len(self._cases))
        row = Row("quiet")
        for _ in range(2):
            started = time.monotonic()
            row.add(await self._load(plan), may_fail=False)
            self._span = time.monotonic() - started
            await self._settle(row)
        assert not row.problems, row.problems
        assert await self._num_transferred() > 0, "nothing was transferred"

    async def run(self, plan: Plan) -> Row:
        row = Row(plan.kind)
        server = self._cluster.servers[plan.name]
        fault = asyncio.create_task(self._inject(plan, server, row))
        is_last = plan.name == "decode" and len(self._cluster.decodes) == 1
        row.add(await self._load(plan), may_fail=is_last and not plan.is_survived)
        await fault
        await self._settle(row)
        await self._cluster.wait_routed()
        row.add(await self._use_again(row), may_fail=False)
        await self._settle(row)
        return row

    async def _load(self, plan: Plan) -> list[Answer]:
        """Every stream sends its requests one after the other."""

        async def stream(numbers: Sequence[int]) -> list[Answer]:
            return [await self._ask(self._cases[number]) for number in numbers]

        streams = [stream(plan.cases[first::NUM_STREAMS]) for first in range(NUM_STREAMS)]
        return [each for answers in await asyncio.gather(*streams) for each in answers]

    async def _ask(self, case: Case) -> Answer:
        return await ask(self._session, self._cluster.url, case, DEADLINE)

    async def _inject(self, plan: Plan, server: Server, row: Row) -> None:
        await asyncio.sleep(plan.moment * self._span)
        if plan.action == "stop":
            server.signal(plan.which, signal.SIGSTOP)
            await asyncio.sleep(plan.seconds)
            server.signal(plan.which, signal.SIGCONT)
            return
        server.signal(plan.which, signal.SIGKILL if plan.action == "kill" else signal.SIGTERM)
        if not await server.wait_ended():
            row.problems.append(f"processes of {server.name} outlived the end of the {plan.which}")
        server.start()
        await server.wait_ready(self._session)

    async def _use_again(self, row: Row) -> list[Answer]:
        """KV must be transferred once more. On a busy machine it may arrive too late at first, and is recomputed."""
        answers: list[Answer] = []
        for case in sorted(self._cases, key=lambda case: -len(case.prompt))[:_TRIES]:
            before = await self._num_transferred()
            answers.append(await self._ask(case))
            if await self._num_transferred() > before:
                return answers
            await self._settle(row)
        row.problems.append("KV is no longer transferred")
        return answers

    async def _num_transferred(self) -> float:
        servers = [self._cluster.servers[name] for name in self._cluster.decodes]
        return sum([(await each.metrics(self._session)).get("p2p_consumer_completed", 0) for each in servers])

    async def _settle(self, row: Row) -> None:
        """Waits until all instances are idle, with empty prefix caches."""
        deadline = time.monotonic() + IDLE_SECONDS
        for server in self._cluster.servers.values():
            while not await server.is_idle(self._session):
                if time.monotonic() > deadline:
                    found = await server.metrics(self._session)
                    used = found["vllm:kv_cache_usage_perc"] + found["vllm:num_requests_waiting"]
                    row.num_held += round(found.get("p2p_held", 0))
                    row.problems.append(f"{server.name} is not idle: held {row.num_held}, used {used}")
                    return
                await asyncio.sleep(0.05)


def left_in_shared_memory(before: set[str]) -> list[str]:
    return sorted(name for name in set(os.listdir("/dev/shm")) - before if "penstock" in name or "psm" in name)


def plans(args: argparse.Namespace, num_cases: int) -> Iterator[tuple[str, list[Plan]]]:
    """Yields for each style its rounds."""
    kinds = itertools.cycle(args.kinds)
    found = [make_plan(args.seed, number, next(kinds), num_cases) for number in range(args.rounds)]
    part = -(-len(found) // len(args.styles))
    for index, style in enumerate(args.styles):
        chosen = [each for each in found[index * part : (index + 1) * part] if args.only in (None, each.number)]
        if chosen:
            yield style, chosen


async def run_style(
    style: str, chosen: Sequence[Plan], cases: Sequence[Case], folder: Path, args: argparse.Namespace
) -> list[Row]:
    cluster = Cluster(
        folder,
        style,
        options={"transport": STYLES[style], "lease_seconds": LEASE, "hold_seconds": HOLD},
        config={"kv_load_timeout": LOAD_TIMEOUT},
        flags=["--kv-cache-memory", "64MB", "--max-model-len", "512", "--num-threads", "1"],
        prefill_timeout=PREFILL_TIMEOUT,
        decodes=("decode", *(f"decode{number}" for number in range(2, args.decodes + 1))),
        max_local_prefill=args.max_local_prefill,
    )
    rows: list[Row] = []
    async with cluster.running() as session:
        rounds = Rounds(cluster, session, cases)
        await rounds.warm_up()
        for plan in chosen:
            started = time.monotonic()
            row = await rounds.run(plan)
            rows.append(row)
            print(f"{row} {plan.number} {style} {plan.which} {time.monotonic() - started:.0f} s", flush=True)
            for problem in row.problems:
                print(f"    {problem}", flush=True)
    pids = [pid for server in cluster.servers.values() for pid in server.pids]
    left = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    if left:
        rows[-1].problems.append(f"processes are left: {left}")
    return rows


def run(args: argparse.Namespace, folder: Path) -> list[Row]:
    """Runs all rounds and prints their table."""
    before = set(os.listdir("/dev/shm"))
    cases = make_cases(48, seed=1)
    if args.all_apis:
        cases += [*(replace(each, n=2) for each in cases[:8]), *make_text_cases()]
    rows: list[Row] = []
    print(HEADER, flush=True)
    for style, chosen in plans(args, len(cases)):
        rows += asyncio.run(run_style(style, chosen, cases, folder, args))
    if left := left_in_shared_memory(before):
        rows[-1].problems.append(f"left in /dev/shm: {left}")
    sums: dict[str, Row] = {}
    for row in rows:
        sums.setdefault(row.name, Row(row.name)).include(row)
    total = Row("all")
    for row in sums.values():
        total.include(row)
    numbers = Counter(row.name for row in rows)
    print(f"\n{HEADER}")
    for row in (*sums.values(), total):
        row.name += f" ({numbers.get(row.name, len(rows))} rounds)"
        print(row)
    return rows


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, metavar="ROUND", help="this round alone")
    parser.add_argument("--decodes", type=int, choices=(1, 2), default=2, help="decode instances (default: 2)")
    parser.add_argument("--max-local-prefill", type=int, default=0, metavar="TOKENS", help="see penstock route")
    parser.add_argument("--all-apis", action="store_true", help="adds two choices, responses and messages")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND")
    parser.add_argument("--styles", nargs="+", choices=STYLES, default=list(STYLES), metavar="STYLE")
    parser.add_argument("--logs", type=Path, help="folder for the instances' logs (default: a temporary one)")
    return parser


def main() -> int:
    args = make_parser().parse_args()
    logging.getLogger("penstock.router").setLevel(logging.ERROR)  # it warns of every request that it retries
    if args.logs:
        args.logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, private_folder(Path(folder)):
        rows = run(args, args.logs or Path(folder))
    problems = [problem for row in rows for problem in row.problems]
    print("\n".join(["", f"{len(problems)} problems:", *problems]) if problems else "\nNothing was wrong.")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

"""Minutes of mixed load on two prefill instances, two decode instances and a router; instances are killed at random.

    python bench/route_soak.py [--minutes 20] [--streams 8] [--seed 0] [--logs FOLDER]

Real processes with the built-in model: `penstock route` in front of `penstock serve` four times, KV over TCP. The
requests are greedy or sampled with a seed, streamed or not, over prompts of many lengths; some clients disconnect
within an answer. Every few seconds one instance has a fault: its server or its engine is killed, it is restarted, or it
is stopped for a while. At least one decode instance has no fault at any time.

Every token that a client got must be the one that a single engine gives. An answer may be cut, or end with an error,
only if a decode instance was killed or restarted meanwhile, and be refused (503) only while an instance was missing. At
the end all instances must be idle, with no block in use or held, and no process or shared memory may be left over. The
exit code is 1 if not.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from pd_faults import left_in_shared_memory
from pd_parts.cluster import Server, free_ports, is_gone, private_folder
from pd_parts.load import Case, Outcome, judge, make_prompts
from route_parts.processes import penstock_route

from penstock import LLM, SamplingParams

FAULTS = ("kill server", "kill engine", "restart server", "stop both")
NUM_CASES = 96
MAX_TOKENS = (4, 12, 40)
LEASE_S, HOLD_S, LOAD_S = 1.0, 2.0, 2.0
STOP_S = (1.0, 4.0)
PAUSE_S = (2.0, 8.0)
DEADLINE_S = 120.0
IDLE_S = 60.0


@dataclass(frozen=True, slots=True)
class Question:
    """`leaves_after`: tokens after which the client closes the connection; None if it stays."""

    case: Case
    sampling: dict[str, Any]
    is_streamed: bool
    leaves_after: int | None

    @property
    def kind(self) -> str:
        if self.leaves_after is not None:
            return "client leaves"
        return f"{'sampled' if self.sampling['temperature'] else 'greedy'}, {'stream' if self.is_streamed else 'whole'}"


@dataclass
class Tally:
    """The outcomes of requests, by kind. `problems` are failed checks."""

    outcomes: dict[str, Counter[str]] = field(default_factory=dict[str, Counter[str]])
    first: list[float] = field(default_factory=list[float])
    faults: Counter[str] = field(default_factory=Counter[str])
    problems: list[str] = field(default_factory=list[str])

    def add(self, kind: str, outcome: str) -> None:
        self.outcomes.setdefault(kind, Counter())[outcome] += 1


class Faults:
    """The faults of instances and their times: requests at that time may fail."""

    def __init__(self, servers: Sequence[Server], tally: Tally, rng: random.Random) -> None:
        self._servers = servers
        self._tally = tally
        self._rng = rng
        self._missing: set[str] = set()
        self._last_missing = -1.0
        self._last_death = -1.0

    def excuses(self, outcome: str, since: float) -> bool:
        if outcome == "refused":
            return bool(self._missing) or self._last_missing >= since
        return outcome in (Outcome.CUT, Outcome.ERROR) and self._last_death >= since

    async def run(self, session: aiohttp.ClientSession, until: float) -> None:
        async with asyncio.TaskGroup() as group:
            while time.monotonic() < until:
                decodes_missing = any(name.startswith("decode") for name in self._missing)
                free = [
                    each
                    for each in self._servers
                    if each.name not in self._missing and not (decodes_missing and each.name.startswith("decode"))
                ]
                if free:
                    server, fault = self._rng.choice(free), self._rng.choice(FAULTS)
                    self._missing.add(server.name)
                    group.create_task(self._inflict(fault, server, session))
                await asyncio.sleep(self._rng.uniform(*PAUSE_S))

    async def _inflict(self, fault: str, server: Server, session: aiohttp.ClientSession) -> None:
        self._tally.faults[f"{fault}, {server.name[:-1]}"] += 1
        action, which = fault.split()
        if action == "stop":
            server.signal(which, signal.SIGSTOP)
            await asyncio.sleep(self._rng.uniform(*STOP_S))
            server.signal(which, signal.SIGCONT)
        else:
            self._died(server)
            server.signal(which, signal.SIGKILL if action == "kill" else signal.SIGTERM)
            if not await server.wait_ended():
                self._tally.problems.append(f"processes of {server.name} outlived the end of the {which}")
            self._died(server)
            server.start()
            await server.wait_ready(session)
        # The router queries every second, and may still consider the instance missing.
        await asyncio.sleep(2.0)
        self._last_missing = time.monotonic()
        self._missing.discard(server.name)

    def _died(self, server: Server) -> None:
        if server.name.startswith("decode"):
            self._last_death = time.monotonic()


def questions(seed: int) -> list[Question]:
    """Includes the answers of one engine without a connector, in this process."""
    rng = random.Random(seed)
    prompts = make_prompts(NUM_CASES, seed)
    samplings: list[dict[str, Any]] = [
        {"temperature": 0.0, "max_tokens": rng.choice(MAX_TOKENS)}
        if rng.random() < 0.5
        else {"temperature": 1.0, "top_p": 0.9, "seed": rng.randrange(1 << 30), "max_tokens": rng.choice(MAX_TOKENS)}
        for _ in prompts
    ]
    llm = LLM(device="cpu", max_model_len=512, num_gpu_blocks_override=1500, num_threads=1)
    try:
        params = [SamplingParams(**each, ignore_eos=True) for each in samplings]
        outputs = llm.generate(prompts, params, use_tqdm=False)
    finally:
        llm.shutdown()
    found: list[Question] = []
    for prompt, sampling, output in zip(prompts, samplings, outputs, strict=True):
        case = Case(tuple(prompt), tuple(output.outputs[0].token_ids))
        kind = rng.random()
        leaves_after = rng.randrange(1, sampling["max_tokens"]) if kind > 0.85 else None
        found.append(Question(case, sampling, kind > 0.3, leaves_after))
    return found


async def ask(session: aiohttp.ClientSession, url: str, question: Question, tally: Tally, faults: Faults) -> None:
    since = time.monotonic()
    tokens: list[int] = []
    is_done, error = False, ""
    try:
        async with asyncio.timeout(DEADLINE_S):
            async for found in _answer(session, url, question):
                if found is None:
                    is_done = True
                    break
                if not tokens:
                    tally.first.append(time.monotonic() - since)
                tokens += found
                if question.leaves_after is not None and len(tokens) >= question.leaves_after:
                    break
        outcome, detail = judge(question.case, tokens, is_done, error)
        if question.leaves_after is not None and outcome is Outcome.CUT:
            outcome = "left"
    except TimeoutError:
        outcome, detail = Outcome.LATE, f"{len(tokens)} tokens"
    except _RefusedError as refused:
        outcome, detail = ("refused" if refused.status == 503 else Outcome.ERROR), str(refused)
    except (aiohttp.ClientError, OSError) as broken:
        outcome, detail = judge(question.case, tokens, False, "")
        detail = detail or repr(broken)
    tally.add(question.kind, outcome)
    if outcome not in (Outcome.RIGHT, "left") and not faults.excuses(outcome, since):
        tally.problems.append(f"{question.kind}: {outcome}: {detail}")


class _RefusedError(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status} {message[:200]}")
        self.status = status


async def _answer(session: aiohttp.ClientSession, url: str, question: Question) -> AsyncIterator[list[int] | None]:
    """Yields tokens as they arrive, and None at the answer's end."""
    body = {"prompt": list(question.case.prompt), **question.sampling, "ignore_eos": True, "return_token_ids": True}
    async with session.post(f"{url}/v1/completions", json={**body, "stream": question.is_streamed}) as response:
        if response.status != 200:
            raise _RefusedError(response.status, await response.text())
        if not question.is_streamed:
            yield (await response.json())["choices"][0]["token_ids"]
            yield None
            return
        async for line in response.content:
            data = line.removeprefix(b"data: ").strip()
            if data == b"[DONE]":
                yield None
            elif data:
                event = json.loads(data)
                if "error" in event:
                    raise _RefusedError(200, event["error"]["message"])
                yield [token for choice in event["choices"] for token in choice.get("token_ids") or ()]


def make_servers(folder: Path) -> list[Server]:
    servers: list[Server] = []
    for role, count in (("prefill", 2), ("decode", 2)):
        for number in range(1, count + 1):
            name = f"{role}{number}"
            config = {
                "kv_connector": "NixlConnector",
                "kv_role": "kv_producer" if role == "prefill" else "kv_consumer",
                "engine_id": name,
                "kv_port": free_ports(1)[0],
                "kv_load_timeout": LOAD_S,
                "kv_connector_extra_config": {"transport": "sockets", "lease_seconds": LEASE_S, "hold_seconds": HOLD_S},
            }
            flags = ["--kv-cache-memory", "64MB", "--max-model-len", "512", "--num-threads", "1"]
            servers.append(Server(name, [*flags, "--kv-transfer-config", json.dumps(config)], folder / f"{name}.log"))
    return servers


@contextlib.asynccontextmanager
async def cluster(servers: Sequence[Server]) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    """Starts all of them, and yields the router's address."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        try:
            for server in servers:
                server.start()
            for server in servers:
                await server.wait_ready(session)
            flags = [part for each in servers for part in (f"--{each.name[:-1]}", each.url)]
            with penstock_route(*flags, "--prefill-timeout", "10") as router:
                yield session, router.url
        finally:
            for server in servers:
                server.signal("both", signal.SIGCONT)
                server.signal("server", signal.SIGTERM)
            for server in servers:
                if server.process is not None:
                    await server.wait_ended()


async def soak(args: argparse.Namespace, asked: Sequence[Question], folder: Path) -> Tally:
    tally, servers = Tally(), make_servers(folder)
    rng = random.Random(args.seed)
    async with cluster(servers) as (session, url):
        faults = Faults(servers, tally, random.Random(args.seed + 1))
        until = time.monotonic() + 60 * args.minutes

        async def stream() -> None:
            while time.monotonic() < until:
                await ask(session, url, rng.choice(asked), tally, faults)

        await asyncio.gather(faults.run(session, until), *(stream() for _ in range(args.streams)))
        for server in servers:
            await settle(server, session, tally)
        async with session.get(f"{url}/metrics") as response:
            report(tally, args.minutes, await response.text())
    if left := [pid for server in servers for pid in server.pids if not is_gone(pid)]:
        tally.problems.append(f"processes are left: {left}")
    return tally


async def settle(server: Server, session: aiohttp.ClientSession, tally: Tally) -> None:
    deadline = time.monotonic() + IDLE_S
    while not await server.is_idle(session):
        if time.monotonic() > deadline:
            tally.problems.append(f"{server.name} has not become idle")
            return
        await asyncio.sleep(0.1)


def report(tally: Tally, minutes: float, metrics: str) -> None:
    columns = (Outcome.RIGHT, "left", Outcome.CUT, "refused", Outcome.ERROR, Outcome.WRONG, Outcome.LATE)
    total: Counter[str] = Counter()
    print(f"\n{minutes:g} minutes\n\n| requests | all | {' | '.join(columns)} |\n|---|---|{'---|' * len(columns)}")
    for kind, outcomes in sorted(tally.outcomes.items()):
        total += outcomes
        print(f"| {kind} | {outcomes.total()} | {' | '.join(str(outcomes[each]) for each in columns)} |")
    print(f"| all | {total.total()} | {' | '.join(str(total[each]) for each in columns)} |")
    print("\n| fault | times |\n|---|---|")
    for name, count in sorted(tally.faults.items()):
        print(f"| {name} | {count} |")
    ordered = sorted(tally.first) or [0.0]
    print(f"\nFirst part of an answer: median {1e3 * statistics.median(ordered):.0f} ms, ", end="")
    print(f"99th percentile {1e3 * ordered[int(0.99 * (len(ordered) - 1))]:.0f} ms.")
    for name in ("retries", "pd_requests", "pd_prefill_errors", "pd_decode_errors"):
        print(f"vllm_router_{name}_total {counter(metrics, f'vllm_router_{name}_total'):g}")
    print(f"penstock_router_self_prefills_total {counter(metrics, 'penstock_router_self_prefills_total'):g}")
    print(f"resident memory of the router {counter(metrics, 'process_resident_memory_bytes') / 2**20:.0f} MiB")


def counter(metrics: str, name: str) -> float:
    return sum(float(value) for value in re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", metrics, re.M))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--streams", type=int, default=8, help="requests at once (default: 8)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--logs", type=Path, help="folder for the instances' logs (default: a temporary one)")
    args = parser.parse_args()
    logging.getLogger("penstock").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder, private_folder(Path(folder)):
        before = set(os.listdir("/dev/shm"))
        asked = questions(args.seed)
        tally = asyncio.run(soak(args, asked, args.logs or Path(folder)))
    if left := left_in_shared_memory(before):
        tally.problems.append(f"left in /dev/shm: {left}")
    for problem in tally.problems:
        print(f"    {problem}")
    print(f"\n{len(tally.problems)} problems" if tally.problems else "\nNothing was wrong.")
    return 1 if tally.problems else 0


if __name__ == "__main__":
    sys.exit(main())

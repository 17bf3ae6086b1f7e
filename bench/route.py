"""The cost of a router, its losses, and the benefit of knowing caches.

    python bench/route.py [--requests 100000] [--stubs 8] [--concurrency 64] [--output-len 32] [--only overhead]

overhead  The same requests, one after the other and many at once, directly to a stub instance that streams numbered
          tokens, through `penstock route`, and through vllm-router if it is installed, in turn. Milliseconds to the
          first token, to the whole answer, and between tokens; medians and 99th percentiles. A router's overhead is the
          difference to the direct row. Also the CPU time of the router's process per request.
storm     All requests through `penstock route` while stub instances die, drain, leave and join. Every answer is checked
          token by token.
fairness  A client sends a request each second to a stub instance with four places, or with --engine to one of the
          built-in model, first alone, and then while another client keeps 1,000 requests in the queue. Milliseconds to
          the whole answer.
prefix    Conversations of several turns with two engines of the built-in model that publish KV events: prefix-aware
          against round-robin. Cached tokens by the engines' usage, and time to the first token of the later turns.
replicas  The same conversations with one server of two engines (--data-parallel-size 2): prefix-aware against
          least-loaded.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import uvloop
from route_parts.processes import (
    RouterProcess,
    engine,
    free_ports,
    penstock_route,
    server,
    stubs,
    vllm_router,
    wait_ready,
)
from route_parts.storm import storm
from route_parts.streams import stream

PARTS = ("overhead", "storm", "fairness", "prefix", "replicas")
_HEAD_OF_POLICIES = "| policy | cached of prompt tokens | first token, median / p99 in ms |\n|---|---|---|"
_TIMEOUT = aiohttp.ClientTimeout(600)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--stubs", type=int, default=8)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--token-ms", type=float, default=0.0, help="between the tokens of a stub instance")
    parser.add_argument("--spread-ms", type=float, default=0.0, help="from the first to the last of requests at once")
    parser.add_argument("--singles", type=int, default=60, help="requests of the client with one per second")
    parser.add_argument("--engine", action="store_true", help="fairness: with an engine of the built-in model")
    parser.add_argument("--conversations", type=int, default=12)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--only", choices=PARTS, action="append")
    args = parser.parse_args()
    parts = {"overhead": overhead, "storm": under_storm, "fairness": fairness, "prefix": prefix, "replicas": replicas}
    for name in args.only or PARTS:
        uvloop.run(parts[name](args))


@dataclass
class Times:
    """Milliseconds of requests, and of single tokens; `cpu`: seconds of the router's process for all of them."""

    first: list[float] = field(default_factory=list[float])
    whole: list[float] = field(default_factory=list[float])
    between: list[float] = field(default_factory=list[float])
    cpu: float = 0.0

    def cells(self) -> str:
        return (
            " | ".join(f"{statistics.median(each):.2f} / {p99(each):.2f}" for each in (self.first, self.whole))
            + (f" | {statistics.median(self.between):.3f} / {p99(self.between):.3f}" if self.between else " | ")
            + f" | {1e6 * self.cpu / len(self.first):.0f}"
        )


def p99(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]


async def timed(url: str, body: dict[str, Any], times: Times, delay: float) -> None:
    await asyncio.sleep(delay)
    started = time.perf_counter()
    arrived, last = await stream(url, body)
    assert len(arrived) == body["max_tokens"], len(arrived)
    times.first.append(1e3 * (arrived[0] - started))
    times.whole.append(1e3 * (last - started))
    times.between += [1e3 * (after - before) for before, after in itertools.pairwise(arrived)]


async def overhead(args: argparse.Namespace) -> None:
    print(f"\n{args.requests} requests of {args.output_len} tokens, {args.stubs} stub instances; ms, median / p99")
    print(
        "| requests at once | through | first token | whole answer | between tokens | CPU, us |\n"
        "|---|---|---|---|---|---|"
    )
    async with stubs(args.stubs, args.token_ms / 1e3) as instances:
        flags = [flag for url in instances.urls for flag in ("--serve", url)]
        with penstock_route(*flags) as own, vllm_router(instances.urls) as other:
            found: dict[str, RouterProcess | str] = {"direct": instances.urls[0], "penstock route": own}
            if other is not None:
                found["vllm-router"] = other
            for each in found.values():
                await wait_ready(each if isinstance(each, str) else each.url)
            for concurrency, share in ((1, 10), (args.concurrency, 1)):
                # A tenth is enough if they are sent one after the other.
                num_requests = max(concurrency, args.requests // (share * len(found)))
                times = await in_turn(found, num_requests, concurrency, args.output_len, args.spread_ms / 1e3)
                for name, each in times.items():
                    print(f"| {concurrency} | {name} | {each.cells()} |", flush=True)


async def in_turn(
    targets: dict[str, RouterProcess | str], num_requests: int, concurrency: int, output_len: int, spread: float
) -> dict[str, Times]:
    """Sends `concurrency` requests to each in turn, so that all see the same machine. The first round is left out.

    The requests of a round begin at equal distances within `spread` seconds.
    """
    times = {name: Times() for name in targets}
    for number in range(-1, max(1, num_requests // concurrency)):
        for name, target in targets.items():
            url = target if isinstance(target, str) else target.url
            body = {"model": "stub", "prompt": f"request {number}", "max_tokens": output_len, "stream": True}
            into = times[name] if number >= 0 else Times()
            before = 0.0 if isinstance(target, str) else target.cpu_seconds()
            delays = [spread * each / concurrency for each in range(concurrency)]
            await asyncio.gather(*(timed(url, body, into, delay) for delay in delays))
            into.cpu += 0.0 if isinstance(target, str) else target.cpu_seconds() - before
    return times


async def under_storm(args: argparse.Namespace) -> None:
    async with stubs(args.stubs, 0.0) as instances:
        flags = [flag for url in instances.urls for flag in ("--serve", url)]
        with penstock_route(*flags, "--health-interval", "0.1") as router:
            started = time.perf_counter()
            tally = await storm(
                router.url,
                router.admin_url,
                instances,
                num_requests=args.requests,
                concurrency=args.concurrency,
                seed=0,
            )
            seconds = time.perf_counter() - started
    print(f"\nstorm: {args.requests} requests in {seconds:.0f} s over {args.stubs} stub instances")
    print("| answered | cut in the middle | refused | lost, or answered twice or wrongly |\n|---|---|---|---|")
    print(f"| {tally.answered} | {tally.cut} | {tally.refused} | {len(tally.wrong)} |")
    for message, count in tally.messages.most_common():
        print(f"  {count} x {message}")
    assert tally.total == args.requests, tally.total
    if tally.wrong:
        raise SystemExit("\n".join(tally.wrong[:20]))
    print("Nothing was lost, and nothing was answered twice.")


async def fairness(args: argparse.Namespace) -> None:
    print(f"\n{args.singles} requests of {args.output_len} tokens, one per second; ms, median / p99 / longest")
    print("| the router is | whole answer |\n|---|---|")
    body = {"prompt": "a", "max_tokens": args.output_len, "stream": True}
    async with contextlib.AsyncExitStack() as stack:
        if args.engine:
            url = stack.enter_context(server("--max-num-seqs", "4", "--kv-cache-memory", "64MB"))
            body["ignore_eos"] = True
        else:
            url = (await stack.enter_async_context(stubs(1, 1e-3))).urls[0]
        flags = ("--max-outstanding", "4", "--max-queued-requests", "2000", "--queue-timeout", "600")
        with penstock_route("--serve", url, *flags) as router:
            await wait_ready(router.url)

            async def many() -> None:
                while True:
                    await stream(router.url, body, "many")

            for name, count in (("idle", 0), ("full of another client's 1,000 requests", 1004)):
                others = [asyncio.create_task(many()) for _ in range(count)]
                await asyncio.sleep(3.0)
                seconds: list[float] = []
                for _ in range(args.singles):
                    started = time.perf_counter()
                    _, last = await stream(router.url, body, "one")
                    seconds.append(1e3 * (last - started))
                    await asyncio.sleep(max(0.0, started + 1.0 - time.perf_counter()))
                print(
                    f"| {name} | {statistics.median(seconds):.0f} / {p99(seconds):.0f} / {max(seconds):.0f} |",
                    flush=True,
                )
                for each in others:
                    each.cancel()
                await asyncio.gather(*others, return_exceptions=True)


async def prefix(args: argparse.Namespace) -> None:
    print(f"\n{args.conversations} conversations of {args.turns} turns, 2 engines, built-in model")
    print(_HEAD_OF_POLICIES)
    for policy in ("round-robin", "prefix-aware"):
        with contextlib.ExitStack() as stack:
            flags: list[str] = []
            for _ in range(2):
                events, replay = (f"tcp://127.0.0.1:{port}" for port in free_ports(2))
                url = stack.enter_context(engine(events, replay, "64MB"))
                flags += ["--serve", f"{url},events={events},replay={replay}"]
            router = stack.enter_context(penstock_route("--policy", policy, *flags)).url
            await wait_ready(router)
            print(f"| {policy} | {await talk(router, args.conversations, args.turns)} |", flush=True)


async def replicas(args: argparse.Namespace) -> None:
    print(f"\n{args.conversations} conversations of {args.turns} turns, 1 server of 2 engines, built-in model")
    print(_HEAD_OF_POLICIES)
    for policy in ("least-loaded", "prefix-aware"):
        flags = ("--data-parallel-size", "2", "--data-parallel-policy", policy, "--kv-cache-memory", "64MB")
        with server(*flags) as url:
            print(f"| {policy} | {await talk(url, args.conversations, args.turns)} |", flush=True)


async def talk(url: str, num_conversations: int, num_turns: int) -> str:
    """Returns cached and all prompt tokens, and milliseconds to first token, of the later turns: table cells."""
    cached = prompt = 0
    first: list[float] = []
    async with aiohttp.ClientSession(timeout=_TIMEOUT) as session:

        async def conversation(number: int) -> None:
            nonlocal cached, prompt
            text = (
                f"Conversation {number}. " + f"The key of friend {number} is in the red box under the old bridge. " * 8
            )
            messages: list[Any] = [{"role": "user", "content": text}]
            for turn in range(num_turns):
                answer, usage, milliseconds = await streamed(session, url, messages)
                if turn:
                    cached += usage["prompt_tokens_details"]["cached_tokens"]
                    prompt += usage["prompt_tokens"]
                    first.append(milliseconds)
                messages += [{"role": "assistant", "content": answer or "-"}, {"role": "user", "content": "And then?"}]

        gate = asyncio.Semaphore(4)

        async def gated(number: int) -> None:
            async with gate:
                await conversation(number)

        await asyncio.gather(*map(gated, range(num_conversations)))
    return f"{cached} of {prompt} ({cached / prompt:.0%}) | {statistics.median(first):.0f} / {p99(first):.0f}"


async def streamed(session: aiohttp.ClientSession, url: str, messages: list[Any]) -> tuple[str, Any, float]:
    """Returns the answer, its usage, and milliseconds until its first token."""
    options = {"max_tokens": 16, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    started, first, answer, usage = time.perf_counter(), 0.0, "", None
    async with session.post(f"{url}/v1/chat/completions", json={"messages": messages, **options}) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                usage = event.get("usage") or usage
                text = "".join(choice["delta"].get("content") or "" for choice in event["choices"])
                first = first or (1e3 * (time.perf_counter() - started) if text else 0.0)
                answer += text
    return answer, usage, first or 1e3 * (time.perf_counter() - started)


if __name__ == "__main__":
    main()

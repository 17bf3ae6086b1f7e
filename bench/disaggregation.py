"""Benefit and cost of disaggregation on two cores: latencies under a mixed load, and the time of a transfer.

    python bench/disaggregation.py [load] [transfers] [siblings] [burst] [--rounds 3] [--model FOLDER]

load        Long prompts arrive while others decode, at the same times for every layout: one engine on both cores, the
            same with small steps, two engines with a core each that alternate, a prefill and a decode instance with a
            core each, and the same with prompts computed by the decode instance where the router expects that to be
            sooner. The layouts alternate; medians of the rounds. The clients, and the proxy, which only the last two
            layouts have, run on the same two cores.
transfers   The time from the prefill instance's answer to the decode instance's first token, minus the time of that
            token if the prompt is in its own cache: by number of tokens, read by the decode instance over both
            transports, with digests and without. The pairs alternate, also with a plain TCP connection between two
            processes on the same cores that moves as many bytes. The caches are filled once before: memory that is
            touched for the first time is slower.
siblings    The first token of a prompt of which another instance has the beginning: that instance is asked for its KV,
            and the rest is computed, against computing all of it. By tokens of the beginning; medians.
burst       Many long prompts arrive at once, and the prefill instance computes them in steps of 512 tokens: how long
            after a prompt's prefill its first token comes from the decode instance, and whether its KV was read.

A model other than the built-in one gets random weights.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import math
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from pd_parts.cluster import Cluster, Server, private_folder
from pd_parts.plain_tcp import plain_tcp

from penstock.config.model import load_model_config
from penstock.config.model_path import resolve_model_path
from penstock.config.recurrent import DeltaSizes

# Token ids that are valid for every shape.
VOCABULARY = 512
ONE_ENGINE, SMALL_STEPS = "one engine, 2 threads", "the same, steps of 256 tokens"
TWO_ENGINES = "two engines, 1 thread each"
PAIR = "prefill and decode, 1 thread each"
SOONEST = "the same, each prompt where it is sooner"
_NUM_NEW = 32
_BLOCK_SIZE = 16
_LEAST_MODEL_LEN, _NUM_STATES = 2048, 13
WAYS = {
    "sockets": {"transport": "sockets"},
    "shared_memory": {"transport": "shared_memory"},
}


def prompt_of(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(length)]


def max_model_len(args: argparse.Namespace) -> int:
    return max(_LEAST_MODEL_LEN, max(args.lengths) + _BLOCK_SIZE)


def model_flags(args: argparse.Namespace, kv_cache_memory: str) -> list[str]:
    flags = ["--max-model-len", str(max_model_len(args)), "--kv-cache-memory", kv_cache_memory]
    return flags if args.model is None else [args.model, *flags, "--load-format", "dummy", "--skip-tokenizer-init"]


# ---- Under load ----


@dataclass
class Times:
    """In seconds. `gaps` are the times between consecutive tokens of a decoding request."""

    gaps: list[float] = field(default_factory=list[float])
    first_of_short: list[float] = field(default_factory=list[float])
    first_of_long: list[float] = field(default_factory=list[float])
    num_tokens: int = 0
    whole: float = 0.0


@dataclass(frozen=True)
class Arrival:
    at: float
    prompt: Sequence[int]
    num_tokens: int
    is_long: bool


def arrivals(args: argparse.Namespace, seed: int) -> list[Arrival]:
    """Returns two independent Poisson processes."""
    rng = random.Random(seed)
    found: list[Arrival] = []
    for is_long, rate in ((False, args.short_rate), (True, args.long_rate)):
        at = rng.expovariate(rate)
        while at < args.seconds:
            prompt = prompt_of(rng, args.long_len if is_long else args.short_len)
            found.append(Arrival(at, prompt, 4 if is_long else args.output_len, is_long))
            at += rng.expovariate(rate)
    return sorted(found, key=lambda each: each.at)


async def send(session: aiohttp.ClientSession, url: str, arrival: Arrival, times: Times) -> None:
    started = last = time.perf_counter()
    body = {
        "prompt": arrival.prompt,
        "max_tokens": arrival.num_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    count = 0
    async with session.post(f"{url}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            now = time.perf_counter()
            if not line.startswith(b"data: {"):
                continue
            tokens = sum(len(each.get("token_ids") or ()) for each in json.loads(line[6:])["choices"])
            if tokens and not count:
                (times.first_of_long if arrival.is_long else times.first_of_short).append(now - started)
            elif tokens and not arrival.is_long:
                times.gaps.append(now - last)
            if tokens:
                count, last = count + tokens, now
    assert count == arrival.num_tokens, f"{count} tokens instead of {arrival.num_tokens}"
    times.num_tokens += count


async def offer(session: aiohttp.ClientSession, urls: Sequence[str], load: Sequence[Arrival]) -> Times:
    """Runs the whole load, until its last answer has ended, alternating between `urls`."""
    times, began = Times(), time.perf_counter()

    async def later(number: int, arrival: Arrival) -> None:
        await asyncio.sleep(max(0.0, began + arrival.at - time.perf_counter()))
        await send(session, urls[number % len(urls)], arrival, times)

    await asyncio.gather(*(later(number, each) for number, each in enumerate(load)))
    times.whole = time.perf_counter() - began
    return times


@contextlib.asynccontextmanager
async def started(servers: Sequence[Server], session: aiohttp.ClientSession) -> AsyncIterator[None]:
    try:
        for server in servers:
            server.start()
        for server in servers:
            await server.wait_ready(session)
        yield
    finally:
        for server in servers:
            server.kill()


def percentile(values: Sequence[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


COLUMNS: dict[str, Callable[[Times], float]] = {
    "ITL median, ms": lambda times: 1e3 * statistics.median(times.gaps),
    "ITL p99, ms": lambda times: 1e3 * percentile(times.gaps, 99),
    "TTFT median of short prompts, ms": lambda times: 1e3 * statistics.median(times.first_of_short),
    "TTFT median of long prompts, ms": lambda times: 1e3 * statistics.median(times.first_of_long),
    "TTFT p99 of all, ms": lambda times: 1e3 * percentile(times.first_of_short + times.first_of_long, 99),
    "output tokens/s": lambda times: times.num_tokens / times.whole,
}


async def measure_load(args: argparse.Namespace, folder: Path) -> None:
    flags = model_flags(args, args.kv_cache_memory)
    cluster = Cluster(
        folder, flags=[*flags, "--num-threads", "1"], cores={"prefill": [args.cores[0]], "decode": [args.cores[1]]}
    )
    whole = Server("whole", [*flags, "--num-threads", "2"], folder / "whole.log", args.cores)
    small_steps = [*whole.flags, "--max-num-batched-tokens", "256"]
    small = Server("small", small_steps, folder / "small.log", args.cores)
    halves = [
        Server(f"half{core}", [*flags, "--num-threads", "1"], folder / f"half{core}.log", [core]) for core in args.cores
    ]
    async with (
        cluster.running() as session,
        cluster.routed(max_local_prefill=512) as soonest,
        started([whole, small, *halves], session),
    ):
        urls = {ONE_ENGINE: [whole.url], SMALL_STEPS: [small.url], TWO_ENGINES: [each.url for each in halves]}
        urls |= {PAIR: [cluster.url], SOONEST: [soonest.url]}
        found: dict[str, list[Times]] = {name: [] for name in urls}
        for number in range(args.rounds + 1):
            load = arrivals(args, number)
            for name in found:
                for server in cluster.servers.values():
                    # Both layouts of the pair get the same prompts: neither may find them in a cache.
                    while not await server.is_idle(session):
                        await asyncio.sleep(0.05)
                times = await offer(session, urls[name], load[: 4 if number == 0 else None])
                if number:
                    found[name].append(times)
                    print(f"round {number}: {name}: {cells([times])}", flush=True)
        transferred = (await cluster.servers["decode"].metrics(session))["p2p_consumer_completed"]
    print(
        f"\n{transferred:.0f} prompts were transferred.\n\n| | {' | '.join(COLUMNS)} |\n|{'---|' * (1 + len(COLUMNS))}"
    )
    for name, each in found.items():
        print(f"| {name} | {cells(each)} |")


def cells(rounds: Sequence[Times]) -> str:
    return " | ".join(f"{statistics.median(map(column, rounds)):.1f}" for column in COLUMNS.values())


# ---- Transfers ----


async def first_token(
    session: aiohttp.ClientSession, url: str, prompt: Sequence[int], params: Mapping[str, Any] | None = None
) -> tuple[float, dict[str, Any]]:
    """Returns the seconds until an answer of one token, and the answer."""
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0.0, "ignore_eos": True, "kv_transfer_params": params}
    began = time.perf_counter()
    async with session.post(f"{url}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        answer = await response.json()
    return time.perf_counter() - began, answer


def num_cached(answer: Mapping[str, Any]) -> int:
    return (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0


async def transfer(session: aiohttp.ClientSession, cluster: Cluster, prompt: Sequence[int]) -> tuple[float, float]:
    """Returns the seconds of the prefill and of the transfer."""
    decode, whole_blocks = cluster.servers["decode"].url, (len(prompt) - 1) // _BLOCK_SIZE * _BLOCK_SIZE
    prefill, answer = await first_token(
        session, cluster.servers["prefill"].url, prompt, {"do_remote_decode": True, "do_remote_prefill": False}
    )
    remote, loaded = await first_token(session, decode, prompt, answer["kv_transfer_params"])
    local, cached = await first_token(session, decode, prompt)
    assert num_cached(loaded) == num_cached(cached) == whole_blocks, "the KV was not transferred"
    return prefill, remote - local


def bytes_of(model: str | None) -> tuple[int, int]:
    """Returns the bytes of a token's keys and values, and of the state of all recurrent layers."""
    config = load_model_config(Path(resolve_model_path(model or "demo")))
    sizes, recurrent = config.delta or config.mamba or config.conv, len(config.recurrent_layers)
    heads = config.num_key_value_heads * config.head_dim
    per_token = (config.num_hidden_layers - recurrent) * 2 * heads * 2  # keys and values, bfloat16
    state_heads = 0 if sizes is None else sizes.key_heads if isinstance(sizes, DeltaSizes) else sizes.heads
    return per_token, 0 if sizes is None else 4 * recurrent * state_heads * sizes.head_size


def bytes_to_move(model: str | None, num_tokens: int) -> int:
    """Returns the bytes of the whole blocks, and of the state at their end."""
    per_token, state = bytes_of(model)
    return num_tokens // _BLOCK_SIZE * _BLOCK_SIZE * per_token + state


async def measure_transfers(args: argparse.Namespace, folder: Path) -> None:
    cores = {"prefill": [args.cores[0]], "decode": [args.cores[1]]}
    per_token, state = bytes_of(args.model)
    num_warm_up = 2 + max_model_len(args) // sum(args.lengths)
    # An engine needs at least so many states.
    memory, states = num_warm_up * sum(args.lengths) * per_token, _NUM_STATES * state
    flags = [*model_flags(args, str(memory + states)), "--num-threads", "1"]
    if states:
        flags += ["--state-cache-share", f"{states / (memory + states):.3f}"]
    clusters = {
        (way, attestation): Cluster(
            folder,
            options={**options, "attestation": attestation},
            flags=flags,
            cores=cores,
        )
        for way, options in WAYS.items()
        for attestation in args.attestations
    }
    prefills: dict[int, list[float]] = {length: [] for length in args.lengths}
    moved: dict[tuple[int, str, str], list[float]] = defaultdict(list)
    by_tcp: dict[int, list[float]] = {length: [] for length in args.lengths}
    rng = random.Random(0)
    async with contextlib.AsyncExitStack() as stack:
        sessions = {key: await stack.enter_async_context(each.running()) for key, each in clusters.items()}
        read = stack.enter_context(plain_tcp(args.cores, bytes_to_move(args.model, max(args.lengths))))
        for number in range(-num_warm_up, args.rounds):
            for length in args.lengths:
                seconds = read(bytes_to_move(args.model, length))
                if number >= 0:
                    by_tcp[length].append(seconds)
                for key, cluster in clusters.items():
                    prefill, seconds = await transfer(sessions[key], cluster, prompt_of(rng, length))
                    if number >= 0:
                        prefills[length].append(prefill)
                        moved[length, *key].append(seconds)
    report_transfers(args, prefills, moved, by_tcp)


def report_transfers(
    args: argparse.Namespace,
    prefills: Mapping[int, list[float]],
    moved: Mapping[tuple[int, str, str], list[float]],
    by_tcp: Mapping[int, list[float]],
) -> None:
    print(
        "| tokens | MB | prefill, ms | KV moves by | with digests, ms | GB/s | without, ms | GB/s | digests / prefill |"
    )
    print(f"|{'---|' * 9}")
    for length in args.lengths:
        num_bytes, prefill = bytes_to_move(args.model, length), statistics.median(prefills[length])
        best = statistics.median(by_tcp[length])
        row = [length, f"{num_bytes / 1e6:.1f}", f"{1e3 * prefill:.0f}", "plain TCP", "", ""]
        row += [f"{1e3 * best:.1f}", f"{num_bytes / best / 1e9:.2f}", ""]
        print(f"| {' | '.join(map(str, row))} |")
        for way in WAYS:
            digested, plain = (statistics.median(moved[length, way, each] or [math.nan]) for each in ("all", "off"))
            row = [length, f"{num_bytes / 1e6:.1f}", f"{1e3 * prefill:.0f}", way]
            row += [_cell(1e3 * digested, ".1f"), _cell(num_bytes / digested / 1e9, ".2f")]
            row += [_cell(1e3 * plain, ".1f"), _cell(num_bytes / plain / 1e9, ".2f")]
            row.append(_cell((digested - plain) / prefill, ".1%"))
            print(f"| {' | '.join(map(str, row))} |")


def _cell(value: float, form: str) -> str:
    """Returns an empty cell for what was not measured."""
    return "" if math.isnan(value) else format(value, form)


# ---- Beginnings from another instance ----


async def measure_siblings(args: argparse.Namespace, folder: Path) -> None:
    num_tokens = max((args.rounds + 1) * 2 * sum(args.lengths), max_model_len(args))
    flags = [*model_flags(args, str(2 * num_tokens * bytes_of(args.model)[0])), "--num-threads", "1"]
    cluster = Cluster(folder, flags=flags, cores={"prefill": [args.cores[0]], "decode": [args.cores[1]]})
    rng = random.Random(0)
    print("| tokens | loaded and the rest computed, ms | all computed, ms |\n|---|---|---|")
    async with cluster.running() as session:
        has, asks = (cluster.servers[name].url for name in ("prefill", "decode"))
        for length in args.lengths:
            loaded: list[float] = []
            computed: list[float] = []
            for number in range(args.rounds + 1):
                prompt = prompt_of(rng, length + _NUM_NEW)
                await first_token(session, has, prompt[:length])
                began = time.perf_counter()
                params = {"do_remote_decode": True, "do_remote_prefill": False}
                _, shared = await first_token(session, has, prompt[:length], params)
                _, answer = await first_token(session, asks, prompt, shared["kv_transfer_params"])
                ended = time.perf_counter()
                assert num_cached(answer) == (length - 1) // _BLOCK_SIZE * _BLOCK_SIZE, "the KV was not loaded"
                seconds, _ = await first_token(session, asks, prompt_of(rng, length + _NUM_NEW))
                if number:  # the first uses memory for the first time
                    loaded.append(1e3 * (ended - began))
                    computed.append(1e3 * seconds)
            print(f"| {length} | {statistics.median(loaded):.1f} | {statistics.median(computed):.1f} |", flush=True)


# ---- A burst of prompts ----


async def hand_over(
    session: aiohttp.ClientSession, cluster: Cluster, prompt: Sequence[int], began: float
) -> tuple[float, float, bool]:
    """Returns when the prefill and the first token came, in seconds after `began`, and whether the KV was read."""
    prefill, decode = cluster.servers["prefill"].url, cluster.servers["decode"].url
    _, answer = await first_token(session, prefill, prompt, {"do_remote_decode": True, "do_remote_prefill": False})
    prefilled = time.perf_counter() - began
    _, answer = await first_token(session, decode, prompt, answer.get("kv_transfer_params"))
    return prefilled, time.perf_counter() - began, num_cached(answer) > 0


async def measure_burst(args: argparse.Namespace, folder: Path) -> None:
    num_bytes = 4 * args.burst * bytes_to_move(args.model, args.burst_len)
    flags = [*model_flags(args, str(num_bytes)), "--num-threads", "1", "--max-num-batched-tokens", "512"]
    cluster = Cluster(folder, flags=flags, cores={"prefill": [args.cores[0]], "decode": [args.cores[1]]})
    rng = random.Random(0)
    print("| KV read | first prefilled, s | its first token, s | last prefilled, s | from prefill to first token, s |")
    print(f"|{'---|' * 5}")
    async with cluster.running() as session:
        for number in range(args.rounds + 1):
            prompts = [prompt_of(rng, args.burst_len) for _ in range(args.burst if number else 1)]
            began = time.perf_counter()
            found = sorted(await asyncio.gather(*(hand_over(session, cluster, each, began) for each in prompts)))
            if number:  # the first uses memory for the first time
                waits = [token - prefilled for prefilled, token, _ in found]
                cells = f"{found[0][0]:.1f} | {found[0][1]:.1f} | {found[-1][0]:.1f}"
                spread = f"{min(waits):.2f} to {max(waits):.2f}, median {statistics.median(waits):.2f}"
                print(f"| {sum(loaded for *_, loaded in found)} of {len(found)} | {cells} | {spread} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="load, transfers, siblings, burst", help="default: all")
    parser.add_argument("--model", help="default: the built-in one")
    parser.add_argument("--kv-cache-memory", default="256MB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cores", type=int, nargs=2, default=[0, 1])
    parser.add_argument("--seconds", type=float, default=20.0, help="during which requests arrive, in each round")
    parser.add_argument("--short-rate", type=float, default=2.0, help="short prompts per second")
    parser.add_argument("--long-rate", type=float, default=0.4, help="long prompts per second")
    parser.add_argument("--short-len", type=int, default=32)
    parser.add_argument("--long-len", type=int, default=1500)
    parser.add_argument("--output-len", type=int, default=96, help="of requests with short prompts")
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[129, 513, 1025, 1921], help="for transfers, in tokens"
    )
    parser.add_argument("--attestations", nargs="+", default=["all", "off"], help="for transfers")
    parser.add_argument("--burst", type=int, default=14, help="prompts that arrive at once")
    parser.add_argument("--burst-len", type=int, default=1000, help="their length in tokens")
    args = parser.parse_args()
    logging.getLogger("penstock.router").setLevel(logging.ERROR)
    measures = {
        "load": measure_load,
        "transfers": measure_transfers,
        "siblings": measure_siblings,
        "burst": measure_burst,
    }
    with tempfile.TemporaryDirectory() as folder, private_folder(Path(folder)):
        for part in args.parts or measures:
            assert part in measures, f"there is no part {part}"
            asyncio.run(measures[part](args, Path(folder)))
            print(flush=True)


if __name__ == "__main__":
    main()

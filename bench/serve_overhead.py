"""The cost of the front end: the same requests through `LLM`, `AsyncLLM` and streaming HTTP.

    python bench/serve_overhead.py [--concurrency 1 8 32] [--output-len 128] [--rounds 3] [--model FOLDER]

Prints, per concurrency, the median seconds of a round through each, the front end's own CPU time per token (from the
operating system's accounting of the server's process, without the engine core) and its share of a step.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp

from penstock import LLM, AsyncLLM, SamplingParams

_TICKS = os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default="demo")
    args = parser.parse_args()
    engine = {"model": args.model, "load_format": "auto" if args.model == "demo" else "dummy", "max_model_len": 1024}
    measured = {
        "LLM": measure_llm(engine, args),
        "AsyncLLM": asyncio.run(measure_async_llm(engine, args)),
        "HTTP": asyncio.run(measure_http(engine, args)),
    }
    for number, concurrency in enumerate(args.concurrency):
        tokens = concurrency * args.output_len
        print(f"concurrency {concurrency}, {args.output_len} tokens each:")
        for name, results in measured.items():
            seconds, cpu = (statistics.median(values) for values in zip(*results[number], strict=True))
            own = "" if name == "LLM" else f"   front end {1e6 * cpu / tokens:6.1f} us CPU per token"
            print(f"  {name:9} {tokens / seconds:9.1f} tokens/s{own}")


def prompts_of(concurrency: int, seed: int) -> list[list[int]]:
    return [[1, 2, 3 + seed, 10 + i, *range(20, 36)] for i in range(concurrency)]


def measure_llm(engine: dict[str, Any], args: argparse.Namespace) -> list[list[tuple[float, float]]]:
    llm = LLM(**engine)
    params = SamplingParams(temperature=0, max_tokens=args.output_len, ignore_eos=True)
    results = []
    for concurrency in args.concurrency:
        rounds = []
        for number in range(args.rounds + 1):
            started = time.perf_counter()
            llm.generate(prompts_of(concurrency, number), params, use_tqdm=False)
            rounds.append((time.perf_counter() - started, 0.0))
        results.append(rounds[1:])
    llm.shutdown()
    return results


async def measure_async_llm(engine: dict[str, Any], args: argparse.Namespace) -> list[list[tuple[float, float]]]:
    llm = await AsyncLLM.start(**engine)
    params = SamplingParams(temperature=0, max_tokens=args.output_len, ignore_eos=True)

    async def one(prompt: list[int]) -> None:
        async for _ in llm.generate(prompt, params):
            pass

    results = []
    for concurrency in args.concurrency:
        rounds = []
        for number in range(args.rounds + 1):
            started, cpu = time.perf_counter(), time.process_time()
            await asyncio.gather(*(one(prompt) for prompt in prompts_of(concurrency, number)))
            rounds.append((time.perf_counter() - started, time.process_time() - cpu))
        results.append(rounds[1:])
    await llm.shutdown()
    return results


async def measure_http(engine: dict[str, Any], args: argparse.Namespace) -> list[list[tuple[float, float]]]:
    flags = [part for name, value in engine.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, "-m", "penstock.cli.main", "serve", "--port", "0", *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    line = next(line for line in process.stderr if " serves " in line)
    url = line.split(" at ")[1].split("/v1")[0]
    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    async def one(prompt: list[int]) -> None:
        body = {"prompt": prompt, "max_tokens": args.output_len, "temperature": 0, "ignore_eos": True, "stream": True}
        async with session.post(f"{url}/v1/completions", data=json.dumps(body), headers=_JSON) as answer:
            assert answer.status == 200, await answer.text()
            async for _ in answer.content.iter_any():
                pass

    results = []
    for concurrency in args.concurrency:
        rounds = []
        for number in range(args.rounds + 1):
            started, cpu = time.perf_counter(), cpu_seconds(process.pid)
            await asyncio.gather(*(one(prompt) for prompt in prompts_of(concurrency, number)))
            rounds.append((time.perf_counter() - started, cpu_seconds(process.pid) - cpu))
        results.append(rounds[1:])
    await session.close()
    process.terminate()
    process.wait()
    process.stderr.close()
    return results


_JSON = {"Content-Type": "application/json"}


def cpu_seconds(pid: int) -> float:
    """Returns user and system time of one process, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


if __name__ == "__main__":
    main()

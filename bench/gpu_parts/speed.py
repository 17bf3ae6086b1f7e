"""Decode, prefill and the offline mix, exactly as vLLM was measured.

decode    (time of 257 output tokens - time of 1) / 256, prompts of 128 tokens, greedy
prefill   16 prompts of 2048 tokens, one output token
mix       256 requests, in and out 100-1024 uniform, temperature 0.6: output tokens per second
"""

from __future__ import annotations

import random
import statistics
from typing import Any

from gpu_parts.common import Job, StepCounter, engine, greedy, prompts
from penstock import SamplingParams


def decode(job: Job) -> None:
    _decode(job, "decode", job.sizes.batches)


def deterministic(job: Job) -> None:
    _decode(job, "deterministic", job.sizes.batches, deterministic=True)


def eager(job: Job) -> None:
    """Measures the benefit of graphs, with the shortest steps."""
    _decode(job, "eager", job.sizes.batches[:1], enforce_eager=True)


def _decode(job: Job, name: str, batches: tuple[int, ...], **engine_args: Any) -> None:
    sizes, rng = job.sizes, random.Random(0)
    num_steps = sizes.output - 1
    with StepCounter.watching(job.device) as steps, engine(job, **engine_args) as llm:
        for batch in batches:

            def timed(num_tokens: int, batch: int = batch) -> Any:
                return steps.run(llm, prompts(llm, batch, sizes.prompt, rng), greedy(num_tokens))

            timed(sizes.output)
            pairs = [(timed(1), timed(sizes.output)) for _ in range(sizes.rounds)]
            times = [1e3 * (whole.seconds - one.seconds) / num_steps for one, whole in pairs]
            cpu_times = [1e3 * (whole.cpu_seconds - one.cpu_seconds) / num_steps for one, whole in pairs]
            job.report(
                f"{name}_b{batch}",
                statistics.median(times),
                "ms/step",
                runs=times,
                cpu_ms=statistics.median(cpu_times),
                steps=pairs[-1][1].steps,
                replayed=pairs[-1][1].replayed,
            )


def prefill(job: Job) -> None:
    sizes, rng = job.sizes, random.Random(0)
    count, length = sizes.prefill
    with StepCounter.watching(job.device) as steps, engine(job) as llm:
        runs = [steps.run(llm, prompts(llm, count, length, rng), greedy(1)) for _ in range(1 + sizes.rounds)]
    rates = [count * length / run.seconds for run in runs[1:]]
    cpu_ms = 1e3 * statistics.median(run.cpu_seconds for run in runs[1:])
    job.report("prefill", statistics.median(rates), "tokens/s", runs=rates, cpu_ms=cpu_ms, steps=runs[-1].steps)


def mix(job: Job) -> None:
    sizes, rng = job.sizes, random.Random(0)
    count, shortest, longest = sizes.mix
    lengths = [rng.randint(shortest, longest) for _ in range(count)]
    outputs = [rng.randint(shortest, longest) for _ in range(count)]
    params = [SamplingParams(temperature=0.6, max_tokens=n, ignore_eos=True, detokenize=False) for n in outputs]
    with StepCounter.watching(job.device) as steps, engine(job) as llm:
        batch = [prompts(llm, 1, length, rng)[0] for length in lengths]
        # The first run is the warm-up: sampling, and steps of every size.
        runs = [steps.run(llm, batch, params) for _ in range(1 + sizes.rounds)]
    rates = [sum(outputs) / run.seconds for run in runs[1:]]
    job.report(
        "mix",
        statistics.median(rates),
        "tokens/s",
        runs=rates,
        output_tokens=sum(outputs),
        cpu_ms=1e3 * runs[-1].cpu_seconds / runs[-1].steps,
        steps=runs[-1].steps,
        replayed=runs[-1].replayed,
    )

"""Runs minutes of mixed load, and checks whether the memory grows meanwhile."""

from __future__ import annotations

import random
import resource
import time
from typing import Any

import torch

from gpu_parts.common import Job, engine, prompts
from penstock import SamplingParams

_KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "seed": 1},
    {"temperature": 0.7, "repetition_penalty": 1.1, "presence_penalty": 0.2},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.6, "min_p": 0.05, "n": 2},
)
_MIB = 1 << 20


def soak(job: Job) -> None:
    """Runs batches of requests of all lengths and kinds, and after each a request that is aborted after a few tokens.

    Growth is counted after a fifth of the time: until then some sizes occur for the first time.
    """
    rng, sizes = random.Random(0), job.sizes
    longest = sizes.limits["max_model_len"] // 2 - 1
    started = time.monotonic()
    samples: list[dict[str, float]] = []
    with engine(job, enable_prefix_caching=True) as llm:
        while not samples or samples[-1]["s"] < 60 * job.minutes:
            batch = [prompts(llm, 1, rng.randint(1, longest), rng)[0] for _ in range(sizes.soak_batch)]
            params = [
                SamplingParams(max_tokens=rng.randint(1, longest), ignore_eos=True, detokenize=False, **kind)
                for kind in (rng.choice(_KINDS) for _ in batch)
            ]
            outputs = llm.generate(batch, params, use_tqdm=False)
            failed = [output.error for output in outputs if output.error]
            if failed:
                raise RuntimeError(f"{len(failed)} requests failed: {failed[0]}")
            aborted = llm.stream(batch[0], SamplingParams(max_tokens=longest, ignore_eos=True, detokenize=False))
            for _ in range(3):
                next(aborted, None)
            aborted.close()
            llm.check_integrity()
            samples.append({"s": time.monotonic() - started, **memory(job.device)})
        preemptions = llm.stats().num_preemptions
    settled = next(sample for sample in samples if sample["s"] >= samples[-1]["s"] / 5)
    growth = {name: samples[-1][name] - settled[name] for name in settled if name != "s"}
    job.report(
        "soak",
        samples[-1]["s"] / 60,
        "minutes",
        text=", ".join(f"{name} {change:+.1f} MiB" for name, change in growth.items()),
        batches=len(samples),
        preemptions=preemptions,
        growth_mib=growth,
        samples=samples[:: max(1, len(samples) // 50)],
    )


def memory(device: str) -> dict[str, float]:
    """Returns in MiB the process's maximum, and on a GPU the memory that torch has reserved and allocated."""
    found = {"host_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}
    if device == "cuda":
        found["reserved"] = torch.cuda.memory_reserved() / _MIB
        found["allocated"] = torch.cuda.memory_allocated() / _MIB
        free, total = torch.cuda.mem_get_info()
        found["used"] = (total - free) / _MIB
    return found

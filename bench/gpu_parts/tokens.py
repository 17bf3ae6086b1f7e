"""Compares the built-in model's tokens on the GPU with the CPU's, and measures its own drafts there."""

from __future__ import annotations

import gc
import itertools
import statistics
from dataclasses import dataclass, field
from typing import Any

import torch

from gpu_parts.common import Job, StepCounter, greedy
from penstock import LLM

MTP = {"method": "mtp", "num_speculative_tokens": 3}
TEXTS = (
    "Once upon a time there was a fox. " * 3,
    "What is 12 + 30?",
    "The key of Anna is in the red box. The key of Ben is in the blue cup. " * 3,
    "Write this as JSON: name Clara, place old shed, count 2.",
    "Repeat this list: red box, blue cup, old shed, green bag.",
    "Tell a short story about Felix.",
)


@dataclass(frozen=True)
class _Way:
    """One way to compute the same tokens; `happened` tells whether the run really used it."""

    name: str
    engine_args: dict[str, Any] = field(default_factory=dict)
    rounds: int = 1  # of the same prompts: the last one counts

    def happened(self, llm: LLM, outputs: list[Any]) -> bool:
        if self.name == "preemption":
            return llm.stats().num_preemptions > 0
        if self.name == "prefix hits":
            return any(output.num_cached_tokens > 0 for output in outputs)
        return self.name != "drafts" or any(output.num_accepted_tokens > 0 for output in outputs)


WAYS = (
    _Way("plain"),
    _Way("chunks", {"max_num_batched_tokens": 24}),
    _Way("drafts", {"speculative_config": MTP}),
    _Way("preemption", {"num_gpu_blocks_override": 14}),
    _Way("prefix hits", rounds=2),
)


def tokens(job: Job) -> None:
    """Fast kernels differ from a CPU in last bits, which near ties reveal; deterministic ones agree with themselves."""
    for dtype in ("float32", "bfloat16"):
        reference, _ = _tokens(job, WAYS[0], dtype=dtype, device="cpu")
        for way in WAYS:
            _compare(job, f"tokens_{dtype}_{way.name}", reference, _tokens(job, way, dtype=dtype))
    options = {"dtype": "bfloat16", "deterministic": True}
    reference, _ = _tokens(job, WAYS[0], **options)
    for way in WAYS[1:]:
        _compare(job, f"tokens_deterministic_{way.name}", reference, _tokens(job, way, **options))


def _tokens(job: Job, way: _Way, **engine_args: Any) -> tuple[list[list[int]], bool]:
    limits = {"max_model_len": 192, "num_gpu_blocks_override": 200, "max_num_seqs": 8, "device": job.device}
    llm = LLM(**{**limits, **way.engine_args, **engine_args})
    outputs: list[Any] = []
    for _ in range(way.rounds):
        outputs = llm.generate(list(TEXTS), greedy(job.sizes.built_in_tokens), use_tqdm=False)
    happened = way.happened(llm, outputs)
    llm.check_integrity()
    llm.shutdown()
    return [list(output.outputs[0].token_ids) for output in outputs], happened


def _compare(job: Job, key: str, reference: list[list[int]], found: tuple[list[list[int]], bool]) -> None:
    pairs = list(zip(reference, found[0], strict=True))
    differences = [
        f"request {number} token {first_difference(a, b)} of {len(a)}" for number, (a, b) in enumerate(pairs) if a != b
    ]
    verdict = "equal" if not differences else f"first difference: {', '.join(differences)}"
    if not found[1]:
        verdict += "; NOT EXERCISED: it did not happen in this run"
    job.report(key, len(pairs) - len(differences), f"of {len(pairs)} equal", text=verdict)


def first_difference(one: list[int], other: list[int]) -> int:
    """Returns the first difference of two unequal lists; one that fails or ends early may be a prefix of the other."""
    return next(i for i, (x, y) in enumerate(itertools.zip_longest(one, other)) if x != y)


def speculation(job: Job) -> None:
    """Runs the built-in model without and with its own MTP module: one engine after the other."""
    found: dict[tuple[str, int], float] = {}
    for name, config in (("plain", None), ("mtp3", MTP)):
        with StepCounter.watching(job.device) as steps:
            llm = LLM(
                device=job.device,
                max_model_len=1024,
                max_num_seqs=64,
                enable_prefix_caching=False,
                num_gpu_blocks_override=4096,
                speculative_config=config,
            )
            tokenizer = llm.get_tokenizer()
            for batch in job.sizes.batches:
                texts = [tokenizer.encode(TEXTS[number % len(TEXTS)]) for number in range(batch)]
                num_tokens = job.sizes.built_in_tokens
                runs = [steps.run(llm, texts, greedy(num_tokens)) for _ in range(1 + job.sizes.rounds)][1:]
                found[name, batch] = statistics.median(batch * num_tokens / run.seconds for run in runs)
                job.report(
                    f"speculation_{name}_b{batch}",
                    found[name, batch],
                    "tokens/s",
                    ms_per_step=statistics.median(1e3 * run.seconds / run.steps for run in runs),
                    tokens_per_step=num_tokens / statistics.median(run.steps for run in runs),
                    accepted_tokens_per_verification=_accepted(llm),
                    replayed=runs[-1].replayed,
                    ratio_to_plain=found[name, batch] / found["plain", batch],
                )
            llm.shutdown()
            del llm
            gc.collect()
            if job.device == "cuda":
                torch.cuda.empty_cache()


def _accepted(llm: LLM) -> float:
    stats = llm.stats().speculation
    return stats.num_accepted_tokens / max(1, stats.num_drafts)

"""Promise P5: after the warm-up nothing compiles, nothing is imported, and the first request is not slower."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time

import numpy as np
import pytest

from penstock import LLM, SamplingParams, StructuredOutputsParams

SPECULATION = {"method": "mtp", "num_speculative_tokens": 3}
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}}, "required": ["name"]}
MIX = (
    ("Once upon a time", {"temperature": 0.0}),
    ("Once upon a time", {"temperature": 0.9, "seed": 1, "n": 3, "logprobs": 2}),
    ("The key of Anna is in the red box. " * 40, {"temperature": 0.0, "prompt_logprobs": 1}),
    ("Where is the key?", {"temperature": 1.0, "top_k": 7, "top_p": 0.8, "min_p": 0.01, "frequency_penalty": 0.3}),
    ("Count: 1, 2, 3", {"temperature": 0.0, "repetition_penalty": 1.2, "min_tokens": 3, "stop": ["9"]}),
    ("A word:", {"temperature": 0.0, "bad_words": ["the"], "logit_bias": {300: 2.0}, "num_speculative_tokens": 0}),
    ("As JSON: name Ben.", {"temperature": 0.0, "structured_outputs": StructuredOutputsParams(json=SCHEMA)}),
)
ALLOWED_RATIO = 1.5
NUM_REQUESTS = 10
NUM_TRIES = 4


def traffic() -> dict[str, list[str]]:
    """Runs the mix twice on a warm engine; returns what was imported meanwhile and what torch compiled."""
    llm = LLM(max_model_len=450, max_num_batched_tokens=64, num_gpu_blocks_override=31, speculative_config=SPECULATION)
    before = set(sys.modules)
    for _ in range(2):
        llm.generate([text for text, _ in MIX], [SamplingParams(max_tokens=20, **kw) for _, kw in MIX], use_tqdm=False)
    assert llm.stats().num_preemptions > 0
    llm.shutdown()
    imported = sorted(set(sys.modules) - before)
    from torch._dynamo.utils import counters

    return {"imported": imported, "compiled": sorted(counters["stats"])}


def milliseconds_to_first_token() -> list[float]:
    """Returns the times of single requests, each with cold processor caches, like a request after a pause. They have
    different lengths: steps of as many rows as one before are recorded and repeated, which is faster.
    """
    llm = LLM(max_model_len=600)
    params = SamplingParams(temperature=0.0, max_tokens=1)
    found: list[float] = []
    for number in range(NUM_REQUESTS):
        np.ones(16_000_000).sum()
        started = time.perf_counter()
        prompt = "A request tells a story about a cat" + " and" * (7 * number % NUM_REQUESTS)
        llm.generate([prompt], params, use_tqdm=False)
        found.append(1000 * (time.perf_counter() - started))
    llm.shutdown()
    return found


def in_a_new_process(function: str) -> object:
    """Calls a function of this module in a new process."""
    code = f"import json\nfrom {__name__} import {function}\nprint(json.dumps({function}()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_nothing_compiles_and_nothing_is_imported_after_the_warm_up() -> None:
    assert in_a_new_process("traffic") == {"imported": [], "compiled": []}


@pytest.mark.long
@pytest.mark.alone
def test_the_first_request_is_not_slower() -> None:
    ratios: list[float] = []
    for _ in range(NUM_TRIES):
        times = in_a_new_process("milliseconds_to_first_token")
        ratios.append(times[0] / statistics.median(times[1:]))
    assert min(ratios) <= ALLOWED_RATIO, ratios

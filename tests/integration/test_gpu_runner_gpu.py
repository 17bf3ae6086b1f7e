"""The runner on a GPU: the tokens of the CPU, and a step is launched without waiting for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock import LLM, SamplingParams
from penstock.executor.uniproc import LaunchExecutor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PROMPTS = ("Once upon a time there was a fox. " * 3, "What is 12 + 30?", "The key of Anna is in the red box. " * 5)
PARAMS = ({"temperature": 0.0}, {"temperature": 0.9}, {"temperature": 0.8, "top_k": 5, "top_p": 0.9})
MTP = {"method": "mtp", "num_speculative_tokens": 2}


def tokens_of(**engine_args: Any) -> list[list[int]]:
    llm = LLM(dtype="float32", max_model_len=256, num_gpu_blocks_override=100, **engine_args)
    params = [SamplingParams(seed=n, max_tokens=20, ignore_eos=True, **each) for n, each in enumerate(PARAMS)]
    outputs = llm.generate(list(PROMPTS), params, use_tqdm=False)
    llm.check_integrity()
    llm.shutdown()
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("speculative", [None, MTP], ids=["plain", "mtp"])
@pytest.mark.parametrize("overlap", [False, True])
def test_the_tokens_of_the_cpu(overlap: bool, speculative: dict[str, Any] | None) -> None:
    """Greedy ones: the last bits of a probability decide what is drawn."""
    limits: dict[str, Any] = {"max_num_batched_tokens": 24, "async_scheduling": overlap}
    found = tokens_of(device="cuda", speculative_config=speculative, **limits)
    assert found[0] == tokens_of(device="cpu")[0]


@pytest.mark.parametrize("speculative", [None, MTP], ids=["plain", "mtp"])
def test_nobody_waits(speculative: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch raises where it would. The first engine compiles, and may."""
    monkeypatch.setenv("PENSTOCK_DEBUG", "0")
    tokens_of(device="cuda", speculative_config=speculative)
    monkeypatch.setattr("penstock.engine.build.warm_up", lambda *args: None)
    for name in ("execute_model", "sample_tokens"):
        original = getattr(LaunchExecutor, name)

        def watched(self: LaunchExecutor, argument: Any, original: Any = original) -> Any:
            torch.cuda.set_sync_debug_mode("error")
            try:
                return original(self, argument)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        monkeypatch.setattr(LaunchExecutor, name, watched)
    tokens_of(device="cuda", speculative_config=speculative)

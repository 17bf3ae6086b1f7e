"""The runner on a GPU: it gives the tokens of the CPU and launches steps without waiting for the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock import LLM, SamplingParams, StructuredOutputsParams
from penstock.cli.main import main
from penstock.worker.worker import Worker

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PROMPTS = ("Once upon a time there was a fox. " * 3, "What is 12 + 30?", "The key of Anna is in the red box. " * 5)
PARAMS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "logprobs": 5},
    {"temperature": 0.8, "top_k": 5, "top_p": 0.9},
    {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.1, "logprobs": 0},
    {"temperature": 0.0, "logit_bias": {5: 2.0, 300: 1.5}, "bad_words": ["the", " fox"], "prompt_logprobs": 3},
    {"temperature": 0.0, "structured_outputs": StructuredOutputsParams(regex="[a-z]{30}")},
    {"temperature": 0.7, "allowed_token_ids": [3, 50, 77, 400], "min_tokens": 5},
)
IS_GREEDY = [params["temperature"] == 0.0 for params in PARAMS]
MTP = {"method": "mtp", "num_speculative_tokens": 2}
SPECULATIVE = {
    "plain": None,
    "mtp": MTP,
    "ngram": {**MTP, "method": "ngram"},
    "drawn": {**MTP, "draft_sample_method": "probabilistic"},
}


def tokens_of(**engine_args: Any) -> list[list[int]]:
    llm = LLM(dtype="float32", max_model_len=256, num_gpu_blocks_override=100, **engine_args)
    params = [SamplingParams(seed=n, max_tokens=20, ignore_eos=True, **each) for n, each in enumerate(PARAMS)]
    prompts = [PROMPTS[number % len(PROMPTS)] for number in range(len(PARAMS))]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    llm.check_integrity()
    llm.shutdown()
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("speculative", SPECULATIVE.values(), ids=SPECULATIVE)
@pytest.mark.parametrize("overlap", [False, True])
def test_greedy_tokens_equal_those_of_the_cpu(overlap: bool, speculative: dict[str, Any] | None) -> None:
    """Compares greedy requests only: other tokens depend on the last bits of probabilities."""
    limits: dict[str, Any] = {"max_num_batched_tokens": 24, "async_scheduling": overlap}
    found = tokens_of(device="cuda", speculative_config=speculative, **limits)
    for is_greedy, one, other in zip(IS_GREEDY, found, tokens_of(device="cpu"), strict=True):
        assert not is_greedy or one == other


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
@pytest.mark.parametrize("speculative", SPECULATIVE.values(), ids=SPECULATIVE)
def test_steps_do_not_synchronise_with_the_device(
    speculative: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch raises an error where a step would. The first engine compiles kernels, and may."""
    monkeypatch.setenv("PENSTOCK_DEBUG", "0")
    tokens_of(device="cuda", speculative_config=speculative)
    monkeypatch.setattr("penstock.engine.build.warm_up", lambda *args: None)
    for name in ("execute_model", "sample_tokens"):
        original = getattr(Worker, name)

        def watched(self: Worker, argument: Any, original: Any = original) -> Any:
            try:
                torch.cuda.set_sync_debug_mode("error")
                return original(self, argument)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        monkeypatch.setattr(Worker, name, watched)
    tokens_of(device="cuda", speculative_config=speculative)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_identity_matrix(dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Deterministic rows are bit-identical, replayed from graphs or launched, however their KV is moved."""
    assert main(["verify", "--quick", "--device", "cuda", "--dtype", dtype]) == 0
    assert "CUDA graphs, drafts" in capsys.readouterr().out


@pytest.mark.parametrize("speculative", SPECULATIVE.values(), ids=SPECULATIVE)
def test_graphs_are_replayed_and_change_nothing(speculative: dict[str, Any] | None) -> None:
    """A graph has the same kernels with the same tiles; it is padded and launched as a whole."""
    args = {"device": "cuda", "speculative_config": speculative, "deterministic": True}
    assert tokens_of(**args) == tokens_of(**args, enforce_eager=True)


def test_memory_does_not_grow() -> None:
    llm = LLM(device="cuda", max_model_len=512, num_gpu_blocks_override=200, enable_prefix_caching=False)
    params = [SamplingParams(seed=n, max_tokens=40, ignore_eos=True, **each) for n, each in enumerate(PARAMS)]
    prompts = [PROMPTS[number % len(PROMPTS)] for number in range(len(PARAMS))]
    reserved: list[int] = []
    for _ in range(12):
        llm.generate(prompts, params, use_tqdm=False)
        reserved.append(torch.cuda.memory_reserved())
    llm.shutdown()
    assert reserved[-1] == reserved[3], reserved

"""Families of models on a GPU: they give the CPU's tokens in float32, and deterministic bits in bfloat16."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock import LLM, SamplingParams
from tests.integration import checkpoints
from tests.integration.checkpoints import make_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# With head norms and without, windows, rotation of a part, experts, latents, each kind of recurrent layer.
FAMILIES = (
    "qwen3-128", "qwen3-moe", "deepseek-v3", "youtu-latent", "qwen3.5", "qwen3-next", "lfm2", "granite4", "olmo2",
    "exaone4", "glm4", "smollm3", "phi3-longrope",
)  # fmt: skip
LATENTS = ("deepseek-v3", "youtu-latent")
LENGTHS = (50, 9, 33)
NGRAM = {"method": "ngram", "num_speculative_tokens": 2}


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    with pytest.MonkeyPatch.context() as patched:
        if request.param in LATENTS:
            # A multiple of 16, as kernels on a GPU need it.
            patched.setitem(checkpoints.CHECKPOINTS[request.param][1], "kv_lora_rank", 48)
        return str(make_checkpoint(request.param, tmp_path_factory.mktemp("family")))


def outputs_of(folder: str, at_once: bool = True, **engine_args: Any) -> list[tuple[list[int], list[float]]]:
    """Returns the tokens of some prompts and their log probabilities."""
    limits = {"max_model_len": 96, "num_gpu_blocks_override": 60, "max_num_seqs": 4, "max_num_batched_tokens": 128}
    llm = LLM(folder, skip_tokenizer_init=True, **{**limits, **engine_args})
    prompts = [{"prompt_token_ids": [3 + (7 * place + place // 12) % 90 for place in range(n)]} for n in LENGTHS]
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=0, ignore_eos=True)
    found: list[tuple[list[int], list[float]]] = []
    for batch in [prompts] if at_once else [[prompt] for prompt in prompts]:
        for completion in (output.outputs[0] for output in llm.generate(batch, params, use_tqdm=False)):
            assert completion.logprobs is not None
            chosen = zip(completion.logprobs, completion.token_ids, strict=True)
            found.append((list(completion.token_ids), [place[token].logprob for place, token in chosen]))
    llm.check_integrity()
    assert llm.stats().num_graph_replays > 0 or engine_args["device"] == "cpu"
    llm.shutdown()
    return found


def test_tokens_equal_those_of_the_cpu(folder: str) -> None:
    expected = outputs_of(folder, device="cpu", dtype="float32")
    drafts = {"speculative_config": NGRAM, "async_scheduling": True, "max_num_batched_tokens": 24}
    for engine_args in ({}, drafts):
        found = outputs_of(folder, device="cuda", dtype="float32", **engine_args)
        for (tokens, logprobs), (expected_tokens, expected_logprobs) in zip(found, expected, strict=True):
            assert tokens == expected_tokens
            assert logprobs == pytest.approx(expected_logprobs, abs=1e-4)


def test_deterministic_bits_do_not_depend_on_batch_or_chunks(folder: str) -> None:
    engine_args = {"device": "cuda", "dtype": "bfloat16", "deterministic": True}
    together = outputs_of(folder, **engine_args)
    assert outputs_of(folder, at_once=False, max_num_batched_tokens=16, **engine_args) == together

"""Compares every supported architecture with Hugging Face transformers, on small random checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.cache_utils import MtpCache

from penstock import LLM, SamplingParams
from penstock.models.mtp import MultiTokenPredictor
from tests.integration.checkpoints import (
    CHECKPOINTS,
    COMMON,
    WRAPPERS,
    make_checkpoint,
    make_mtp_checkpoint,
    make_wrapper_checkpoint,
    save_random,
)

NUM_STEPS = 64
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_STEPS, ignore_eos=True)

# Pools that hold one long request but not two; a window needs few blocks, and two groups need two tables.
NUM_BLOCKS = {"mistral-window": 9, "phi3-partial": 9}
WITH_TWO_GROUPS = (
    "qwen2-hybrid-window",
    "smollm3-window",
    "olmo3",
    "exaone4",
    "cohere2",
    "gemma2",
    "gemma3",
    "gemma4",
    "gemma4-shared",
    "gemma4-512",
    "gemma4-moe",
    "gemma4-unified",
    "gpt-oss",
)
NUM_BLOCKS.update(dict.fromkeys(WITH_TWO_GROUPS, 20))


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randint(COMMON["vocab_size"], (length,), generator=generator).tolist() for length in (5, 40, 97, 33, 61)
    ]


def reference(path: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@torch.inference_mode()
def assert_greedy(model: transformers.PreTrainedModel, prompt: list[int], output: list[int]) -> None:
    """Asserts that every output token is the model's first choice after those before it: by induction, greedy text."""
    choices = model(torch.tensor([prompt + output]), use_cache=False).logits[0].argmax(-1).tolist()
    assert output == choices[len(prompt) - 1 : -1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.mark.spread(5)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logprobs_and_greedy_tokens(name: str, folder: Path) -> None:
    path = make_checkpoint(name, folder)
    model = reference(path)

    # The budget is below every prompt but one, and the pool is too small for all, for chunks and preemptions.
    llm = LLM(
        str(path),
        skip_tokenizer_init=True,
        max_num_batched_tokens=24,
        max_model_len=176,
        num_gpu_blocks_override=NUM_BLOCKS.get(name, 14),
        block_size=16,
        enable_prefix_caching=False,
    )
    outputs = llm.generate(prompts(), GREEDY, use_tqdm=False)
    for prompt, output in zip(prompts(), outputs, strict=True):
        assert len(output.outputs[0].token_ids) == NUM_STEPS
        assert_greedy(model, prompt, output.outputs[0].token_ids)
    assert llm.stats().num_preemptions > 0
    llm.check_integrity()

    # Log probabilities of every prompt position: the logits themselves, up to a constant per row.
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=5)
    (output,) = llm.generate(prompts()[2], params, use_tqdm=False)
    with torch.inference_mode():
        logprobs = model(torch.tensor([prompts()[2]])).logits[0].log_softmax(-1)
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(prompts()[2])
    for position, entries in enumerate(output.prompt_logprobs[1:]):
        assert entries is not None
        assert prompts()[2][position + 1] in entries
        for token_id, entry in entries.items():
            assert entry.logprob == pytest.approx(logprobs[position, token_id].item(), abs=2e-3)
    llm.shutdown()


@pytest.mark.parametrize("name", WRAPPERS)
def test_text_part_of_a_multimodal_model(name: str, folder: Path) -> None:
    path = make_wrapper_checkpoint(name, folder / "wrappers")
    model = transformers.AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    llm = LLM(str(path), skip_tokenizer_init=True, max_model_len=176, max_num_batched_tokens=24)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    for prompt, output in zip(prompts(), llm.generate(prompts(), params, use_tqdm=False), strict=True):
        assert_greedy(model, prompt, output.outputs[0].token_ids)
    assert llm.info.wrapper == name
    llm.shutdown()


def test_tokens_without_a_row_in_the_table_of_all_layers(folder: Path) -> None:
    """They have the first one; transformers itself reads beyond the table."""
    config = transformers.AutoConfig.for_model("gemma4_text", **{**COMMON, **CHECKPOINTS["gemma4-shared"][1]})
    twin = save_random(config, folder / "twin", transformers.AutoModelForCausalLM, torch.float32)
    stored, name = load_file(twin / "model.safetensors"), "model.embed_tokens_per_layer.weight"
    stored[name][280:] = stored[name][0]
    save_file(stored, twin / "model.safetensors", {"format": "pt"})
    path = Path(shutil.copytree(twin, folder / "short-table"))
    save_file({**stored, name: stored[name][:280].clone()}, path / "model.safetensors", {"format": "pt"})
    config.vocab_size_per_layer_input = 280
    config.save_pretrained(path)
    found = list[list[int]]()
    for each in (twin, path):
        llm = LLM(str(each), skip_tokenizer_init=True, max_model_len=176)
        output = llm.generate([279, 280, 300, 5], GREEDY, use_tqdm=False)[0]
        llm.shutdown()
        found.append(output.outputs[0].token_ids)
        assert_greedy(reference(twin), [279, 280, 300, 5], found[-1])
    assert found[0] == found[1]


def test_a_bias_that_the_family_does_not_have(folder: Path) -> None:
    """Qwen2 has biases on queries, keys and values alone, whatever `config.json` says."""
    path = make_checkpoint("qwen2-tied", folder / "bias")
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "attention_bias": True}))
    llm = LLM(str(path), skip_tokenizer_init=True, max_model_len=176)
    output = llm.generate(prompts()[0], GREEDY, use_tqdm=False)[0]
    llm.shutdown()
    assert_greedy(reference(path), prompts()[0], output.outputs[0].token_ids)


def test_short_factors_of_longrope(folder: Path) -> None:
    """An engine whose context is not longer than the original one uses them."""
    path = make_checkpoint("phi3-longrope", folder / "short")
    model = reference(path)
    llm = LLM(str(path), skip_tokenizer_init=True, max_model_len=64, max_num_batched_tokens=24)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    for prompt, output in zip(prompts()[:2], llm.generate(prompts()[:2], params, use_tqdm=False), strict=True):
        assert_greedy(model, prompt, output.outputs[0].token_ids)
    llm.shutdown()


@pytest.mark.parametrize("name", ["deepseek-v3", "glm-flash"])
def test_draft_module(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares the states of the module's first pass, over a whole prompt, with those of transformers' module."""
    path, model, module = make_mtp_checkpoint(name, folder)
    passes: list[tuple[torch.Tensor, torch.Tensor]] = []
    forward = MultiTokenPredictor.forward

    def recording(self: MultiTokenPredictor, hidden: torch.Tensor, next_ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        states = forward(self, hidden, next_ids, *rest)
        passes.append((next_ids.clone(), states.clone()))
        return states

    monkeypatch.setattr(MultiTokenPredictor, "forward", recording)
    prompt = prompts()[2]
    llm = LLM(
        str(path),
        skip_tokenizer_init=True,
        max_model_len=176,
        speculative_config={"method": "mtp", "num_speculative_tokens": 2},
        distributed_executor_backend="uniproc",
    )
    llm.generate(prompt, GREEDY, use_tqdm=False)
    llm.shutdown()
    next_ids, states = next(found for found in passes if found[0][: len(prompt) - 1].tolist() == prompt[1:])
    next_ids = next_ids[: len(prompt)][None]
    with torch.inference_mode():
        hidden = model.model(torch.tensor([prompt])).last_hidden_state
        positions = torch.arange(len(prompt))[None]
        expected = module.forward_layer(0, hidden, positions, MtpCache(config=module.config), next_ids)
    torch.testing.assert_close(states[: len(prompt)], expected[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_and_shards(dtype: str, folder: Path) -> None:
    path = make_checkpoint("qwen3-128", folder / dtype, getattr(torch, dtype), max_shard_size="200KB")
    assert len(list(path.glob("*.safetensors"))) > 1
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
    prompt = prompts()[1]
    llm = LLM(str(path), skip_tokenizer_init=True, max_model_len=128)
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=3)
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    llm.shutdown()
    with torch.inference_mode():
        logprobs = model(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
    assert output.prompt_logprobs is not None
    errors = [
        abs(entry.logprob - logprobs[position, token_id].item())
        for position, entries in enumerate(output.prompt_logprobs[1:])
        for token_id, entry in (entries or {}).items()
    ]
    errors.sort()
    assert errors[len(errors) // 2] < 0.1
    assert errors[-1] < (1.0 if dtype == "bfloat16" else 0.3)

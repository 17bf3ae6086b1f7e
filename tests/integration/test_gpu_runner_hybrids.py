"""The runner's GPU path for models with recurrent layers: the tokens of the CPU path (see `test_gpu_runner`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import LLM, SamplingParams
from penstock.engine import build
from penstock.kernels import native
from penstock.worker import worker
from tests.grids import exhaustive
from tests.integration.checkpoints import make_checkpoint
from tests.integration.test_gpu_runner import gpu_parts_except_the_model, in_the_interpreter, use_graphs
from tests.kernels.graph_emulator import EmulatedRecorder

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a CPU stands in for the GPU")

NGRAM = {"method": "ngram", "num_speculative_tokens": 2}
TIER = {
    "kv_connector": "OffloadingConnector",
    "kv_connector_extra_config": {"load_policy": "always", "cpu_bytes_to_use": 1 << 24},
}
FEW_BLOCKS = 7
HYBRIDS = ("lfm2-moe", "qwen3.5-moe", "qwen3-next", "granite4", "granite4-moe")
# Others whose norms or rotations no family of `test_gpu_runner` has.
OTHERS = ("olmo2", "olmo3", "exaone4", "smollm3", "gpt-oss")


def outputs_of(folder: str, max_tokens: int = 6, lengths: tuple[int, ...] = (50, 9, 33), **engine_args: Any) -> Any:
    """Returns the tokens of some prompts and their log probabilities, twice."""
    build.warm_up = lambda *args: None
    limits = {"max_model_len": 96, "num_gpu_blocks_override": 40, "max_num_seqs": 3, "max_num_batched_tokens": 24}
    llm = LLM(folder, skip_tokenizer_init=True, **{**limits, **engine_args})
    prompts = [{"prompt_token_ids": [3 + (7 * place + place // 12) % 90 for place in range(n)]} for n in lengths]
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, logprobs=0, ignore_eos=True)
    found: list[tuple[list[int], list[float]]] = []
    for _ in range(2):
        for completion in (each.outputs[0] for each in llm.generate(prompts, params, use_tqdm=False)):
            assert completion.logprobs is not None
            chosen = zip(completion.logprobs, completion.token_ids, strict=True)
            found.append((completion.token_ids, [place[token].logprob for place, token in chosen]))
        llm.reset_prefix_cache()
    llm.check_integrity()
    stats = llm.stats()
    assert stats.remote_kv.num_tokens >= 48 or "kv_transfer_config" not in engine_args
    assert stats.num_preemptions or engine_args.get("num_gpu_blocks_override") != FEW_BLOCKS
    llm.shutdown()
    return found


def check_outputs(found: Any, expected: Any) -> None:
    for (tokens, logprobs), (expected_tokens, expected_logprobs) in zip(found, expected, strict=True):
        assert tokens == expected_tokens
        assert logprobs == pytest.approx(expected_logprobs, abs=1e-4)


# Its tokens repeat themselves, so that drafts are accepted.
DRAFTS = ("granite4", {"speculative_config": NGRAM, "async_scheduling": True})
PREEMPTION = ("lfm2", {"num_gpu_blocks_override": FEW_BLOCKS, "async_scheduling": True})
OFFLOADING = ("qwen3.5", {"kv_transfer_config": TIER})


@pytest.mark.parametrize(
    ("name", "engine_args", "has_graphs"),
    [
        (*DRAFTS, True),
        (*PREEMPTION, True),
        (*OFFLOADING, False),
        exhaustive(*DRAFTS, False),
        exhaustive(*PREEMPTION, False),
        exhaustive(*OFFLOADING, True),
    ],
    ids=["drafts", "preemption", "tier", "drafts-eager", "preemption-eager", "tier-graphs"],
)
def test_outputs_equal_those_of_the_cpu(
    name: str, engine_args: dict[str, Any], has_graphs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(make_checkpoint(name, tmp_path))
    monkeypatch.setattr(build, "warm_up", build.warm_up)
    expected = outputs_of(folder)
    monkeypatch.setattr(worker, "make_parts", gpu_parts_except_the_model)
    if has_graphs:
        use_graphs(monkeypatch, contexts=(96,))
    check_outputs(outputs_of(folder, **engine_args), expected)
    if has_graphs:
        assert EmulatedRecorder.num_replays >= 3
        native.library.cache_clear()


@pytest.mark.long
@pytest.mark.parametrize("name", ["lfm2", "qwen3.5", *map(exhaustive, HYBRIDS + OTHERS)])
def test_every_kernel_in_the_interpreter(name: str, tmp_path: Path) -> None:
    folder = str(make_checkpoint(name, tmp_path))
    limits = {"max_tokens": 3, "lengths": (17, 5), "max_num_batched_tokens": 16}
    arguments = {**limits, "enforce_eager": True, "speculative_config": NGRAM}
    found = in_the_interpreter("outputs_of", folder, module=__name__, **arguments)
    check_outputs(found, outputs_of(folder, **limits))

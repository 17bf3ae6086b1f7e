"""Drafts of models with recurrent layers, some right and some wrong: a state continues after those that were right.

The models know few tokens, so that the guesses of a random module are right now and then.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from penstock import SamplingParams
from tests.integration.checkpoints import make_encoder_checkpoint, make_qwen_mtp_checkpoint
from tests.integration.test_disaggregation import complete
from tests.integration.test_identity_families import HYBRIDS, MTP, NGRAM, TIER, WITH_MODULE, answer, engine

VOCAB_SIZE = 5
# With the weights of its embedding as its output head, a random model repeats its last token.
CHANGES: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "tie_word_embeddings": False}
IN_EVERY_RUN = ("qwen3.5", "granite4", "lfm2", "nemotron-h")


def make_checkpoint_of_few_tokens(name: str, folder: Path) -> Path:
    if name in WITH_MODULE:
        return make_qwen_mtp_checkpoint(name, folder, torch.bfloat16, **CHANGES)
    kind = transformers.AutoModelForCausalLM
    return make_encoder_checkpoint(name, folder, torch.bfloat16, kind, **CHANGES)


def requests() -> list[tuple[list[int], SamplingParams]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (
            torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist(),
            SamplingParams(temperature=number % 2, seed=number, max_tokens=32, ignore_eos=True, logprobs=3),
        )
        for number, length in enumerate((5, 33, 70, 16, 47, 97))
    ]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in IN_EVERY_RUN else pytest.mark.long) for name in HYBRIDS]
)
def test_states_continue_after_the_drafts_that_were_right(tmp_path: Path, name: str) -> None:
    path = make_checkpoint_of_few_tokens(name, tmp_path)
    prompts, params = zip(*requests(), strict=True)
    plain = engine(path)
    expected = [answer(complete(plain, prompt, each)) for prompt, each in zip(prompts, params, strict=True)]
    plain.shutdown()
    common: dict[str, Any] = {"enable_prefix_caching": True, "max_num_batched_tokens": 24}
    for drafts in (NGRAM, MTP) if name in WITH_MODULE else (NGRAM,):
        for changes in ({"async_scheduling": True}, {"kv_transfer_config": TIER, "num_gpu_blocks_override": 17}):
            llm = engine(path, speculative_config=drafts, **common, **changes)
            for _ in range(2):
                outputs = llm.generate(list(prompts), list(params), use_tqdm=False)
                assert [answer(output) for output in outputs] == expected
            llm.check_integrity()
            counts = llm.stats().speculation
            assert 0 < counts.num_accepted_tokens < counts.num_draft_tokens
            llm.shutdown()

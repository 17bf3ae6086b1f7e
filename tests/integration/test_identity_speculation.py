"""Promise P4 for speculative decoding: drafts change the speed and no token.

Every cell runs the same requests and compares with the plain run of `test_identity_matrix`: one request at a time, no
overlap, no drafts. Preemptions, prefix hits and rejections are asserted to have happened.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, SamplingParams
from penstock.config.model_path import resolve_model_path
from tests.grids import grid
from tests.integration.test_identity_matrix import MAX_TOKENS, PLAIN, run

COUNT = 22
# The longest request fits with a block to spare, the batch does not.
SMALL_POOL = {"max_model_len": 240, "num_gpu_blocks_override": 17}
DEMO = str(resolve_model_path("demo"))
METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram"},
    "draft_model": {"method": "draft_model", "model": DEMO},
    "mtp": {"method": "mtp"},
    "eagle3": {"method": "eagle3", "model": str(resolve_model_path("demo/eagle3"))},
}
CELLS = grid(list(METHODS), (1, 3, 5), (False, True), (16, 4096))


def config(method: str, num_drafts: int) -> dict[str, Any]:
    return {**METHODS[method], "num_speculative_tokens": num_drafts}


@pytest.fixture(scope="module")
def plain_tokens() -> list[list[int]]:
    tokens, _ = run(one_by_one=True, count=COUNT)
    return tokens


@pytest.mark.spread(1)
@pytest.mark.parametrize(("method", "num_drafts", "overlap", "chunk"), CELLS)
def test_prefix_hits_and_preemption(
    plain_tokens: list[list[int]], method: str, num_drafts: int, overlap: bool, chunk: int
) -> None:
    tokens, llm = run(
        count=COUNT,
        repeat=2,
        async_scheduling=overlap,
        max_num_batched_tokens=chunk,
        enable_prefix_caching=True,
        speculative_config=config(method, num_drafts),
        **SMALL_POOL,
    )
    assert tokens == plain_tokens
    stats = llm.stats()
    assert stats.num_preemptions > 0
    assert stats.prefix_cache_hits > 100
    assert 0 < stats.speculation.num_accepted_tokens < stats.speculation.num_draft_tokens


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 with random weights, whose drafts are almost never accepted."""
    folder = tmp_path_factory.mktemp("random")
    shape = json.loads((Path(DEMO) / "config.json").read_text(encoding="utf-8"))
    shape.update(num_hidden_layers=2, hidden_size=128, intermediate_size=256, use_sliding_window=False)
    (folder / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def random_head(random_model: Path) -> Path:
    """An EAGLE-3 head for that model with other attention heads and a quarter of the vocabulary."""
    folder = random_model / "eagle3"
    folder.mkdir()
    shape = json.loads((random_model / "config.json").read_text(encoding="utf-8"))
    shape.update(architectures=["LlamaForCausalLMEagle3"], model_type="llama", num_hidden_layers=1)
    shape.update(num_attention_heads=3, num_key_value_heads=1, draft_vocab_size=1024)
    shape.update(eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    (folder / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    return folder


@pytest.mark.spread(1)
@pytest.mark.parametrize(("method", "overlap"), grid(list(METHODS), (False, True), strength=1))
def test_random_model(random_model: Path, random_head: Path, method: str, overlap: bool) -> None:
    arguments = {"model": str(random_model), "tokenizer": DEMO, "load_format": "dummy"}
    folders = {"draft_model": random_model, "eagle3": random_head}
    drafts = config(method, 3) | ({"model": str(folders[method])} if method in folders else {})
    plain, _ = run(one_by_one=True, count=COUNT, **arguments)
    tokens, llm = run(count=COUNT, async_scheduling=overlap, speculative_config=drafts, **SMALL_POOL, **arguments)
    assert tokens == plain
    assert llm.stats().num_preemptions > 0


def test_drafts_of_the_built_in_head_are_accepted_at_every_position() -> None:
    """Its method is read from its folder, and the layers of both models are distinguished."""
    prompts = [f"Write this as JSON: name {name}, place red box, count 3." for name in ("Anna", "Ben", "Clara", "Emma")]
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    llm = LLM(**PLAIN, speculative_config={"model": "demo/eagle3", "num_speculative_tokens": 3})
    llm.chat(chats, SamplingParams(temperature=0, max_tokens=MAX_TOKENS), use_tqdm=False)
    accepted = llm.stats().speculation.num_accepted_per_position
    llm.shutdown()
    assert len(accepted) == 3
    assert all(count > 0 for count in accepted)


def test_sampling_parameters_of_a_request() -> None:
    """Penalties, logprobs, min_tokens, stop tokens, n and an opt-out, inside the window."""
    prompt = "The key of Anna is in the red box. Where is the key of Anna? The key of Anna is in the"
    asked = [
        SamplingParams(temperature=0, max_tokens=MAX_TOKENS, logprobs=2, prompt_logprobs=1),
        SamplingParams(temperature=0, max_tokens=MAX_TOKENS, repetition_penalty=1.3, frequency_penalty=0.5),
        SamplingParams(temperature=0, max_tokens=MAX_TOKENS, min_tokens=9, stop_token_ids=list(range(200, 900))),
        SamplingParams(temperature=0, max_tokens=MAX_TOKENS, stop=["box"], ignore_eos=True),
        SamplingParams(temperature=0.9, seed=3, n=3, max_tokens=MAX_TOKENS, logit_bias={300: 4.0}),
        SamplingParams(temperature=0.9, seed=4, max_tokens=MAX_TOKENS, bad_words=["red"], num_speculative_tokens=0),
    ]
    results = []
    for extra in ({}, {"speculative_config": config("draft_model", 4), "async_scheduling": True}):
        llm = LLM(**{**PLAIN, **extra})
        results.append(llm.generate([prompt] * len(asked), asked, use_tqdm=False))
        llm.check_integrity()
        llm.shutdown()
    for plain, drafted in zip(*results, strict=True):
        assert plain.prompt_logprobs == drafted.prompt_logprobs
        for one, other in zip(plain.outputs, drafted.outputs, strict=True):
            assert (one.token_ids, one.text, one.finish_reason, one.stop_reason, one.logprobs) == (
                (other.token_ids, other.text, other.finish_reason, other.stop_reason, other.logprobs)
            )
    assert results[1][0].num_draft_tokens > 0
    assert results[1][5].num_draft_tokens == 0


def test_the_table_turns_drafts_off_under_load(plain_tokens: list[list[int]]) -> None:
    table = {"2": 3, "4": 1, "5": 0}
    tokens, llm = run(
        count=COUNT,
        speculative_config={**config("mtp", 3), "num_speculative_tokens_per_batch_size": table},
    )
    assert tokens == plain_tokens
    assert llm.stats().speculation.num_draft_tokens < COUNT * MAX_TOKENS


@pytest.mark.spread(1)
@pytest.mark.parametrize(("method", "tier"), [("mtp", False), ("mtp", True), ("eagle3", False)])
def test_a_hit_by_another_prompt_changes_no_draft(method: str, tier: bool) -> None:
    """Prompts share whole blocks and then differ: a drafter that looks a token ahead must not use another's KV."""
    story = "Once upon a time there was a fox who lived in a small red house near the old bridge. "
    tails = ("The fox", "Anna", "One day", "Ben had", "It was", "Every", "So", "What is 7 + 8?")
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    found: dict[bool, list[tuple[int, ...]]] = {}
    for enable_prefix_caching in (False, True):
        offload = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"load_policy": "always"}}
        moving = tier and enable_prefix_caching
        engine_args = {
            **PLAIN,
            "speculative_config": config(method, 3),
            "enable_prefix_caching": enable_prefix_caching,
            "kv_transfer_config": offload if moving else None,
        }
        llm = LLM(**engine_args)
        stem = llm.get_tokenizer().encode(story)
        counts: list[tuple[int, ...]] = []
        for length in (32, 33):
            for tail in tails:
                prompt = (stem * 3)[:length] + llm.get_tokenizer().encode(tail)
                (output,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
                counts.append((*output.outputs[0].token_ids, output.num_draft_tokens, output.num_accepted_tokens))
                if moving:
                    assert llm.reset_prefix_cache()
        stats = llm.stats()
        hits = stats.remote_kv.num_tokens if moving else stats.prefix_cache_hits
        assert (hits > 100) == enable_prefix_caching
        llm.shutdown()
        found[enable_prefix_caching] = counts
    assert found[True] == found[False]

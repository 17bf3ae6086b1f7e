"""A prefix of a hybrid that is partly here and partly elsewhere: every division gives the tokens of a plain run.

Other engines have answered otherwise when a part of a prefix was local and the rest external, above all with recurrent
layers, whose state at the wrong position is no error that anyone sees.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import LLM, SamplingParams
from tests.integration.checkpoints import COMMON, make_checkpoint, make_qwen_mtp_checkpoint
from tests.integration.test_disaggregation import complete, disaggregated, transfer_config
from tests.integration.test_identity_families import MTP, NGRAM, Answer, answer, engine
from tests.integration.test_kv_connectors import offloading

BLOCK_SIZE, NUM_TOKENS = 16, 86
NUM_BLOCKS = (NUM_TOKENS - 1) // BLOCK_SIZE
PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=3)
PROMPT = torch.randint(COMMON["vocab_size"], (NUM_TOKENS,), generator=torch.Generator().manual_seed(7)).tolist()


# A state of each other kind, and layers that share keys and values of two sizes.
OTHERS = ("granite4", "lfm2", "nemotron-h", "gemma4-shared")


@pytest.fixture(scope="module", params=["qwen3.5", *(pytest.param(name, marks=pytest.mark.long) for name in OTHERS)])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    make = make_qwen_mtp_checkpoint if request.param == "qwen3.5" else make_checkpoint
    return make(request.param, tmp_path_factory.mktemp("splits"), torch.bfloat16)


def drafting(model: Path) -> dict[str, Any]:
    """Returns the drafts of a model's own module, if it has one."""
    return MTP if model.name == "qwen3.5" else NGRAM


@pytest.fixture(scope="module")
def plain(model: Path) -> Answer:
    llm = engine(model)
    found = answer(complete(llm, PROMPT, PARAMS))
    llm.shutdown()
    return found


def run_prefix(llm: LLM, num_blocks: int) -> None:
    """Lets the engine compute so many whole blocks of the prompt, and keep the state at their end."""
    if num_blocks:
        complete(llm, PROMPT[: num_blocks * BLOCK_SIZE + 1], SamplingParams(max_tokens=1))


@pytest.mark.parametrize("has_drafts", [False, True], ids=["plain", "drafts"])
def test_local_and_remote(model: Path, plain: Answer, has_drafts: bool) -> None:
    drafts = drafting(model) if has_drafts else None
    common: dict[str, Any] = {"enable_prefix_caching": True, "speculative_config": drafts}
    prefill, decode = (
        engine(model, kv_transfer_config=transfer_config(role), **common) for role in ("kv_producer", "kv_consumer")
    )
    for num_local in range(NUM_BLOCKS + 1):
        assert decode.reset_prefix_cache()
        run_prefix(decode, num_local)
        found = disaggregated(prefill, decode, PROMPT, PARAMS)
        assert answer(found) == plain, f"{num_local} blocks are local"
        assert found.num_cached_tokens == NUM_BLOCKS * BLOCK_SIZE
    assert decode.stats().connector["p2p_consumer_completed"] == NUM_BLOCKS, "all but the last division load"
    for llm in (prefill, decode):
        llm.check_integrity()
        llm.shutdown()


@pytest.mark.parametrize("has_disk", [False, True], ids=["memory", "disk"])
def test_local_and_tier(model: Path, plain: Answer, tmp_path: Path, has_disk: bool) -> None:
    config = offloading(**({"disk_path": str(tmp_path)} if has_disk else {}))
    llm = engine(model, kv_transfer_config=config, enable_prefix_caching=True)
    assert answer(complete(llm, PROMPT, PARAMS)) == plain
    for num_local in range(NUM_BLOCKS + 1):
        assert llm.reset_prefix_cache()
        run_prefix(llm, num_local)
        found = complete(llm, PROMPT, PARAMS)
        assert answer(found) == plain, f"{num_local} blocks are local"
        assert found.num_cached_tokens == NUM_BLOCKS * BLOCK_SIZE
    assert llm.stats().connector["num_loads"] > 0
    llm.check_integrity()
    llm.shutdown()


def test_a_prefix_in_four_places(model: Path, plain: Answer, tmp_path: Path) -> None:
    """Of its blocks one is in the engine, two are in its memory tier, one is on disk, and one in another engine."""
    children = [
        {"name": "tier", **offloading(disk_path=str(tmp_path))},
        {"name": "peer", **transfer_config("kv_consumer")},
    ]
    both = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": children}}
    common: dict[str, Any] = {"enable_prefix_caching": True, "speculative_config": drafting(model)}
    stopped = engine(model, kv_transfer_config=both, **common)
    for num_blocks in (1, 3, 4):
        run_prefix(stopped, num_blocks)
    stopped.shutdown()
    prefill = engine(model, kv_transfer_config=transfer_config("kv_producer"), **common)
    decode = engine(model, kv_transfer_config=both, **common)
    # What it reads from disk is in its memory tier then.
    run_prefix(decode, 3)
    assert decode.reset_prefix_cache()
    run_prefix(decode, 1)
    before = decode.stats().connector
    found = disaggregated(prefill, decode, PROMPT, PARAMS)
    assert answer(found) == plain
    assert found.num_cached_tokens == NUM_BLOCKS * BLOCK_SIZE
    after = decode.stats().connector
    # The block on disk has two parts: a state too, or keys and values of two sizes.
    assert after["tier.num_promoted"] - before["tier.num_promoted"] == 2
    # In layers with a window only the last two blocks are needed.
    num_parts = 3 + 2 if model.name == "gemma4-shared" else 3 + 1
    assert after["tier.num_loads"] - before["tier.num_loads"] == num_parts
    assert after["peer.p2p_from/kv_producer/tokens"] == BLOCK_SIZE
    for llm in (prefill, decode):
        llm.check_integrity()
        llm.shutdown()


def test_a_connector_that_never_hits_changes_nothing(model: Path, plain: Answer) -> None:
    llm = engine(model, kv_transfer_config=offloading(), speculative_config=drafting(model), enable_prefix_caching=True)
    for _ in range(2):
        assert answer(complete(llm, PROMPT, PARAMS)) == plain
        assert llm.reset_prefix_cache(reset_connector=True)
    assert llm.stats().connector["num_loads"] == 0
    llm.shutdown()

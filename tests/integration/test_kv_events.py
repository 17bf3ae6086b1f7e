"""An engine with a model publishes the contents of its prefix cache over a real socket."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import zmq

from penstock import LLM, ConfigError, SamplingParams

ANYWHERE = "tcp://127.0.0.1:0"
CONFIG: dict[str, Any] = {"enable_kv_cache_events": True, "endpoint": ANYWHERE, "replay_endpoint": ANYWHERE}


def replay(endpoint: str) -> list[dict[str, Any]]:
    """Returns all events from the first one."""
    context = zmq.Context()
    client = context.socket(zmq.DEALER)
    client.set(zmq.RCVTIMEO, 20_000)
    client.connect(endpoint)
    client.send_multipart([b"", bytes(8)])
    found: list[dict[str, Any]] = []
    while payload := client.recv_multipart()[3]:
        _, events, rank = msgspec.msgpack.decode(payload)
        assert rank == 0
        found += events
    context.destroy(linger=0)
    return found


@pytest.mark.long
def test_events_follow_stored_and_removed_prompts() -> None:
    llm = LLM(max_model_len=256, num_gpu_blocks_override=64, kv_events_config=CONFIG)
    endpoint = llm._core._publisher.replay_endpoint
    greedy = SamplingParams(temperature=0, max_tokens=2)
    prompts = [{"prompt_token_ids": list(range(40))}, {"prompt_token_ids": [*range(32), *range(90, 110)]}]
    for prompt in [*prompts, prompts[0]]:
        llm.generate([prompt], greedy, use_tqdm=False)
    llm.generate([{**prompts[0], "cache_salt": "mine"}], greedy, use_tqdm=False)
    assert llm.reset_prefix_cache()
    cleared, first, second, salted, removed = replay(endpoint)
    llm.shutdown()
    assert cleared == {"type": "AllBlocksCleared"}
    assert first["type"] == "BlockStored"
    assert first["token_ids"] == list(range(32))
    assert first["parent_block_hash"] is None
    assert len(first["block_hashes"]) == 2
    assert second["parent_block_hash"] == first["block_hashes"][1], "it continues after the shared blocks"
    assert second["token_ids"] == list(range(90, 106))
    assert salted["token_ids"] == first["token_ids"]
    assert salted["extra_keys"] == [["mine"], None]
    assert not set(salted["block_hashes"]) & set(first["block_hashes"])
    everything = {h for event in (first, second, salted) for h in event["block_hashes"]}
    assert removed["type"] == "BlockRemoved"
    assert set(removed["block_hashes"]) == everything


def test_events_need_the_prefix_cache() -> None:
    with pytest.raises(ConfigError, match="needs enable_prefix_caching"):
        LLM(enable_prefix_caching=False, kv_events_config=CONFIG)

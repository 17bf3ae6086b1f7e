"""`kv_transfer_params`: from a request to the engine's connector, and from there into the answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from penstock import LLM, AsyncLLM, RequestError, SamplingParams
from tests.integration.server_process import ServerProcess, serve

CONFIG = {"kv_connector": "AnsweringConnector", "kv_connector_module_path": "tests.integration.answering_connector"}
# As a router sends it to a prefill engine, with the answer of another engine's connector in it.
ASKED: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": [[1, 2], []],
    "remote_host": None,
    "of_another_engine": {"nested": [{"deep": None}]},
}
PARAMS = SamplingParams(temperature=0, max_tokens=1, kv_transfer_params=ASKED)
PROMPT = {"prompt_token_ids": list(range(20))}


def check(answered: Any, reason: str = "length") -> None:
    """Checks the connector's answer; the demo model's blocks have 16 tokens."""
    assert answered["asked"] == ASKED
    assert answered["reason"] == reason
    assert [len(table) for table in answered["blocks"]] == [2]


def test_parameters_in_a_program() -> None:
    llm = LLM(max_model_len=256, kv_transfer_config=CONFIG)
    plain = SamplingParams(temperature=0, max_tokens=1)
    first, second = llm.generate([PROMPT, PROMPT], [PARAMS, plain], use_tqdm=False)
    check(first.kv_transfer_params)
    assert second.kv_transfer_params is None
    (chat,) = llm.chat([{"role": "user", "content": "Hi"}], PARAMS, use_tqdm=False)
    assert (chat.kv_transfer_params or {})["asked"] == ASKED
    stopped = SamplingParams(temperature=0, max_tokens=2, stop_token_ids=list(range(256)), kv_transfer_params=ASKED)
    check(llm.generate(PROMPT, stopped, use_tqdm=False)[0].kv_transfer_params, "stop")
    with pytest.raises(RequestError, match="n must be 1 with do_remote_decode") as caught:
        llm.generate(PROMPT, SamplingParams(n=2, kv_transfer_params=ASKED), use_tqdm=False)
    assert caught.value.field == "n"
    # Parameters that a connector reads for each of several completions are no hand-over.
    llm.generate(PROMPT, SamplingParams(n=2, max_tokens=1, kv_transfer_params={"do_remote_decode": False}))
    llm.shutdown()


def test_an_engine_without_a_connector_ignores_the_parameters() -> None:
    llm = LLM(max_model_len=256)
    params = SamplingParams(temperature=0, n=2, max_tokens=1, kv_transfer_params=ASKED)
    (output,) = llm.generate(PROMPT, params, use_tqdm=False)
    assert output.kv_transfer_params is None
    assert len(output.outputs) == 2
    llm.shutdown()


def test_parameters_across_a_process_boundary() -> None:
    async def run() -> None:
        engine = await AsyncLLM.start(max_model_len=256, kv_transfer_config=CONFIG)
        outputs = [output async for output in engine.generate(PROMPT, PARAMS)]
        check(outputs[-1].kv_transfer_params)
        await engine.shutdown()

    asyncio.run(run())


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serve("--max-model-len", "512", "--kv-transfer-config", json.dumps(CONFIG)) as server:
        yield server


COMPLETION = {"path": "/v1/completions", "prompt": list(range(20)), "max_tokens": 1, "kv_transfer_params": ASKED}
CHAT = {
    "path": "/v1/chat/completions",
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": 1,
    "max_completion_tokens": 1,
    "kv_transfer_params": ASKED,
}


def post(server: ServerProcess, body: dict[str, Any], **fields: Any) -> httpx.Response:
    sent = {key: value for key, value in {**body, **fields}.items() if key != "path"}
    return httpx.post(server.url + body["path"], json=sent, timeout=60)


@pytest.mark.spread(1)
@pytest.mark.parametrize("body", [COMPLETION, CHAT], ids=["completion", "chat"])
def test_parameters_in_an_answer(server: ServerProcess, body: dict[str, Any]) -> None:
    answer = post(server, body).raise_for_status().json()
    assert answer["kv_transfer_params"]["asked"] == ASKED
    assert answer["kv_transfer_params"]["reason"] == "length"
    assert "kv_transfer_params" not in post(server, body, kv_transfer_params=None).json()
    assert "kv_transfer_params" not in post(server, body, kv_transfer_params={}).json()


@pytest.mark.parametrize("body", [COMPLETION, CHAT], ids=["completion", "chat"])
def test_parameters_in_the_last_chunk(server: ServerProcess, body: dict[str, Any]) -> None:
    more = {"max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}}
    if "max_completion_tokens" in body:
        more["max_completion_tokens"] = 3
    lines = post(server, body, **more, ignore_eos=True).raise_for_status().text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    found = [
        (chunk["kv_transfer_params"]["asked"], chunk["choices"][0]["finish_reason"])
        for chunk in chunks
        if "kv_transfer_params" in chunk
    ]
    assert found == [(ASKED, "length")]


def test_a_hand_over_is_limited_to_one_completion(server: ServerProcess) -> None:
    for body, fields, message in (
        (COMPLETION, {"n": 2}, "n must be 1"),
        (CHAT, {"n": 2}, "n must be 1"),
        (COMPLETION, {"prompt": ["a", "b"]}, "must be one prompt with do_remote_decode or do_remote_prefill, got 2"),
        (CHAT, {"kv_transfer_params": {"do_remote_prefill": True}, "n": 2}, "n must be 1"),
        (CHAT, {"kv_transfer_params": {"a": "x" * 70000}}, "at most 65536 characters"),
    ):
        answer = post(server, body, **fields)
        assert answer.status_code == 400
        assert message in answer.json()["error"]["message"]
    several = {"prompt": ["a", "b"], "kv_transfer_params": {"max_load_tokens": 0}}
    assert post(server, COMPLETION, **several).status_code == 200

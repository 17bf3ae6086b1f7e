"""The Messages API as Anthropic's client uses it: the same answers as chat completions, its events and errors."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from openai import OpenAI

from tests.integration.scripted_server import ScriptedServer, Setup, scripted_server
from tests.integration.server_process import ServerProcess, serve
from tests.integration.test_server_openai import call

SUM: list[Any] = [{"role": "user", "content": "What is 2 + 3?"}]
WEATHER: list[Any] = [{"role": "user", "content": "What's the weather in Paris?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [{"name": "get_weather", "description": "Get the weather in a city.", "input_schema": SCHEMA}]
FUNCTION = {"name": "get_weather", "description": TOOLS[0]["description"], "parameters": SCHEMA}
FUNCTIONS: Any = [{"type": "function", "function": FUNCTION}]
MESSAGES = "/v1/messages"


@pytest.fixture(scope="module")
def real() -> Iterator[ServerProcess]:
    flags = ("--max-model-len", "1024", "--served-model-name", "demo", "--max-body-bytes", "100000")
    with serve(*flags, "--api-key", "secret") as server:
        yield server
        assert server.terminate() == 0
        assert not [line for line in server.log if "Traceback" in line]


@pytest.fixture(scope="module")
def client(real: ServerProcess) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=real.url, api_key="secret", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def scripted() -> Iterator[ScriptedServer]:
    with scripted_server(Setup()) as server:
        yield server


def chat(real: ServerProcess, messages: Any, **fields: Any) -> Any:
    with OpenAI(base_url=f"{real.url}/v1", api_key="secret", max_retries=0) as client:
        return client.chat.completions.create(model="demo", messages=messages, **fields)


def create(client: anthropic.Anthropic, messages: Any, **fields: Any) -> anthropic.types.Message:
    return client.messages.create(**{"model": "demo", "max_tokens": 64, "messages": messages, **fields})


def test_the_answer_equals_that_of_a_chat_completion(client: anthropic.Anthropic, real: ServerProcess) -> None:
    answer = create(client, SUM, system="Be brief.")
    same = chat(real, [{"role": "system", "content": "Be brief."}, *SUM])
    (block,) = answer.content
    assert (block.type, block.text) == ("text", same.choices[0].message.content)  # pyright: ignore
    assert (answer.type, answer.role, answer.model, answer.stop_reason) == ("message", "assistant", "demo", "end_turn")
    assert answer._request_id == answer.id
    assert answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) == same.usage.prompt_tokens
    assert answer.usage.output_tokens == same.usage.completion_tokens
    assert create(client, [{"role": "user", "content": "Tell me a story."}], max_tokens=4).stop_reason == "max_tokens"


def test_cached_tokens_are_not_input(client: anthropic.Anthropic) -> None:
    long: Any = [{"role": "user", "content": "A river and its mill. " * 20}]
    first, second = (create(client, long, max_tokens=1).usage for _ in range(2))
    assert first.cache_read_input_tokens == 0
    assert (second.cache_read_input_tokens or 0) > 64
    assert second.input_tokens + (second.cache_read_input_tokens or 0) == first.input_tokens


def test_blocks_and_system_texts_are_joined(client: anthropic.Anthropic, real: ServerProcess) -> None:
    parts: Any = [{"type": "text", "text": "What is "}, {"type": "text", "text": "2 + 3?", "cache_control": None}]
    system: Any = [{"type": "text", "text": "Be brief."}]
    count = client.messages.count_tokens(model="demo", system=system, messages=[{"role": "user", "content": parts}])
    assert count.input_tokens == chat(real, [{"role": "system", "content": "Be brief."}, *SUM]).usage.prompt_tokens


def test_events(client: anthropic.Anthropic) -> None:
    asked: Any = {"model": "demo", "max_tokens": 5, "messages": [{"role": "user", "content": "What are you?"}]}
    events: Any = list(client.messages.create(**asked, stream=True))
    kinds = [event.type for event in events]
    # Tokens that a busy server has ready at once come together.
    num_deltas = kinds.count("content_block_delta")
    assert 1 <= num_deltas <= 5
    assert kinds == [
        "message_start", "content_block_start", *["content_block_delta"] * num_deltas, "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    whole = client.messages.create(**asked)
    start, end = events[0].message, events[-2]
    assert (start.content, start.stop_reason, start.usage.output_tokens) == ([], None, 0)
    assert (end.delta.stop_reason, end.usage.output_tokens) == ("max_tokens", 5)
    text = "".join(event.delta.text for event in events if event.type == "content_block_delta")
    assert text == whole.content[0].text  # pyright: ignore[reportAttributeAccessIssue]


def test_events_have_their_names_on_the_wire(real: ServerProcess) -> None:
    body = {"model": "demo", "max_tokens": 2, "messages": SUM, "stream": True}
    request = urllib.request.Request(
        real.url + MESSAGES, json.dumps(body).encode(), {"x-api-key": "secret", "Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        lines = answer.read().decode().split("\n\n")
    assert answer.headers["request-id"].startswith("msg_")
    assert lines.pop() == ""
    for each in lines:
        name, data = each.split("\n")
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"


def test_stop_sequences(client: anthropic.Anthropic) -> None:
    answer = create(client, [{"role": "user", "content": "What are you?"}], stop_sequences=["nothing", "small"])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "small")
    assert answer.content[0].text == "I am Penstock's "  # pyright: ignore[reportAttributeAccessIssue]


def test_tools_and_their_results(client: anthropic.Anthropic, real: ServerProcess) -> None:
    asked = create(client, WEATHER, tools=TOOLS)
    (call,) = asked.content
    assert call.type == "tool_use"
    assert (call.name, call.input, asked.stop_reason) == ("get_weather", {"city": "Paris"}, "tool_use")
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sunny"}]}
    messages: Any = [
        *WEATHER,
        {"role": "assistant", "content": asked.content},
        {"role": "user", "content": [result, {"type": "text", "text": "Well?"}]},
    ]
    same = [
        *WEATHER,
        {"role": "assistant", "tool_calls": [{"function": {"name": call.name, "arguments": json.dumps(call.input)}}]},
        {"role": "tool", "content": "sunny"},
        {"role": "user", "content": "Well?"},
    ]
    counted = client.messages.count_tokens(model="demo", messages=messages, tools=TOOLS).input_tokens
    assert counted == chat(real, same, tools=FUNCTIONS, max_tokens=1).usage.prompt_tokens
    used = create(client, messages, tools=TOOLS, max_tokens=1).usage
    assert counted == used.input_tokens + (used.cache_read_input_tokens or 0)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}], ids=["any", "tool"])
def test_a_forced_call(client: anthropic.Anthropic, choice: Any) -> None:
    with client.messages.stream(model="demo", max_tokens=64, messages=SUM, tools=TOOLS, tool_choice=choice) as stream:
        final = stream.get_final_message()
    (block,) = final.content
    assert (block.type, block.name, set(block.input)) == ("tool_use", "get_weather", {"city"})  # pyright: ignore
    counted = client.messages.count_tokens(model="demo", messages=SUM, tools=TOOLS, tool_choice=choice).input_tokens
    assert counted == final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0)


def test_an_answer_begun_by_the_client(client: anthropic.Anthropic, real: ServerProcess) -> None:
    begun: Any = [{"role": "user", "content": "Tell me a story."}, {"role": "assistant", "content": "Once upon"}]
    answer = create(client, begun, max_tokens=6)
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    same = chat(real, begun, max_tokens=6, extra_body=extra)
    assert answer.content[0].text == same.choices[0].message.content  # pyright: ignore[reportAttributeAccessIssue]


def test_the_output_follows_a_schema(client: anthropic.Anthropic) -> None:
    schema = {**SCHEMA, "properties": {"city": {"type": "string", "maxLength": 8}}, "additionalProperties": False}
    answer = create(client, SUM, output_config={"format": {"type": "json_schema", "schema": schema}})
    assert set(json.loads(answer.content[0].text)) == {"city"}  # pyright: ignore[reportAttributeAccessIssue]


# ---- Keys and errors ----


@pytest.mark.parametrize("path", [MESSAGES, f"{MESSAGES}/count_tokens"])
def test_both_headers_accept_the_key(real: ServerProcess, path: str) -> None:
    limit = {"max_tokens": 1} if path == MESSAGES else {}
    body = json.dumps({"model": "demo", "messages": SUM, **limit}).encode()

    def status(**headers: str) -> tuple[int, Any]:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        request = urllib.request.Request(real.url + path, body, {"Content-Type": "application/json", **sent})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    assert status(x_api_key="secret")[0] == 200
    assert status(Authorization="Bearer secret")[0] == 200
    for headers in ({}, {"x_api_key": "wrong"}, {"x_api_key": "secret", "Authorization": "Bearer wrong"}):
        code, answer = status(**headers)
        assert (code, answer["type"], answer["error"]["type"]) == (401, "error", "authentication_error")


def test_x_api_key_is_refused_on_other_paths(real: ServerProcess) -> None:
    for path in ("/v1/models", "/v1/chat/completions", "/v1/messagesx", "/dashboard/api/stats"):
        request = urllib.request.Request(real.url + path, headers={"x-api-key": "secret"})
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=60)
        assert caught.value.code == 401
        caught.value.close()


BAD: list[tuple[dict[str, Any], int, str, str]] = [
    ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
    ({"messages": []}, 400, "invalid_request_error", "messages"),
    ({"messages": [{"role": "user", "content": []}]}, 400, "invalid_request_error", "no text"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        400, "invalid_request_error", "must be a text",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]},
        400, "invalid_request_error", "thinking",
    ),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]},
        400, "invalid_request_error", "tool_result",
    ),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "f", "input": {}}]}]},
        400, "invalid_request_error", "results of the last tool_use",
    ),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, 400, "invalid_request_error", "type custom"),
    ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error", "tool_choice needs tools"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "f"}}, 400, "invalid_request_error", "not in tools"),
    ({"no_such_field": 1}, 400, "invalid_request_error", "no_such_field"),
    ({"temprature": 1}, 400, "invalid_request_error", "did you mean temperature?"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, 400, "invalid_request_error", "tools.0.name: "),
    ({"tools": [{"name": "f", "input_schema": {}, "descripton": "x"}]}, 400, "invalid_request_error", "descripton"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "texts": "y"}]}]},
        400, "invalid_request_error", "texts is not a field",
    ),
    ({"max_tokens": 99999}, 400, "invalid_request_error", "max_tokens=99999 is too large"),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "strin"}}}},
        400, "invalid_request_error", "output_config.format: ",
    ),
    ({"top_k": "many"}, 400, "invalid_request_error", "top_k"),
    ({"seed": "x"}, 400, "invalid_request_error", "seed"),
    ({"model": "claude"}, 404, "not_found_error", "claude"),
    ({"system": "x" * 200_000}, 413, "request_too_large", "max_body_bytes"),
    ({"messages": [{"role": "user", "content": "x " * 3000}]}, 400, "invalid_request_error", "max_model_len"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "status", "kind", "message"), BAD, ids=lambda value: value if isinstance(value, str) else ""
)
def test_errors_have_the_format_of_anthropic(
    client: anthropic.Anthropic, fields: dict[str, Any], status: int, kind: str, message: str
) -> None:
    body = {"model": "demo", "max_tokens": 4, "messages": SUM, **fields}
    with pytest.raises(anthropic.APIStatusError) as caught:
        client.post(MESSAGES, body=body, cast_to=object)
    assert caught.value.status_code == status
    answer: Any = caught.value.body
    assert answer.keys() == {"type", "error", "request_id"}
    assert answer["type"] == "error"
    assert answer["error"].keys() == {"type", "message"}
    assert answer["error"]["type"] == kind
    assert message in answer["error"]["message"]
    assert answer["request_id"] == caught.value.request_id


def test_other_refusals_have_that_format_too(scripted: ScriptedServer) -> None:
    status, answer = call(scripted.url + MESSAGES, None)
    assert (status, answer["error"]["type"]) == (405, "invalid_request_error")
    status, answer = call(scripted.url + MESSAGES, b"{")
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    status, answer = call(f"{scripted.url}{MESSAGES}/batches", b"{}")
    assert (status, answer["error"]["type"]) == (404, "not_found_error")
    scripted.service.is_draining = True
    try:
        status, answer = call(scripted.url + MESSAGES, {"max_tokens": 1, "messages": SUM})
    finally:
        scripted.service.is_draining = False
    assert (status, answer["error"]["type"]) == (503, "overloaded_error")


def test_an_error_in_a_stream_is_an_event(scripted: ScriptedServer) -> None:
    scripted.answers("Fi", error="the engine broke")
    client = anthropic.Anthropic(base_url=scripted.url, api_key="x", max_retries=0)
    asked: Any = {"model": "demo", "max_tokens": 4, "messages": SUM}
    with pytest.raises(anthropic.APIStatusError, match="the engine broke"):
        list(client.messages.create(**asked, stream=True))
    with pytest.raises(anthropic.InternalServerError, match="the engine broke") as caught:
        client.messages.create(**asked)
    answer: Any = caught.value.body
    assert answer["error"]["type"] == "api_error"


def test_arguments_that_are_not_an_object_become_an_empty_input(scripted: ScriptedServer) -> None:
    scripted.answers('<tool_call>{"name": "get_weather", "arguments": {"city": "Par', finish_reason="length")
    client = anthropic.Anthropic(base_url=scripted.url, api_key="x", max_retries=0)
    asked: Any = {"model": "demo", "max_tokens": 4, "messages": WEATHER, "tools": TOOLS}
    answer = client.messages.create(**asked)
    assert (answer.content[0].input, answer.stop_reason) == ({}, "max_tokens")  # pyright: ignore
    deltas = [
        event.delta for event in client.messages.create(**asked, stream=True) if event.type == "content_block_delta"
    ]
    assert "".join(delta.partial_json for delta in deltas) == '{"city": "Par'  # pyright: ignore


def test_half_a_surrogate_pair_in_arguments_is_replaced(scripted: ScriptedServer) -> None:
    scripted.answers(
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris \\ud83d", "days": 2}}</tool_call>'
    )
    client = anthropic.Anthropic(base_url=scripted.url, api_key="x", max_retries=0)
    (block,) = create(client, WEATHER, tools=TOOLS).content
    assert block.input == {"city": "Paris ?", "days": 2}  # pyright: ignore[reportAttributeAccessIssue]

"""The Responses API as OpenAI's client uses it: the same answers as chat completions, its events, stored responses."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from penstock.server import limits
from penstock.server.openai.responses_api.answer import ResponseAnswer
from penstock.server.openai.responses_api.protocol import ResponsesRequest
from penstock.server.openai.responses_api.store import ResponseStore, StoredResponse
from penstock.server.openai.responses_api.translate import to_chat, to_messages
from penstock.tokenizer import chat_template
from tests.integration.scripted_server import ScriptedServer, Setup, scripted_server
from tests.integration.server_process import ServerProcess, serve
from tests.integration.test_server_openai import call

SUM = "What is 2 + 3?"
WEATHER = "What's the weather in Paris?"
TOOLS: Any = [
    {
        "type": "function",
        "name": "get_weather",
        "description": "Get the weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    }
]


@pytest.fixture(scope="module")
def real() -> Iterator[ServerProcess]:
    with serve("--max-model-len", "1024", "--served-model-name", "demo") as server:
        yield server
        assert server.terminate() == 0
        assert not [line for line in server.log if "Traceback" in line]


@pytest.fixture(scope="module")
def client(real: ServerProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{real.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def scripted() -> Iterator[ScriptedServer]:
    with scripted_server(Setup(api_key=("one", "two"))) as server:
        yield server


def keyed(server: ScriptedServer, key: str = "one") -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=30)


def chat(client: OpenAI, messages: Any, **fields: Any) -> Any:
    return client.chat.completions.create(model="demo", messages=messages, **fields)


# ---- On the built-in model ----


def test_the_answer_equals_that_of_a_chat_completion(client: OpenAI) -> None:
    response = client.responses.create(model="demo", input=SUM)
    completion = chat(client, [{"role": "user", "content": SUM}])
    assert response.output_text == completion.choices[0].message.content == "2 + 3 = 5."
    assert (response.object, response.status, response.error) == ("response", "completed", None)
    assert response.usage is not None
    assert response.usage.input_tokens == completion.usage.prompt_tokens
    assert response.usage.output_tokens == completion.usage.completion_tokens
    long = client.responses.create(model="demo", input="Tell me a story.", max_output_tokens=6, temperature=1.0)
    assert (long.status, long.usage.output_tokens) == ("incomplete", 6)  # pyright: ignore[reportOptionalMemberAccess]
    assert long.incomplete_details is not None
    assert long.incomplete_details.reason == "max_output_tokens"
    assert long.output[0].status == "incomplete"  # pyright: ignore[reportAttributeAccessIssue]


def test_instructions_and_roles_are_turns(client: OpenAI) -> None:
    given: Any = [
        {"role": "developer", "content": [{"type": "input_text", "text": each} for each in ("Be ", "kind.")]},
        {"role": "user", "content": "Hi"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hello"}]},
        {"role": "user", "content": SUM},
    ]
    response = client.responses.create(model="demo", input=given, instructions="Be brief.")
    same = [
        {"role": "system", "content": "Be brief.\n\nBe kind."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": SUM},
    ]
    assert response.usage is not None
    assert response.usage.input_tokens == chat(client, same).usage.prompt_tokens
    assert response.instructions == "Be brief."


def test_events_of_a_text(client: OpenAI) -> None:
    events = list(client.responses.create(model="demo", input="What are you?", max_output_tokens=5, stream=True))
    kinds = [event.type for event in events]
    # Tokens that a busy server has ready at once come together.
    num_deltas = kinds.count("response.output_text.delta")
    assert 1 <= num_deltas <= 5
    assert kinds == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        *["response.output_text.delta"] * num_deltas, "response.output_text.done", "response.content_part.done",
        "response.output_item.done", "response.incomplete",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    response: Any = events[-1]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert response.response.output_text == text
    whole = client.responses.create(model="demo", input="What are you?", max_output_tokens=5)
    assert (text, response.response.usage) == (whole.output_text, whole.usage)


def test_the_client_s_stream_helper(client: OpenAI) -> None:
    with client.responses.stream(model="demo", input=WEATHER, tools=TOOLS) as stream:
        final = stream.get_final_response()
    (item,) = final.output
    assert (item.type, item.name, item.arguments) == ("function_call", "get_weather", '{"city": "Paris"}')  # pyright: ignore


def test_a_call_and_its_result(client: OpenAI) -> None:
    asked = client.responses.create(model="demo", input=WEATHER, tools=TOOLS)
    (item,) = asked.output
    assert item.type == "function_call"
    assert json.loads(item.arguments) == {"city": "Paris"}
    result: Any = {"type": "function_call_output", "call_id": item.call_id, "output": '{"sky": "sunny"}'}
    kept = client.responses.create(model="demo", input=[result], previous_response_id=asked.id, tools=TOOLS)
    items: Any = [{"role": "user", "content": WEATHER}, item.model_dump(exclude_none=True), result]
    sent = client.responses.create(model="demo", input=items, tools=TOOLS)
    assert kept.usage is not None
    assert sent.usage is not None
    assert kept.usage.input_tokens == sent.usage.input_tokens
    assert kept.output_text == sent.output_text
    turns = [
        {"role": "user", "content": WEATHER},
        {
            "role": "assistant",
            "tool_calls": [
                {"id": "x", "type": "function", "function": {"name": item.name, "arguments": item.arguments}}
            ],
        },
        {"role": "tool", "tool_call_id": "x", "content": result["output"]},
    ]
    tools = [{"type": "function", "function": {k: v for k, v in TOOLS[0].items() if k != "type"}}]
    assert chat(client, turns, tools=tools).usage.prompt_tokens == sent.usage.input_tokens


@pytest.mark.spread(1)
@pytest.mark.parametrize("stream", [False, True])
def test_the_output_follows_a_schema(client: OpenAI, stream: bool) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    text: Any = {"format": {"type": "json_schema", "name": "person", "schema": schema, "strict": True}}
    answer: Any = client.responses.create(model="demo", input="Ada is 36.", text=text, stream=stream)
    response = list(answer)[-1].response if stream else answer
    assert set(json.loads(response.output_text)) == {"name", "age"}
    assert response.text.format.type == "json_schema"
    free: Any = {"format": {"type": "json_object"}}
    assert client.responses.create(model="demo", input="JSON!", text=free, max_output_tokens=8).output_text[0] == "{"


@pytest.mark.long
def test_allowed_tools(client: OpenAI) -> None:
    other = {**TOOLS[0], "name": "get_time"}
    choice: Any = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_time"}]}
    response = client.responses.create(model="demo", input=WEATHER, tools=[*TOOLS, other], tool_choice=choice)
    assert [item.name for item in response.output] == ["get_time"]  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(openai.BadRequestError, match="which is not in tools"):
        client.responses.create(model="demo", input=WEATHER, tools=TOOLS, tool_choice=choice)


@pytest.mark.long
def test_fields_of_vllm_are_passed_on(client: OpenAI) -> None:
    one = client.responses.create(model="demo", input="Story.", extra_body={"seed": 3, "top_k": 5}, temperature=1.0)
    two = client.responses.create(model="demo", input="Story.", extra_body={"seed": 3, "top_k": 5}, temperature=1.0)
    assert one.output_text == two.output_text
    with pytest.raises(openai.BadRequestError, match="top_k"):
        client.responses.create(model="demo", input="Story.", extra_body={"top_k": -7})


BAD: list[tuple[dict[str, Any], str]] = [
    ({"input": []}, "input"),
    ({"input": [{"type": "web_search_call"}]}, "must be a message"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input_image"),
    ({"input": [{"role": "tool", "content": "x"}]}, "role"),
    ({"tools": [{"type": "web_search"}]}, "only tools of type function"),
    ({"background": True}, "background"),
    ({"truncation": "auto"}, "truncation"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"no_such_field": 1}, "no_such_field is not a field"),
    ({"temprature": 1}, "did you mean temperature?"),
    ({"top_logprobs": 3}, "top_logprobs is not supported here"),
    ({"input": [{"role": "user", "content": "x", "mood": "glad"}]}, "mood is not a field"),
    ({"include": ["message.output_text.logprobs"]}, "include"),
    ({"instructions": "\ud800"}, "Unicode"),
    ({"user": "\ud800"}, "user"),
    ({"metadata": {"a": "\ud800"}}, "metadata"),
    ({"text": {"verbosity": "\ud800"}}, "verbosity"),
    ({"tools": [{"type": "function", "name": "f", "parameters": {"a": "\ud800"}}], "tool_choice": "none"}, "Unicode"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "strin"}}}}, "strin"),
    ({"tools": [{"type": "function", "name": "f", "description": "\ud800"}], "tool_choice": "none"}, "Unicode"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {}, "description": "\ud800"}}}, "description"),
    ({"tool_choice": "required"}, "tool_choice needs tools"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "exactly one"),
]


@pytest.mark.parametrize(("fields", "message"), BAD, ids=lambda value: value if isinstance(value, str) else "")
def test_invalid_requests_are_refused(real: ServerProcess, fields: dict[str, Any], message: str) -> None:
    status, answer = call(f"{real.url}/v1/responses", {"input": SUM, **fields})
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error"), answer
    assert message in answer["error"]["message"]


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("max_output_tokens", {"max_output_tokens": 99999}),
        ("text.format", {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "strin"}}}}),
    ],
)
def test_errors_name_the_field_of_this_api(real: ServerProcess, field: str, fields: dict[str, Any]) -> None:
    status, answer = call(f"{real.url}/v1/responses", {"input": SUM, **fields})
    assert (status, answer["error"]["param"]) == (400, field), answer
    assert answer["error"]["message"].startswith(field)


def test_fields_of_other_clients_are_accepted(real: ServerProcess) -> None:
    neutral = {"prompt": None, "conversation": None, "top_logprobs": 0, "request_id": None, "mm_processor_kwargs": {}}
    neutral |= {"prompt_cache_options": {"ttl": "30m"}, "service_tier": "auto"}
    part = {"type": "input_text", "text": "What is 2+3?", "annotations": [], "prompt_cache_breakpoint": {}}
    given = [{"type": "message", "role": "user", "content": [part], "id": "msg_1", "status": "completed"}]
    status, answer = call(f"{real.url}/v1/responses", {"input": given, "max_output_tokens": 1, **neutral})
    assert status == 200, answer


def test_an_unknown_model(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(model="gpt", input=SUM)
    assert caught.value.code == "model_not_found"


# ---- Stored responses ----


def test_a_stored_response_is_visible_only_to_its_key(scripted: ScriptedServer) -> None:
    scripted.answers("Five.")
    one, two = keyed(scripted), keyed(scripted, "two")
    response = one.responses.create(model="demo", input=SUM, metadata={"a": "b"})
    assert one.responses.retrieve(response.id) == response
    for refused in (
        lambda: two.responses.retrieve(response.id),
        lambda: two.responses.delete(response.id),
        lambda: two.responses.create(model="demo", input=SUM, previous_response_id=response.id),
    ):
        with pytest.raises(openai.NotFoundError):
            refused()
    one.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError) as caught:
        one.responses.retrieve(response.id)
    assert caught.value.code == "previous_response_not_found"


def test_parameters_for_a_stored_response_are_not_ignored(scripted: ScriptedServer) -> None:
    scripted.answers("Five.")
    client = keyed(scripted)
    response = client.responses.create(model="demo", input=SUM)
    assert client.responses.retrieve(response.id, stream=False) == response
    with pytest.raises(openai.BadRequestError, match="a stored response is not streamed"):
        client.responses.retrieve(response.id, stream=True)
    with pytest.raises(openai.BadRequestError, match="strem is not a field"):
        client.responses.retrieve(response.id, extra_query={"strem": 1})


def test_paths_of_openai_that_are_not_here(scripted: ScriptedServer) -> None:
    client = keyed(scripted)
    with pytest.raises(openai.NotFoundError, match="use /v1/responses with the items"):
        client.responses.compact(model="demo", input=SUM)
    with pytest.raises(openai.NotFoundError, match="use /tokenize"):
        client.responses.input_tokens.count(model="demo", input=SUM)


def test_a_conversation_is_continued_without_its_instructions(scripted: ScriptedServer) -> None:
    scripted.answers("Five.")
    client = keyed(scripted)
    first = client.responses.create(model="demo", input=SUM, instructions="Be brief.")
    events = client.responses.create(model="demo", input="Sure?", previous_response_id=first.id, stream=True)
    last: Any = list(events)[-1]
    assert last.response.previous_response_id == first.id
    prompt = scripted.llm.prompts[-1]
    assert prompt == (
        "<|im_start|>user\nWhat is 2 + 3?<|im_end|>\n<|im_start|>assistant\nFive.<|im_end|>\n"
        "<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
    )
    third = client.responses.create(model="demo", input="Why?", previous_response_id=last.response.id)
    assert scripted.llm.prompts[-1].startswith(prompt + "Five.<|im_end|>\n")
    client.responses.delete(first.id)
    client.responses.create(model="demo", input="Why?", previous_response_id=third.id)


def test_responses_with_store_false_are_not_stored(scripted: ScriptedServer) -> None:
    scripted.answers("Five.")
    client = keyed(scripted)
    before = len(scripted.service.stored_responses)
    response = client.responses.create(model="demo", input=SUM, store=False)
    assert response.model_extra is not None
    assert response.model_extra["store"] is False
    scripted.answers("Fi", error="the engine broke")
    list(client.responses.create(model="demo", input=SUM, stream=True))
    assert len(scripted.service.stored_responses) == before
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_an_error_in_a_stream_is_a_failed_response(scripted: ScriptedServer) -> None:
    scripted.answers("Fi", error="the engine broke")
    events: Any = list(keyed(scripted).responses.create(model="demo", input=SUM, stream=True))
    assert [event.type for event in events][-1] == "response.failed"
    failed = events[-1].response
    assert (failed.status, failed.error.code, failed.error.message) == ("failed", "server_error", "the engine broke")
    with pytest.raises(openai.InternalServerError, match="the engine broke"):
        keyed(scripted).responses.create(model="demo", input=SUM)


def test_items_of_one_answer_are_the_turn_of_the_stored_response(scripted: ScriptedServer) -> None:
    """Also if there is text between its calls."""
    call = '<tool_call>{"name": "get_weather", "arguments": {"city": "%s"}}</tool_call>'
    scripted.answers(f"One moment.{call % 'Paris'}And the other one.{call % 'Rome'}")
    client = keyed(scripted)
    first = client.responses.create(model="demo", input=WEATHER, tools=TOOLS)
    assert [item.type for item in first.output] == ["message", "function_call"] * 2
    results: Any = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "sunny"}
        for item in first.output
        if item.type == "function_call"
    ]
    client.responses.create(model="demo", input=results, previous_response_id=first.id, tools=TOOLS)
    items: Any = [{"role": "user", "content": WEATHER}, *first.output, *results]
    client.responses.create(model="demo", input=items, tools=TOOLS)
    assert scripted.llm.prompts[-1] == scripted.llm.prompts[-2]
    assert scripted.llm.prompts[-1].count("<|im_start|>assistant") == 2


def test_only_the_last_item_of_a_stream_is_cut_off() -> None:
    with scripted_server(Setup(reasoning_parser="qwen3")) as server:
        server.answers("<think>\nHm.\n</think>\n\nHello wor", step=100, finish_reason="length")
        events: Any = list(keyed(server).responses.create(model="demo", input=SUM, stream=True))
    done = [(event.item.type, event.item.status) for event in events if event.type == "response.output_item.done"]
    assert done == [("reasoning", "completed"), ("message", "incomplete")]
    assert done == [(item.type, item.status) for item in events[-1].response.output]


def test_schemas_of_tools_are_not_copied() -> None:
    """A copy of large schemas takes seconds, in which the server answers nobody else."""
    body = ResponsesRequest.model_validate({"input": "x", "tools": [{**TOOLS[0], "parameters": {"a": [{}]}}]})
    (given,), (tool,) = body.tools or [], to_chat(body, to_messages(body.input)).tools or []
    assert given.parameters is not None
    assert tool.function.parameters is not None
    assert tool.function.parameters["a"] is given.parameters["a"]


def test_long_arguments_are_parsed_beside_the_event_loop(
    scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    parse, loops = chat_template._plain_call, list[Any]()  # pyright: ignore[reportPrivateUsage]

    def parse_and_note(call: Any) -> Any:
        loops.append(asyncio._get_running_loop())
        return parse(call)

    monkeypatch.setattr(chat_template, "_plain_call", parse_and_note)
    scripted.answers("Five.")
    arguments = json.dumps({"city": "x" * 5000})
    made: Any = {"type": "function_call", "call_id": "a", "name": "get_weather", "arguments": arguments}
    keyed(scripted).responses.create(model="demo", input=[made, {"role": "user", "content": SUM}])
    assert loops == [None]
    assert json.dumps({"city": "x" * 100})[:-2] in scripted.llm.prompts[-1]


def test_the_reasoning_of_a_long_answer_is_counted_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    count, loops = ResponseAnswer._usage, list[Any]()  # pyright: ignore[reportPrivateUsage]

    def count_and_note(self: ResponseAnswer) -> Any:
        loops.append(asyncio._get_running_loop())
        return count(self)

    monkeypatch.setattr(ResponseAnswer, "_usage", count_and_note)
    with scripted_server(Setup(reasoning_parser="qwen3")) as server:
        server.answers("<think>" + "Two and three. " * 500 + "</think>Five.", step=1000)
        whole = keyed(server).responses.create(model="demo", input=SUM)
        *_, last = keyed(server).responses.create(model="demo", input=SUM, stream=True)
    assert loops == [None, None]
    assert last.response.usage == whole.usage  # pyright: ignore[reportAttributeAccessIssue]


def test_more_calls_than_a_turn_may_have_are_several_turns(scripted: ScriptedServer) -> None:
    scripted.answers("Five.")
    made = {"type": "function_call", "name": "get_weather", "arguments": "{}"}
    calls: Any = [{**made, "call_id": f"{number}"} for number in range(limits.MAX_TOOLS + 2)]
    keyed(scripted).responses.create(model="demo", input=[*calls, {"role": "user", "content": SUM}])
    *turns, _ = scripted.llm.prompts[-1].split("<|im_start|>assistant\n")[1:]
    assert [turn.count("get_weather") for turn in turns] == [limits.MAX_TOOLS, 2]


def stored(name: str, size: int = 1) -> StoredResponse:
    return StoredResponse({"id": name}, [{"role": "user", "content": "x" * size}])


def test_the_store_is_bounded_in_number_and_size() -> None:
    store = ResponseStore(max_responses=3, max_bytes=1000)
    for name in "abcd":
        store.add(None, stored(name))
        assert store.get(None, "b") is not None or name == "a"
    assert [store.get(None, name) is not None for name in "abcd"] == [False, True, True, True]
    store.add(None, stored("e", 600))
    store.add(None, stored("f", 600))
    assert [store.get(None, name) is not None for name in "bcdef"] == [False, False, False, False, True]
    store.add(None, stored("too large", 1000))
    assert store.get(None, "too large") is None
    assert len(store) == 1
    assert store.remove(None, "f")
    assert not store.remove(None, "f")
    store.add(b"key", stored("g", 900))
    assert store.get(None, "g") is None
    assert store.get(b"key", "g") is not None


def test_a_response_that_is_stored_again_takes_its_place_once() -> None:
    """A stream that is continued where it began has the id of its beginning."""
    store = ResponseStore(max_responses=3, max_bytes=1000)
    for _ in range(10):
        store.add(None, stored("a", 600))
    store.add(None, stored("b", 200))
    assert [store.get(None, name) is not None for name in "ab"] == [True, True]
    assert len(store) == 2


def test_the_size_of_the_store_is_that_of_its_memory() -> None:
    """Lists in JSON take 3 bytes and in memory more than 50."""
    store = ResponseStore()
    tracemalloc.start()
    try:
        store.add(None, StoredResponse({"id": "a", "tools": [[] for _ in range(50_000)]}, []))
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used < 300_000
    found = store.get(None, "a")
    assert found is not None
    assert found.body["tools"] == [[]] * 50_000

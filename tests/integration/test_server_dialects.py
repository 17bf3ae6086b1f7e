"""Tests the fields, legacy fields and common mistakes of other clients against a running server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from tests.integration.raw_http import Answer, Stream, call
from tests.integration.server_process import ServerProcess, serve
from tests.integration.test_server_openai import SUM, WEATHER, WEATHER_TOOL

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
STORY = "Once upon a time, there was"
FUNCTION = WEATHER_TOOL["function"]
IM_START, IM_END = 1, 2


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serve() as server:
        yield server
        assert not [line for line in server.log if "Traceback" in line]


def complete(server: ServerProcess, **fields: Any) -> dict[str, Any]:
    """Returns the choice of a completion that must succeed."""
    body = {"prompt": STORY, "max_tokens": 6, "temperature": 0, "return_token_ids": True, **fields}
    answer = call(server.url, "POST", COMPLETIONS, body)
    assert answer.status == 200, answer.body
    return answer.json()["choices"][0]


def chat(server: ServerProcess, **fields: Any) -> dict[str, Any]:
    answer = call(server.url, "POST", CHAT, {"messages": SUM, "max_tokens": 40, "temperature": 0, **fields})
    assert answer.status == 200, answer.body
    return answer.json()["choices"][0]


def refused(answer: Answer, status: int = 400) -> tuple[str | None, str]:
    assert answer.status == status, answer.body
    return answer.error["param"], answer.error["message"]


def prompt_ids(server: ServerProcess, text: str = STORY) -> list[int]:
    return call(server.url, "POST", "/tokenize", {"prompt": text}).json()["tokens"]


# ---- Supported fields ----


def test_prompts_are_truncated(server: ServerProcess) -> None:
    whole = prompt_ids(server)
    for given in (STORY, whole):
        assert complete(server, prompt=given, truncate_prompt_tokens=3)["prompt_token_ids"] == whole[-3:]
        right = {"truncate_prompt_tokens": 3, "truncation_side": "right"}
        assert complete(server, prompt=given, **right)["prompt_token_ids"] == whole[:3]
        assert complete(server, prompt=given, truncate_prompt_tokens=100)["prompt_token_ids"] == whole
    assert complete(server, truncate_prompt_tokens=3, echo=True)["text"].startswith(", there was")
    many = complete(server, prompt=[STORY, "Hello"], truncate_prompt_tokens=2)
    assert many["prompt_token_ids"] == whole[-2:]
    body = {"messages": SUM, "max_tokens": 1, "truncate_prompt_tokens": 4, "return_token_ids": True}
    assert len(call(server.url, "POST", CHAT, body).json()["prompt_token_ids"]) == 4


def test_a_prompt_far_beyond_the_context_can_be_truncated(server: ServerProcess) -> None:
    text = "the fox and the crow " * 100_000
    found = complete(server, prompt=text, truncate_prompt_tokens=50)["prompt_token_ids"]
    assert found == prompt_ids(server, text[-2000:])[-50:]
    room = complete(server, prompt=text, truncate_prompt_tokens=-1, max_tokens=40)["prompt_token_ids"]
    assert len(room) == 2048 - 40
    for wrong in (0, 2048, -2):
        body = {"prompt": "a", "max_tokens": 1, "truncate_prompt_tokens": wrong}
        assert refused(call(server.url, "POST", COMPLETIONS, body))[0] == "truncate_prompt_tokens"


def test_tokens_are_named_by_their_ids(server: ServerProcess) -> None:
    named = {"logprobs": 2, "return_tokens_as_token_ids": True, "max_tokens": 3}
    choice = complete(server, **named, echo=True)
    ids = [f"token_id:{token}" for token in (*choice["prompt_token_ids"], *choice["token_ids"])]
    assert choice["logprobs"]["tokens"] == ids
    assert all(name.startswith("token_id:") for row in choice["logprobs"]["top_logprobs"][1:] for name in row)
    plain = complete(server, logprobs=2, max_tokens=3, echo=True)
    assert plain["logprobs"]["text_offset"] == choice["logprobs"]["text_offset"]
    content = chat(server, logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True)["logprobs"]["content"]
    assert all(entry["token"].startswith("token_id:") for entry in content)
    assert b"".join(bytes(entry["bytes"]) for entry in content) == b"2 + 3 = 5."


def test_special_tokens_can_be_part_of_the_text(server: ServerProcess) -> None:
    both = {"allowed_token_ids": [IM_START], "max_tokens": 3, "skip_special_tokens": False}
    for spaces in (True, False):
        text = complete(server, **both, spaces_between_special_tokens=spaces)["text"]
        assert text == "<|im_start|>" * 3


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    ("guided", "text"),
    [
        ({"guided_regex": "[0-9]{3}"}, None),
        ({"guided_choice": ["maybe", "never"]}, None),
        ({"guided_json": {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}}, None),
        ({"guided_json": '{"const": "x"}'}, '"x"'),
        ({"guided_grammar": 'start: "yes" | "no"'}, None),
        ({"guided_json_object": True}, None),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_guided_fields_constrain_the_answer_like_structured_outputs(
    server: ServerProcess, guided: Any, text: Any
) -> None:
    ((name, value),) = guided.items()
    new = complete(server, max_tokens=40, structured_outputs={name.removeprefix("guided_"): value})["text"]
    assert complete(server, max_tokens=40, **guided)["text"] == new
    assert text is None or new == text
    assert chat(server, **guided)["message"]["content"]
    both = {"prompt": "a", "response_format": {"type": "json_object"}, **guided}
    assert "exclude each other" in refused(call(server.url, "POST", COMPLETIONS, both))[1]


def test_errors_name_the_field_that_the_client_used(server: ServerProcess) -> None:
    wrong = {"type": "nonsense"}
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": wrong}}
    cases: list[tuple[str, Any]] = [
        ("guided_json", wrong), ("guided_json", "{"), ("guided_regex", "("), ("guided_grammar", "start: nothing"),
        ("guided_choice", []), ("response_format", schema), ("structured_outputs", {"json": wrong}),
        ("structured_outputs", {"json": "{"}), ("structured_outputs", {"regex": "("}), ("structured_outputs", {}),
    ]  # fmt: skip
    for field, value in cases:
        for path, base in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": SUM})):
            param, message = refused(call(server.url, "POST", path, {**base, field: value}))
            assert param == field, (field, value, message)
    tools = [{"type": "function", "function": {"name": "f", "parameters": wrong}}]
    body = {"messages": SUM, "tools": tools, "tool_choice": "required"}
    assert refused(call(server.url, "POST", CHAT, body))[0] == "tools"


def test_legacy_functions_give_function_calls(server: ServerProcess) -> None:
    forced = {"messages": WEATHER, "functions": [FUNCTION], "function_call": {"name": FUNCTION["name"]}}
    choice = chat(server, **forced)
    assert choice["finish_reason"] == "function_call"
    called = choice["message"]["function_call"]
    assert called["name"] == FUNCTION["name"]
    assert "tool_calls" not in choice["message"]
    stream = Stream(server.url, CHAT, {**forced, "stream": True, "temperature": 0, "max_tokens": 40})
    stream.begin()
    deltas = [event["choices"][0] for event in stream.events() if event != "[DONE]"]
    stream.close()
    pieces = [delta["delta"]["function_call"] for delta in deltas if "function_call" in delta["delta"]]
    assert pieces[0]["name"] == FUNCTION["name"]
    assert "".join(piece["arguments"] for piece in pieces) == called["arguments"]
    assert deltas[-1]["finish_reason"] == "function_call"
    turns = [
        *WEATHER,
        {"role": "assistant", "content": None, "function_call": called},
        {"role": "function", "name": FUNCTION["name"], "content": '{"temperature": 20}'},
    ]
    older = call(server.url, "POST", "/tokenize", {"messages": turns}).json()["tokens"]
    newer = [
        *WEATHER,
        {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": called}]},
        {"role": "tool", "tool_call_id": "1", "content": '{"temperature": 20}'},
    ]
    assert older == call(server.url, "POST", "/tokenize", {"messages": newer}).json()["tokens"]
    assert (
        chat(server, messages=WEATHER, functions=[FUNCTION], function_call="none")["finish_reason"] != "function_call"
    )


def test_stop_strings_can_be_kept(server: ServerProcess) -> None:
    cut = complete(server, stop=" a", max_tokens=20)["text"]
    assert not cut.endswith(" a")
    assert complete(server, stop=" a", max_tokens=20, no_stop_trim=True)["text"] == f"{cut} a"


def test_completions_accept_max_completion_tokens(server: ServerProcess) -> None:
    assert len(complete(server, max_tokens=None, max_completion_tokens=3)["token_ids"]) == 3


# ---- Roles, parts and fields of messages ----


def test_roles_and_fields_of_messages(server: ServerProcess) -> None:
    def tokens(*messages: dict[str, Any]) -> Answer:
        return call(server.url, "POST", "/tokenize", {"messages": list(messages)})

    plain = tokens({"role": "system", "content": "a"}, {"role": "user", "content": "b"}).json()["tokens"]
    part = {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}
    extra = {"cache_control": {}, "annotations": [], "refusal": None, "audio": None, "function_call": None}
    same = tokens({"role": "developer", "content": "a", **extra}, {"role": "user", "content": [part]})
    assert same.json()["tokens"] == plain
    for wrong, words in (
        ({"role": "wizard", "content": "a"}, "messages.0.role: 'wizard' is not a role"),
        ({"role": "userr", "content": "a"}, "did you mean 'user'?"),
        ({"role": "user", "content": "a", "contents": "b"}, "messages.0.contents is not a field of a message"),
        ({"role": "assistant", "content": "a", "prefix": True}, "continue_final_message"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "takes text only"),
    ):
        param, message = refused(tokens(wrong))
        assert param == "messages"
        assert words in message


# ---- Common mistakes ----


def test_a_body_without_a_content_type_is_json(server: ServerProcess) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    for kind in ("", "application/x-www-form-urlencoded"):
        assert call(server.url, "POST", COMPLETIONS, body, {"Content-Type": kind}).status == 200
    form = call(server.url, "POST", COMPLETIONS, b"prompt=a", {"Content-Type": "application/x-www-form-urlencoded"})
    assert "not JSON" in refused(form)[1]


def test_errors_for_wrong_paths_name_the_right_path(server: ServerProcess) -> None:
    for path, words in (
        ("/chat/completions", "but /v1/chat/completions: end the client's base URL in /v1"),
        ("/models", "/v1/models"),
        ("/models/demo", "/v1/models/demo"),
        ("/responses/resp_1", "/v1/responses/resp_1"),
        ("/v1/v1/chat/completions", "but /v1/chat/completions: the client's base URL has a /v1 too many"),
        ("/v1/v1/v1/health", "use /health"),
        ("/api/chat", "use /v1/chat/completions"),
        ("/generate", "use /v1/completions"),
        ("/nothing", "/docs lists all paths"),
    ):
        _, message = refused(call(server.url, "POST", path, {}), 404)
        assert words in message, message
        assert path in message
        # Behind a router, clients must not be sent to an instance.
        assert "127.0.0.1" not in message
    assert len(refused(call(server.url, "GET", "/" + "x" * 5000), 404)[1]) < 500


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [("GET", CHAT, "POST"), ("POST", "/v1/models", "GET"), ("PUT", "/v1/responses/resp_1", "DELETE or GET")],
)
def test_an_error_for_a_wrong_method_names_the_right_ones(
    server: ServerProcess, method: str, path: str, allowed: str
) -> None:
    answer = call(server.url, method, path, b"{}")
    assert refused(answer, 405)[1] == f"{method} is not allowed on {path}: use {allowed}"
    assert answer.headers["allow"] == allowed.replace(" or ", ", ")


def test_lists_that_are_too_long(server: ServerProcess) -> None:
    for prompts in (["a"] * 257, [[1]] * 257):
        answer = call(server.url, "POST", COMPLETIONS, {"prompt": prompts})
        assert refused(answer) == ("prompt", "prompt: at most 256 items are allowed")


def test_more_tokens_than_the_context_has_are_refused(server: ServerProcess) -> None:
    num_prompt = len(prompt_ids(server))
    room = 2048 - num_prompt
    for path, base in ((COMPLETIONS, {"prompt": STORY}), (CHAT, {"messages": SUM})):
        for field in ("max_tokens", "max_completion_tokens"):
            answer = call(server.url, "POST", path, {**base, field: 2048})
            param, message = refused(answer)
            assert (param, answer.error["code"]) == (field, "context_length_exceeded")
            assert message.startswith(f"{field}=2048 is too large: max_model_len=2048 leaves")
    assert refused(call(server.url, "POST", COMPLETIONS, {"prompt": STORY, "max_tokens": room + 1}))[0] == "max_tokens"
    assert complete(server, prompt=STORY, max_tokens=room, stop=" ")["finish_reason"] == "stop"
    # An omitted limit means as many tokens as fit, and the default of completions may exceed that.
    assert complete(server, prompt=[5] * 2045, max_tokens=None)["finish_reason"] in ("length", "stop")
    without = call(server.url, "POST", COMPLETIONS, {"prompt": [5] * 2045, "ignore_eos": True})
    assert without.json()["usage"]["completion_tokens"] == 3


def test_the_end_of_sequence_token_is_not_part_of_the_logprobs(server: ServerProcess) -> None:
    def tokens(**fields: Any) -> list[str]:
        choice = chat(server, logprobs=True, **fields)
        assert choice["finish_reason"] == "stop"
        return [entry["token"] for entry in choice["logprobs"]["content"]]

    whole = tokens()
    assert "".join(whole) == "2 + 3 = 5."
    assert tokens(include_stop_str_in_output=True) == [*whole, "<|im_end|>"]
    assert tokens(stop_token_ids=[IM_END], ignore_eos=True) == whole
    stream = Stream(server.url, CHAT, {"messages": SUM, "temperature": 0, "logprobs": True, "stream": True})
    stream.begin()
    rows = [event["choices"][0]["logprobs"] for event in stream.events() if event != "[DONE]"]
    stream.close()
    assert [entry["token"] for row in rows for entry in (row or {}).get("content", ())] == whole


@pytest.mark.long
def test_unknown_fields_can_be_ignored() -> None:
    with serve("--ignore-unknown-fields") as server:
        body = {"prompt": STORY, "max_tokens": 2, "some_field": 1, "new\r\nline": 2, "x" * 1000: 3}
        answer = call(server.url, "POST", COMPLETIONS, body)
        assert answer.status == 200
        assert answer.headers["x-ignored-fields"] == f"some_field, new__line, {'x' * 64}"
        assert "x-ignored-fields" not in call(server.url, "POST", COMPLETIONS, {"prompt": "a"}).headers
        assert refused(call(server.url, "POST", COMPLETIONS, {"prompt": "a", "suffix": "b"}))[0] == "suffix"
        turn = {"messages": [{"role": "user", "content": "hi", "mood": "glad"}], "max_tokens": 1}
        for path in (CHAT, "/v1/messages"):
            assert call(server.url, "POST", path, turn).headers["x-ignored-fields"] == "mood"
        for path, field in (("/v1/responses", "input"), ("/tokenize", "prompt")):
            answer = call(server.url, "POST", path, {field: "hi", "unheard_of": 1})
            assert (answer.status, answer.headers["x-ignored-fields"]) == (200, "unheard_of")
        with OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            stream = client.completions.create(model="demo", prompt="a", stream=True, extra_body={"unheard_of": 1})
            assert stream.response.headers["x-ignored-fields"] == "unheard_of"
            assert list(stream)

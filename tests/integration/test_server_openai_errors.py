"""Every mistake of a client gets a 4xx answer in the format of the OpenAI API, with an explanation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI
from pydantic import ValidationError

from penstock.messages.sampling_params import MAX_COUNT, MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_N, MAX_STOP_STRINGS
from penstock.server import limits
from penstock.server.anthropic.protocol import MessagesRequest
from penstock.server.openai.protocol import ChatCompletionRequest, RequestBody
from penstock.server.openai.responses_api.protocol import ResponsesRequest
from tests.integration import raw_http
from tests.integration.server_process import serve
from tests.integration.test_server_openai import SUM, WEATHER_TOOL, call

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MAX_MODEL_LEN, MAX_BODY_BYTES = 256, 1 << 20
HALF = "\ud800"
LONG_NAME = "x" * (limits.MAX_NAME_CHARACTERS + 1)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serve("--max-model-len", str(MAX_MODEL_LEN), "--max-body-bytes", str(MAX_BODY_BYTES)) as server:
        yield server.url
        assert call(f"{server.url}/health")[0] == 200
        assert server.terminate() == 0
        # Mistakes of clients are not logged as failures.
        assert not [line for line in server.log if "Traceback" in line or "failed" in line]


def refused(status: int, answer: Any, wanted: int = 400) -> dict[str, Any]:
    """Returns the error of an answer that must be one."""
    assert status == wanted, answer
    assert answer.keys() == {"error"}
    error = answer["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"] == ("invalid_request_error" if wanted != 404 else "not_found_error")
    return error


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


SHARED_FIELDS: list[tuple[str, Any]] = [
    ("temperature", -0.1), ("temperature", 101), ("temperature", True), ("temperature", "hot"),
    ("temperature", float("nan")), ("temperature", float("inf")), ("top_p", 0), ("top_p", 1.1), ("top_k", -2),
    ("top_k", 1.5), ("min_p", -0.1), ("min_p", 1.1), ("presence_penalty", 2.1), ("presence_penalty", -2.1),
    ("frequency_penalty", 2.1), ("frequency_penalty", -2.1), ("repetition_penalty", 0), ("repetition_penalty", 101),
    ("n", 0), ("n", MAX_N + 1), ("n", "2"), ("seed", 2**63), ("seed", -(2**63) - 1), ("seed", 10**400), ("seed", 1.0),
    ("stop", ""), ("stop", 5), ("stop", ["a"] * (MAX_STOP_STRINGS + 1)), ("stop", [""]), ("stop", [HALF]),
    ("stop", HALF), ("stop", "x" * (limits.MAX_STOP_CHARACTERS + 1)), ("logit_bias", {"1": 101}),
    ("logit_bias", {"a": 1}), ("logit_bias", {"-1": 1}), ("logit_bias", {"99999": 1}),
    ("logit_bias", {"9" * 30: 1}), ("logit_bias", {HALF: 1}),
    ("logit_bias", {"1": float("nan")}), ("logit_bias", {str(i): 1 for i in range(MAX_LOGIT_BIAS + 1)}),
    ("min_tokens", -1), ("min_tokens", 2), ("ignore_eos", 1), ("stop_token_ids", [-1]), ("stop_token_ids", [99999]),
    ("stop_token_ids", [1] * (limits.MAX_TOKEN_LIST + 1)), ("stop_token_ids", [2**70]), ("allowed_token_ids", []),
    ("allowed_token_ids", [99999]), ("bad_words", [""]), ("bad_words", ["a"] * (limits.MAX_BAD_WORDS + 1)),
    ("bad_words", [HALF]), ("bad_words", "a"), ("bad_words", ["x" * (limits.MAX_BAD_WORD_CHARACTERS + 1)]),
    ("cache_salt", ""), ("cache_salt", LONG_NAME), ("cache_salt", HALF),
    ("priority", MAX_COUNT + 1), ("priority", "high"), ("prompt_logprobs", MAX_LOGPROBS + 1), ("prompt_logprobs", -1),
    ("user", HALF), ("user", 5), ("stream", "yes"), ("stream_options", {"include_usages": True}),
    ("stream_options", []), ("response_format", {"type": "xml"}), ("max_tokens", MAX_COUNT + 1),
    ("max_tokens", -1), ("max_tokens", 1.0), ("model", HALF), ("model", LONG_NAME), ("no_such_field", 1),
]  # fmt: skip

COMPLETION_FIELDS: list[tuple[str, Any]] = [
    ("max_tokens", 0), ("logprobs", MAX_LOGPROBS + 1), ("logprobs", True), ("best_of", 2), ("suffix", "x"),
    ("prompt", ""), ("prompt", None), ("prompt", []), ("prompt", [[]]), ("prompt", ["a", ""]), ("prompt", [1, "a"]),
    ("prompt", [["a"]]), ("prompt", {}), ("prompt", [True]), ("prompt", [1.5]), ("prompt", [-1]), ("prompt", [2**40]),
    ("prompt", HALF), ("prompt", ["a", HALF]), ("prompt", ["a"] * (limits.MAX_PROMPTS + 1)), ("prompt", "x " * 300),
]  # fmt: skip


def user(**fields: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "hi", **fields}]


def tool(**fields: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", **fields}}]


CHAT_FIELDS: list[tuple[str, Any]] = [
    ("max_tokens", 0), ("max_completion_tokens", 0), ("logprobs", 3), ("top_logprobs", 2), ("top_logprobs", -1),
    ("top_logprobs", MAX_LOGPROBS + 1), ("messages", []), ("messages", None), ("messages", "hi"), ("messages", [5]),
    ("messages", [{}]), ("messages", [{"role": "user"}]), ("messages", user(role="")), ("messages", user(role=HALF)),
    ("messages", user(role=LONG_NAME)), ("messages", user(content=5)), ("messages", user(content=HALF)),
    ("messages", user(content=[{"type": "image_url", "image_url": {"url": "http://x"}}])),
    ("messages", user(content=[{"type": "text", "text": HALF}])),
    ("messages", user(content=[{"type": "text", "text": "x"}] * (limits.MAX_CONTENT_PARTS + 1))),
    ("messages", user(tool_calls=[{"function": {"name": HALF}}])), ("messages", user(tool_calls=[{}])),
    ("messages", user(tool_calls=[{"function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}])),
    ("messages", user(tool_calls=[{"function": {"name": "f", "arguments": {"a": HALF}}}])),
    ("messages", user(function_call={"name": "f"}, tool_calls=5)),
    ("messages", user(function_call={"name": "f"}, tool_calls=[{"function": 5}])),
    ("messages", user(function_call={"name": "f"}, tool_calls={"function": {"name": "f"}})),
    ("messages", user() * (limits.MAX_MESSAGES + 1)), ("messages", user(content="x " * 300)),
    ("tools", tool(name="")), ("tools", tool(name="a b")), ("tools", tool(name=HALF)),
    ("tools", tool(description=HALF)), ("tools", tool(parameters={"a": HALF})),
    ("tools", tool(parameters={HALF: 1})), ("tools", tool(parameters=5)),
    ("tools", tool(parameters={"a": "x" * limits.MAX_TOOL_SCHEMA_BYTES})), ("tools", tool() * (limits.MAX_TOOLS + 1)),
    ("tool_choice", "auto"), ("tool_choice", "perhaps"), ("tool_choice", {"function": {"name": "f"}}),
    ("chat_template_kwargs", {HALF: 1}), ("chat_template_kwargs", {"messages": 1}), ("chat_template_kwargs", []),
    ("chat_template_kwargs", {str(i): 1 for i in range(limits.MAX_TEMPLATE_VARIABLES + 1)}),
    ("continue_final_message", True),
]  # fmt: skip

# These fields may be checked under another name, which the message explains.
OTHER_NAMES = {
    "prompt": {"prompt", "prompt_token_ids"},
    "messages": {"messages", "prompt"},
    "tools": {"tools", "prompt"},
}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_every_limit_is_enforced_and_named(url: str, path: str) -> None:
    base: dict[str, Any] = {"prompt": "hi"} if path == COMPLETIONS else {"messages": user()}
    for field, value in SHARED_FIELDS + (COMPLETION_FIELDS if path == COMPLETIONS else CHAT_FIELDS):
        if path == CHAT and field == "max_tokens" and value == 0:
            continue
        error = refused(*call(url + path, {**base, "max_tokens": 1, field: value}))
        assert error["param"] in OTHER_NAMES.get(field, {field}), (field, value, error)
        words = re.split(r"[^a-z_]+", error["message"])
        assert error["param"] in words or field in ("prompt", "messages", "tools"), (field, value, error)


def test_limits_that_concern_several_fields(url: str) -> None:
    one_too_many = {"prompt": ["a"] * 25, "n": 41, "temperature": 1, "max_tokens": 1}
    error = refused(*call(url + COMPLETIONS, one_too_many))
    assert error["param"] == "n"
    assert "25 prompts times n=41 exceed 1024 completions" in error["message"]
    status, answer = call(url + COMPLETIONS, {**one_too_many, "prompt": ["a"] * 16, "n": 64})
    assert status == 200
    assert [choice["index"] for choice in answer["choices"]] == list(range(1024))
    # The engine has a copy of such lists for every completion.
    repeated = {**one_too_many, "prompt": ["a"] * 16, "n": 64, "kv_transfer_params": {"a": [0] * 20_000}}
    error = refused(*call(url + COMPLETIONS, repeated))
    assert error["param"] == "n"
    assert "16 prompts times n=64 repeat" in error["message"]
    assert call(url + COMPLETIONS, {**repeated, "prompt": "a", "n": 2})[0] == 200
    assert refused(*call(url + COMPLETIONS, {"prompt": "a", "prompt_token_ids": [1]}))["param"] == "prompt_token_ids"
    assert refused(*call(url + COMPLETIONS, {"prompt": [MAX_MODEL_LEN] * MAX_MODEL_LEN}))["param"] == "prompt"
    chosen = {"messages": SUM, "tools": [WEATHER_TOOL], "tool_choice": {"function": {"name": "other"}}}
    assert "other" in refused(*call(url + CHAT, chosen))["message"]
    begun = [*SUM, {"role": "assistant", "content": "It"}]
    both = {"messages": begun, "continue_final_message": True, "add_generation_prompt": True}
    assert refused(*call(url + CHAT, both))["param"] == "continue_final_message"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"prompt"',
        b'{"prompt": "a",}',
        b'{"prompt": "\xff"}',
        nested(10**5),
        b'{"prompt": 1e999}',
        b'{"prompt": "a", "seed": 1%s}' % (b"0" * 5000),
        b'{"prompt": %s}' % nested(900),
        b'{"prompt": "a", "structured_outputs": {"\\ud800": 1}}',
        b'{"prompt": "a", "logit_bias": {"\\udc00": "x"}}',
    ],
    ids=lambda body: f"{body[:16]!r}",
)
def test_bodies_that_are_not_requests(url: str, body: bytes) -> None:
    for path in (COMPLETIONS, CHAT, "/tokenize", "/detokenize"):
        refused(*call(url + path, body))


@pytest.mark.parametrize("rank", ["9" * 4301, "-1", "0x1", "\xb2", ""])
def test_a_rank_that_is_no_number(url: str, rank: str) -> None:
    answer = raw_http.call(url, "POST", COMPLETIONS, {"prompt": "a"}, {"X-data-parallel-rank": rank})
    assert (answer.status, answer.error["param"]) == (400, "data_parallel_rank")
    assert len(answer.error["message"]) < 200


def test_deeply_nested_json_is_not_a_failure(url: str) -> None:
    """In fields of any type, any depth of JSON gives an answer or a client error, never a failure."""
    for depth in (50, 400, 900, 10**5):
        deep = nested(depth)
        for body in (
            b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "metadata": %s}' % deep,
            b'{"messages": [{"role": "user", "content": "hi", "x": %s}], "max_tokens": 1}' % deep,
            b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "chat_template_kwargs": {"x": %s}}'
            % deep,
            b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "tools": [{"type": "function", '
            b'"function": {"name": "f", "parameters": {"x": %s}}}]}' % deep,
            b'{"messages": [{"role": "user", "content": "hi", "tool_calls": [{"function": {"name": "f", "arguments": '
            b'{"x": %s}}}]}], "max_tokens": 1}' % deep,
        ):
            status, answer = call(url + CHAT, body)
            assert status == 200 or refused(status, answer)


def test_json_that_is_too_deep_to_be_written_again_is_not_a_failure(url: str) -> None:
    """Where it is nested almost as deeply as can be read, writing it fails, which needs as much of the stack."""
    for depth in range(940, 970):
        for path, body in (
            ("/v1/responses", b'{"input": "hi", "max_output_tokens": 1, "tools": [{"type": "function", "name": "f", '
             b'"parameters": {"x": %s}}]}'),
            ("/v1/messages", b'{"max_tokens": 1, "messages": [{"role": "assistant", "content": [{"type": "tool_use", '
             b'"id": "a", "name": "f", "input": {"x": %s}}]}, {"role": "user", "content": "hi"}]}'),
        ):  # fmt: skip
            assert call(url + path, body % nested(depth))[0] in (200, 400), depth


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        (b'{"prompt": "a"}', "text/plain", "Content-Type: application/json"),
        (b"[]", "application/json", "a JSON object"),
        (b'{"prompt": "\xff"}', "application/json", "UTF-8"),
        (b'{"prompt": "a", "seed": 1%s}' % (b"0" * 5000), "application/json", "4300 digits"),
        (nested(10**5), "application/json", "not deeply nested"),
    ],
)
def test_the_message_says_how_to_send_a_body(url: str, body: bytes, kind: str, message: str) -> None:
    assert message in refused(*call(url + COMPLETIONS, body, kind=kind))["message"]


def test_other_invalid_requests(url: str) -> None:
    request = {"prompt": "hi", "max_tokens": 1}
    refused(*call(url + COMPLETIONS, request, kind="text/plain"))
    refused(*call(url + COMPLETIONS, method="GET"), wanted=405)
    refused(*call(url + "/v1/models", b"", method="POST"), wanted=405)
    refused(*call(url + "/v1/engines"), wanted=404)
    assert refused(*call(url + "/v1/models/a/b"), wanted=404)["code"] == "model_not_found"
    refused(*call(url + COMPLETIONS, {**request, "user": "x" * MAX_BODY_BYTES}), wanted=413)
    for path in (COMPLETIONS, CHAT, "/tokenize", "/detokenize"):
        body = {"model": "gpt-4", "prompt": "x", "messages": SUM, "tokens": [1]}
        kept = {COMPLETIONS: ("prompt",), CHAT: ("messages",), "/tokenize": ("prompt",), "/detokenize": ("tokens",)}[
            path
        ]
        asked = {name: body[name] for name in ("model", *kept)}
        assert refused(*call(url + path, asked), wanted=404)["param"] == "model"


def test_invalid_requests_to_tokenize_and_detokenize(url: str) -> None:
    for body in (
        {},
        {"prompt": "a", "messages": SUM},
        {"prompt": HALF},
        {"messages": user(content=HALF)},
        {"messages": []},
    ):
        refused(*call(f"{url}/tokenize", body))
    for tokens in ([-1], [4096], [2**70], "a", None, [1.5], [True]):
        assert refused(*call(f"{url}/detokenize", {"tokens": tokens}))["param"] == "tokens"


def test_the_client_raises_the_matching_exception(url: str) -> None:
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.NotFoundError, match="gpt-4"):
            client.completions.create(model="gpt-4", prompt="x")
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as caught:
                client.completions.create(model="demo", prompt="x " * 300, stream=stream)
            assert (caught.value.param, caught.value.type) == ("prompt", "invalid_request_error")
            assert str(MAX_MODEL_LEN) in caught.value.message
        with pytest.raises(openai.BadRequestError, match="max_tokes is not a field"):
            client.chat.completions.create(model="demo", messages=SUM, extra_body={"max_tokes": 3})  # pyright: ignore
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.chat.completions.create(model="demo", messages=SUM, temperature=-1)  # pyright: ignore
        with pytest.raises(openai.BadRequestError):
            client.embeddings.create(model="demo", input="x")
        with pytest.raises(openai.APIStatusError) as too_large:
            client.completions.create(model="demo", prompt="x" * (MAX_BODY_BYTES + 1))
        assert too_large.value.status_code == 413


def test_more_prompts_than_the_queue_holds_are_a_bad_request() -> None:
    with serve("--max-num-queued-requests", "2", "--max-model-len", "64") as server:
        status, answer = call(server.url + COMPLETIONS, {"prompt": ["a"] * 3, "max_tokens": 1})
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
        with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            with pytest.raises(openai.BadRequestError, match="max_num_queued_requests=2"):
                client.completions.create(model="demo", prompt=["a"] * 3, max_tokens=1)
            assert call(f"{server.admin_url}/drain")[1]["num_unfinished"] == 0
            assert client.completions.create(model="demo", prompt=["a"] * 2, max_tokens=1).choices[1].index == 1


def test_the_message_names_the_intended_field(url: str) -> None:
    """If a field may have several types, the message explains the one that fits best."""
    cases = [
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content: Input should be"),
        ({"messages": [{"content": "hi"}]}, "messages.0.role: Field required"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "text": ""}]}]},
            "messages.0.content.0: this model",
        ),
        ({"messages": SUM, "stop": ["a", ""]}, "stop.1: String should have at least 1 character"),
    ]
    for body, message in cases:
        assert refused(*call(url + CHAT, body))["message"].startswith(message)
    too_long = refused(*call(url + COMPLETIONS, {"prompt": "hello " * 600}))
    assert too_long["code"] == "context_length_exceeded"


MANY = [0] * limits.MAX_CONTENT_PARTS
NAMES = {f"{LONG_NAME}{number}": None for number in range(10_000)}


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (ChatCompletionRequest, {"messages": [0] * 1000}),
        (ChatCompletionRequest, {"messages": user(content=MANY) * 100}),
        (ChatCompletionRequest, {"messages": [{"role": "assistant", "tool_calls": MANY[: limits.MAX_TOOLS]}] * 100}),
        (ChatCompletionRequest, {"messages": user(), "logit_bias": NAMES}),
        (ChatCompletionRequest, {"messages": user(), "chat_template_kwargs": NAMES}),
        (ChatCompletionRequest, {"messages": user(), "guided_choice": MANY}),
        (ChatCompletionRequest, {"messages": user(), "structured_outputs": {"choice": MANY}}),
        (ResponsesRequest, {"input": [0] * 1000}),
        (ResponsesRequest, {"input": user(content=MANY) * 100}),
        (ResponsesRequest, {"input": [{"type": "reasoning", "summary": MANY, "content": MANY}] * 100}),
        (ResponsesRequest, {"input": "x", "metadata": NAMES}),
        (MessagesRequest, {"max_tokens": 1, "messages": [0] * 1000}),
        (MessagesRequest, {"max_tokens": 1, "messages": user(content=MANY) * 100}),
        (MessagesRequest, {"max_tokens": 1, "messages": user(), "system": MANY}),
    ],
)
def test_only_the_first_of_many_errors_is_looked_for(kind: type[RequestBody], fields: dict[str, Any]) -> None:
    """Describing an error takes microseconds, and a body has room for millions of them."""
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(fields)
    assert caught.value.error_count() <= 4


@pytest.mark.parametrize(
    ("kind", "field", "part"),
    [(ChatCompletionRequest, "messages", "text"), (ResponsesRequest, "input", "input_text"),
     (MessagesRequest, "messages", "text")],
)  # fmt: skip
def test_all_parts_of_a_request_together_are_bounded(kind: type[RequestBody], field: str, part: str) -> None:
    """Validating a part takes microseconds, and a body has room for half a million of them."""
    other = {"max_tokens": 1} if kind is MessagesRequest else {}
    parts = [{"type": part, "text": "x"}] * limits.MAX_CONTENT_PARTS
    kind.model_validate({**other, field: user(content=parts) * 100})
    with pytest.raises(ValidationError, match=f"at most {limits.MAX_MESSAGE_VALUES} texts"):
        kind.model_validate({**other, field: user(content=parts) * 200})

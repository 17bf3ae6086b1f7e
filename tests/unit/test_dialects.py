"""The table of other clients' fields: it agrees with the requests, with the documentation, and with vLLM's defaults."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from penstock.messages.sampling_params import BOUNDS
from penstock.server import limits
from penstock.server.anthropic.protocol import Message, MessagesRequest, TextBlock, Tool
from penstock.server.openai import dialects, prompts
from penstock.server.openai.dialects import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    EARLIER_ANSWER_FIELDS,
    MESSAGE_FIELDS,
    MESSAGES_FIELDS,
    PART_FIELDS,
    REQUEST_FIELDS,
    RESPONSES_FIELDS,
    STRUCTURED_OUTPUTS_FIELDS,
    TOKENIZE_FIELDS,
    TOOL_FIELDS,
    DialectField,
    Effect,
)
from penstock.server.openai.protocol import (
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    ContentPart,
    StructuredOutputs,
    TokenizeRequest,
)
from penstock.server.openai.responses_api.protocol import InputMessage, ResponsesRequest
from penstock.utils.errors import RequestError

DOCUMENT = Path(__file__).parents[2] / "docs" / "SERVING.md"
TABLES: dict[str, tuple[DialectField, ...]] = {
    "of a request": REQUEST_FIELDS,
    "of `/v1/completions`": COMPLETION_FIELDS,
    "of `/v1/chat/completions`": CHAT_FIELDS,
    "of a message": MESSAGE_FIELDS,
    "of a content part": PART_FIELDS,
    "of `structured_outputs`": STRUCTURED_OUTPUTS_FIELDS,
    "of `/tokenize`": TOKENIZE_FIELDS,
    "of `/v1/responses`": RESPONSES_FIELDS,
    "of `/v1/messages`": MESSAGES_FIELDS,
    "of a tool in `/v1/messages`": TOOL_FIELDS,
    "of a message, item or block in these two": EARLIER_ANSWER_FIELDS,
}
OWNERS = {
    "of a request": (ChatCompletionRequest, CompletionRequest),
    "of `/v1/completions`": (CompletionRequest,),
    "of `/v1/chat/completions`": (ChatCompletionRequest,),
    "of a message": (ChatMessage,),
    "of a content part": (ContentPart,),
    "of `structured_outputs`": (StructuredOutputs,),
    "of `/tokenize`": (TokenizeRequest,),
    "of `/v1/responses`": (ResponsesRequest,),
    "of `/v1/messages`": (MessagesRequest,),
    "of a tool in `/v1/messages`": (Tool,),
    "of a message, item or block in these two": (Message, TextBlock, InputMessage),
}
ROWS = [(place, row) for place, rows in TABLES.items() for row in rows]
MESSAGES = [{"role": "user", "content": "hi"}]

# The defaults of vLLM's request models: some clients send all of them.
VLLM_DEFAULTS: dict[str, Any] = {
    "frequency_penalty": 0.0, "presence_penalty": 0.0, "logit_bias": None, "n": 1, "seed": None, "stop": [],
    "stream": False, "stream_options": None, "temperature": None, "top_p": None, "user": None, "use_beam_search": False,
    "top_k": None, "min_p": None, "repetition_penalty": None, "watermarking": True, "length_penalty": 1.0,
    "stop_token_ids": [], "include_stop_str_in_output": False, "ignore_eos": False, "min_tokens": 0,
    "skip_special_tokens": True, "spaces_between_special_tokens": True, "truncate_prompt_tokens": None,
    "truncation_side": None, "allowed_token_ids": None, "prompt_logprobs": None, "logprob_token_ids": None,
    "bad_words": [], "response_format": None, "structured_outputs": None, "priority": 0, "session_id": None,
    "return_tokens_as_token_ids": None, "return_token_ids": None, "routed_experts_prompt_start": 0,
    "return_token_offsets": False, "cache_salt": None, "kv_transfer_params": None, "ec_transfer_params": None,
    "vllm_xargs": None, "repetition_detection": None, "thinking_token_budget": None, "stream_interval": None,
    "guided_json": None, "guided_regex": None, "guided_choice": None, "guided_grammar": None, "structural_tag": None,
    "guided_decoding_backend": None, "guided_whitespace_pattern": None, "logits_processors": None, "request_id": None,
}  # fmt: skip
OF_COMPLETIONS: dict[str, Any] = {
    "echo": False, "logprobs": None, "suffix": None, "max_tokens": 16, "best_of": None, "prompt_embeds": None,
    "add_special_tokens": True,
}  # fmt: skip
OF_CHAT: dict[str, Any] = {
    "logprobs": False, "top_logprobs": 0, "max_tokens": None, "max_completion_tokens": None, "tools": None,
    "tool_choice": None, "reasoning_effort": None, "include_reasoning": True, "parallel_tool_calls": True,
    "echo": False, "add_generation_prompt": True, "continue_final_message": False, "add_special_tokens": False,
    "documents": None, "chat_template": None, "chat_template_kwargs": None, "media_io_kwargs": None,
    "mm_processor_kwargs": None, "return_prompt_text": None,
}  # fmt: skip


def parse(kind: type[Any], fields: dict[str, Any]) -> Any:
    """Makes a request from JSON as the routes do. Raises RequestError for fields that the table refuses."""
    base = {"messages": MESSAGES} if kind is ChatCompletionRequest else {"prompt": "hi"}
    try:
        return kind.model_validate({**base, **fields})
    except ValidationError as error:
        for each in error.errors():
            own = each.get("ctx", {}).get("error")
            if isinstance(own, RequestError):
                raise own from None
        raise


def example(row: DialectField) -> Any:
    """Returns a value that is not neutral."""
    return next(value for value in ("x", 17) if value not in row.neutral)


@pytest.mark.parametrize(("place", "row"), ROWS, ids=lambda value: getattr(value, "name", value))
def test_exactly_the_implemented_fields_are_declared(place: str, row: DialectField) -> None:
    declared = {field.alias or name for owner in OWNERS[place] for name, field in owner.model_fields.items()}
    # Blocks and items are told apart by their `type`.
    assert (row.name in declared - {"type"}) == (row.effect is Effect.DONE)


@pytest.mark.parametrize("kind", [ChatCompletionRequest, CompletionRequest])
def test_every_row_has_its_stated_effect(kind: type[Any]) -> None:
    for row in kind.dialect:
        if row.effect is Effect.DONE:
            continue
        for value in (None, *row.neutral):
            assert not hasattr(parse(kind, {row.name: value}), row.name)
        if row.effect is Effect.INERT:
            parse(kind, {row.name: {"any": ["thing"]}})
            continue
        with pytest.raises(RequestError, match=rf"^{row.name} ") as caught:
            parse(kind, {row.name: example(row)})
        assert caught.value.field == row.name
        assert row.note in str(caught.value)


def test_long_names_are_neither_compared_nor_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "z" * 10**5
    compared: list[str] = []
    for module, function in ((dialects, "nearest"), (prompts, "did_you_mean")):
        monkeypatch.setattr(module, function, lambda name, _: compared.append(name) or "")
    with pytest.raises(RequestError) as unknown:
        parse(CompletionRequest, {name: 1})
    message = ChatMessage.model_validate({"role": "user", "content": "hi", name: 1})
    with pytest.raises(RequestError) as unknown_in_message:
        prompts.check_messages([message], "{{ messages }}")
    assert compared == [name[: limits.MAX_NAME_CHARACTERS]] * 2
    assert all(len(str(each.value)) < 400 for each in (unknown, unknown_in_message))
    assert unknown.value.field == compared[0]


def test_a_template_is_searched_once_for_each_name(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[str] = []
    search = re.search
    monkeypatch.setattr(prompts.re, "search", lambda pattern, text: searched.append(pattern) or search(pattern, text))
    fields = dict.fromkeys(("if", "for", "end"), 1)
    messages = [ChatMessage.model_validate({"role": "user", "content": "hi", **fields})] * 100
    prompts.check_messages(messages, "if for end")
    assert len(searched) == len(fields)


@pytest.mark.parametrize("kind", [ChatCompletionRequest, CompletionRequest])
def test_allowed_tokens_may_be_a_whole_vocabulary_and_no_more(kind: type[Any]) -> None:
    allowed = list(range(limits.MAX_ALLOWED_TOKENS))
    assert parse(kind, {"allowed_token_ids": allowed}).allowed_token_ids == allowed
    with pytest.raises(ValidationError, match="at most 524288 items"):
        parse(kind, {"allowed_token_ids": [*allowed, 0]})


def test_no_name_is_in_two_rows() -> None:
    for rows in TABLES.values():
        names = [row.name for row in rows]
        assert len(names) == len(set(names))


def test_the_defaults_of_vllm_are_accepted() -> None:
    parse(CompletionRequest, {**VLLM_DEFAULTS, **OF_COMPLETIONS})
    parse(ChatCompletionRequest, {**VLLM_DEFAULTS, **OF_CHAT})
    StructuredOutputs.model_validate(
        {
            "json": None, "regex": "a", "choice": None, "grammar": None, "json_object": None, "structural_tag": None,
            "disable_fallback": False, "disable_any_whitespace": False, "disable_additional_properties": False,
            "whitespace_pattern": None,
        }
    )  # fmt: skip


# The fields that vllm-router 0.1.17 adds to a client's request, including the parameters of the transfer.
FROM_ROUTER: dict[str, Any] = {
    "model": "demo", "max_tokens": 1, "min_tokens": 1, "stream": False, "no_stop_trim": False, "ignore_eos": False,
    "skip_special_tokens": True, "return_hidden_states": False,
    "kv_transfer_params": {
        "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
        "remote_host": None, "remote_port": None,
    },
}  # fmt: skip
FROM_ROUTER_CHAT: dict[str, Any] = {
    "max_completion_tokens": 1, "logprobs": False, "continue_final_message": False, "separate_reasoning": True,
    "stream_reasoning": True, "include_reasoning": True,
}  # fmt: skip


def test_requests_of_vllm_router_are_accepted() -> None:
    for body in (
        parse(CompletionRequest, {**FROM_ROUTER, "echo": False}),
        parse(ChatCompletionRequest, {**FROM_ROUTER, **FROM_ROUTER_CHAT}),
    ):
        assert body.kv_transfer_params == FROM_ROUTER["kv_transfer_params"]


@pytest.mark.parametrize(
    ("kind", "base"),
    [
        (ResponsesRequest, {"input": "hi"}),
        (MessagesRequest, {"messages": MESSAGES, "max_tokens": 3}),
        (TokenizeRequest, {"prompt": "hi"}),
    ],
)
def test_every_route_has_a_table_and_can_ignore_unknown_fields(kind: type[Any], base: dict[str, Any]) -> None:
    def parse_fields(**fields: Any) -> Any:
        try:
            return kind.model_validate({**base, **fields})
        except ValidationError as error:
            raise next(each["ctx"]["error"] for each in error.errors() if "ctx" in each) from None

    for row in kind.dialect:
        parse_fields(**{row.name: {"any": ["thing"]} if row.effect is Effect.INERT else None})
        if row.effect is Effect.REFUSED:
            with pytest.raises(RequestError, match=rf"^{row.name} ") as caught:
                parse_fields(**{row.name: example(row)})
            assert caught.value.field == row.name
    near = {"ResponsesRequest": "temprature", "MessagesRequest": "temprature", "TokenizeRequest": "promt"}[
        kind.__name__
    ]
    with pytest.raises(RequestError, match=f"{near} is not a field of this request; did you mean"):
        parse_fields(**{near: 1})
    ignored: list[str] = []
    token = dialects.ignored_fields.set(ignored)
    try:
        parse_fields(unheard_of=1)
        assert ignored == ["unheard_of"]
    finally:
        dialects.ignored_fields.reset(token)


def test_fields_of_another_route_are_refused() -> None:
    for name, value in (
        ("functions", []),
        ("documents", []),
        ("include_reasoning", False),
        ("reasoning_effort", "low"),
    ):
        with pytest.raises(RequestError, match=f"^{name} is not supported by this route"):
            parse(CompletionRequest, {name: value})
    parse(CompletionRequest, {"functions": None, "include_reasoning": True})


@pytest.mark.parametrize(
    ("kind", "name", "hint"),
    [
        (CompletionRequest, "messages", "use `/v1/chat/completions`"),
        (ChatCompletionRequest, "prompt", "use `/v1/completions`"),
        (ChatCompletionRequest, "input", "use `/v1/responses`"),
        (ChatCompletionRequest, "max_output_tokens", "use `max_tokens`"),
        # The nearest names are of refused fields, of fields without effect, or not near enough.
        (ChatCompletionRequest, "moderation", None),
        (ChatCompletionRequest, "imagess", None),
        (ChatCompletionRequest, "metdata", None),
        (ResponsesRequest, "moderation", None),
        (ResponsesRequest, "service_teir", None),
    ],
)
def test_only_fields_with_an_effect_are_suggested(kind: type[BaseModel], name: str, hint: str | None) -> None:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate({**REQUESTS[kind], name: "x"})
    message = str(caught.value.errors()[0].get("ctx", {})["error"])
    assert message == f"{name} is not a field of this request" + ("" if hint is None else f": {hint}")


def test_unknown_fields_are_refused_unless_the_server_ignores_them() -> None:
    with pytest.raises(RequestError, match=r"max_tokes is not a field of this request; did you mean max_tokens\?"):
        parse(CompletionRequest, {"max_tokes": 3})
    ignored: list[str] = []
    token = dialects.ignored_fields.set(ignored)
    try:
        parse(CompletionRequest, {"max_tokes": 3, "stream_options": {"x": 1}})
        with pytest.raises(RequestError, match="suffix"):
            parse(CompletionRequest, {"suffix": "x"})
        assert sorted(ignored) == ["max_tokes", "x"]
        parse(CompletionRequest, {f"field_{i}": 1 for i in range(100)})
        assert len(ignored) == dialects.MAX_IGNORED_FIELDS
    finally:
        dialects.ignored_fields.reset(token)


def test_only_text_parts_of_a_message_are_accepted() -> None:
    def content(*parts: Any) -> Any:
        return (
            parse(ChatCompletionRequest, {"messages": [{"role": "user", "content": list(parts)}]}).messages[0].content
        )

    cached = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}, "prompt_cache_breakpoint": {}}
    assert [part.text for part in content(cached, "b", {"type": "input_text", "text": "c"}, {"text": "d"})] == [*"abcd"]
    for kind in ("image_url", "input_image", "input_audio", "video_url", "file"):
        with pytest.raises(RequestError, match=f"takes text only, and this part is of type '{kind}'"):
            content({"type": "text", "text": "a"}, {"type": kind, kind: {}})
    with pytest.raises(RequestError, match=r"texts is not a field.*did you mean text"):
        content({"type": "text", "text": "a", "texts": "b"})


def test_legacy_forms_of_tools() -> None:
    function = {"name": "f", "parameters": {"type": "object"}}
    body = parse(ChatCompletionRequest, {"functions": [function], "function_call": {"name": "f"}})
    assert [tool.function.name for tool in body.tools] == ["f"]
    assert body.tool_choice.function.name == "f"
    assert parse(ChatCompletionRequest, {"functions": [function], "function_call": "none"}).tool_choice == "none"
    with pytest.raises(RequestError, match="tools and functions exclude each other"):
        parse(ChatCompletionRequest, {"functions": [function], "tools": [{"type": "function", "function": function}]})
    called = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
    message = parse(ChatCompletionRequest, {"messages": [*MESSAGES, called]}).messages[1]
    assert message.tool_calls[0].function.name == "f"


def _lines(rows: Sequence[DialectField]) -> list[str]:
    """Returns the lines of a table of the document: fields with the same effect and note share a line."""
    groups: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        passing = ", ".join(f"`{json.dumps(value)}`" for value in row.neutral)
        note = f"{row.note} ({passing} passes)" if passing and row.effect is Effect.REFUSED else row.note
        groups.setdefault((row.effect.value, note), []).append(f"`{row.name}`")
    return [f"| {', '.join(names)} | {effect} | {note} |" for (effect, note), names in groups.items()]


def test_the_document_shows_the_tables() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    section = text.split("## Fields of other clients")[1].split("\n## ")[0]
    shown = [line for line in section.splitlines() if line.startswith("| `")]
    assert shown == [line for rows in TABLES.values() for line in _lines(rows)]
    assert all(f"Fields {place}" in section for place in TABLES)


REQUESTS: dict[type[BaseModel], dict[str, Any]] = {
    CompletionRequest: {"prompt": "a"},
    ChatCompletionRequest: {"messages": [{"role": "user", "content": "a"}]},
    ResponsesRequest: {"input": "a"},
    MessagesRequest: {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
}


@pytest.mark.parametrize("request_type", REQUESTS)
def test_every_api_has_the_bounds_of_the_sampling_parameters(request_type: type[BaseModel]) -> None:
    least = REQUESTS[request_type]
    checked: set[str] = set()
    for name, field in request_type.model_fields.items():
        bound = BOUNDS.get({"max_output_tokens": "max_tokens", "max_completion_tokens": "max_tokens"}.get(name, name))
        # A completion without tokens may echo its prompt, and a chat completion's field of this name is a flag.
        is_other = (request_type, name) == (ChatCompletionRequest, "logprobs") or (
            request_type is CompletionRequest and "max_" in name
        )
        if bound is None or field.annotation is Any or is_other:
            continue
        checked.add(name)
        for value in (bound.high, bound.low + bound.excludes_low):
            assert getattr(request_type.model_validate({**least, name: value}), name) == value
        for value in (bound.low - 1, bound.high + 1):
            with pytest.raises(ValidationError):
                request_type.model_validate({**least, name: value})
    assert checked >= {"temperature", "top_p"}

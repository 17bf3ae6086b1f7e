"""Reasoning, text and tool calls of every family, in chat completions, responses and messages, streamed and not."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import anthropic
import pytest
from openai import OpenAI

from penstock.server.openai.tool_calls.registry import FORMATS
from tests.integration.scripted_server import ScriptedServer, Setup, scripted_server

Get = Callable[..., ScriptedServer]
QUESTION = "What is the weather in Paris?"
ASKED: list[Any] = [{"role": "user", "content": QUESTION}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
FUNCTION = {"name": "get_weather", "description": "Get the weather in a city.", "parameters": PARAMETERS}
TOOLS: Any = [{"type": "function", "function": FUNCTION}]
CALL = ("get_weather", {"city": "Paris", "days": 2})
ANSWERS = {
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n2\n"
    "</parameter>\n</function>\n</tool_call>",
    "llama3_json": '{"name": "get_weather", "parameters": {"city": "Paris", "days": 2}}',
    "mistral": '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}]',
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    '{"city": "Paris", "days": 2}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
    '{"city": "Paris", "days": 2}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "pythonic": "[get_weather(city='Paris', days=2)]",
    "lfm2": "<|tool_call_start|>[get_weather(city='Paris', days=2)]<|tool_call_end|>",
    "glm45": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>2</arg_value>\n</tool_call>",
    "glm47": "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value><arg_key>days</arg_key>"
    "<arg_value>2</arg_value></tool_call>",
    "granite": '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}]',
    "phi4_mini_json": 'functools[{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}]',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    '{"city": "Paris", "days": 2}<|tool_call_end|><|tool_calls_section_end|>',
    "openai": "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    '{"city": "Paris", "days": 2}<|call|>',
}
# Families whose calls may follow text.
MIXED = sorted(set(ANSWERS) - {"llama3_json", "pythonic"})
THOUGHT = "<think>\nI need the\nweather.\n</think>\n\n"
REASONING = "I need the\nweather."

# The parts of an answer, in order: ("reasoning", text), ("text", text) and ("call", name, arguments).
Blocks = list[tuple[Any, ...]]


@pytest.fixture(scope="module")
def get() -> Iterator[Get]:
    """Returns the server of a setup, which is started once."""
    with ExitStack() as stack:
        servers: dict[Setup, ScriptedServer] = {}

        def start(**fields: Any) -> ScriptedServer:
            setup = Setup(**fields)
            if setup not in servers:
                servers[setup] = stack.enter_context(scripted_server(setup))
            return servers[setup]

        yield start
    assert not [each for each in threading.enumerate() if "uvicorn" in each.name]


def openai_client(server: ScriptedServer, key: str = "none") -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=30)


def anthropic_client(server: ScriptedServer, key: str = "none") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0, timeout=30)


# ---- The blocks of an answer in each API ----


def chat(server: ScriptedServer, **fields: Any) -> tuple[Blocks, str]:
    """Returns the blocks, which must be equal when streamed, and the finish reason. Chat does not order the blocks."""
    with openai_client(server) as client:
        wanted = {"model": "demo", "messages": ASKED, "tools": TOOLS, **fields}
        (choice,) = client.chat.completions.create(**wanted).choices
        message: Any = choice.message
        whole = {"reasoning": "", "content": message.content or "", "calls": []}
        if server.service.reasoning.is_none:
            assert not hasattr(message, "reasoning_content")
        else:
            assert message.reasoning_content == message.reasoning
            whole["reasoning"] = message.reasoning or ""
        whole["calls"] = [[call.function.name, call.function.arguments] for call in message.tool_calls or ()]
        streamed: dict[str, Any] = {"reasoning": "", "content": "", "calls": []}
        reason = None
        for chunk in client.chat.completions.create(**wanted, stream=True):
            delta: Any = chunk.choices[0].delta
            reason = chunk.choices[0].finish_reason
            streamed["reasoning"] += getattr(delta, "reasoning_content", None) or ""
            streamed["content"] += delta.content or ""
            for call in delta.tool_calls or ():
                if call.function.name:
                    streamed["calls"].append([call.function.name, ""])
                streamed["calls"][call.index][1] += call.function.arguments
    assert streamed == whole
    assert reason == choice.finish_reason
    blocks: Blocks = [
        (kind, whole[key]) for kind, key in (("reasoning", "reasoning"), ("text", "content")) if whole[key]
    ]
    return blocks + [("call", name, json.loads(text)) for name, text in whole["calls"]], choice.finish_reason


def _item(item: Any) -> tuple[Any, ...]:
    if item.type == "function_call":
        return ("call", item.name, json.loads(item.arguments))
    (part,) = item.content
    return ("reasoning" if item.type == "reasoning" else "text", part.text)


def respond(server: ScriptedServer, **fields: Any) -> tuple[Blocks, str]:
    with openai_client(server) as client:
        tools = [{"type": "function", **FUNCTION}]
        wanted = {"model": "demo", "input": QUESTION, "tools": tools, **fields}
        response = client.responses.create(**wanted)
        final: Any = None
        texts: dict[str, str] = {}
        done: dict[str, str] = {}
        for number, event in enumerate(client.responses.create(**wanted, stream=True)):
            assert event.sequence_number == number
            if event.type == "response.output_item.added":
                assert not getattr(event.item, "content", None)
                assert not getattr(event.item, "arguments", None)
            elif event.type == "response.content_part.added":
                assert event.part.text == ""
            if event.type.endswith(".delta"):
                texts[event.item_id] = texts.get(event.item_id, "") + event.delta
            elif event.type in ("response.output_text.done", "response.reasoning_text.done"):
                done[event.item_id] = event.text
            elif event.type == "response.function_call_arguments.done":
                done[event.item_id] = event.arguments
            elif event.type in ("response.completed", "response.incomplete"):
                final = event.response
        assert texts == {item: text for item, text in done.items() if text}
    blocks = [_item(item) for item in response.output]
    assert [_item(item) for item in final.output] == blocks
    assert list(done) == [item.id for item in final.output]
    assert (final.status, final.usage) == (response.status, response.usage)
    return blocks, response.status


def message(server: ScriptedServer, **fields: Any) -> tuple[Blocks, str]:
    def block(each: Any) -> tuple[Any, ...]:
        if each.type == "tool_use":
            return ("call", each.name, each.input)
        return ("reasoning", each.thinking) if each.type == "thinking" else ("text", each.text)

    with anthropic_client(server) as client:
        tools = [{"name": FUNCTION["name"], "description": "Get it.", "input_schema": PARAMETERS}]
        wanted = {"model": "demo", "max_tokens": 100, "messages": ASKED, "tools": tools, **fields}
        whole = client.messages.create(**wanted)
        with client.messages.stream(**wanted) as stream:
            final = stream.get_final_message()
    blocks = [block(each) for each in whole.content]
    assert [block(each) for each in final.content] == blocks
    assert (final.stop_reason, final.stop_sequence, final.usage) == (
        whole.stop_reason, whole.stop_sequence, whole.usage,
    )  # fmt: skip
    return blocks, whole.stop_reason or ""


APIS = {"chat": (chat, "tool_calls", "stop"), "responses": (respond, "completed", "completed")}
APIS["messages"] = (message, "tool_use", "end_turn")


def test_every_chunk_of_a_chat_says_something(get: Get) -> None:
    server = get(tool_call_parser="hermes")
    # Some models write the arguments as text; its closing quote, alone in a piece, adds nothing to them.
    arguments = json.dumps(json.dumps(CALL[1]))
    call = f'<tool_call>\n{{"name": "get_weather", "arguments": {arguments}}}\n</tool_call>'
    server.answers(f"Let me see.\n{call}\n{call}", step=1)
    assert chat(server) == ([("text", "Let me see."), ("call", *CALL), ("call", *CALL)], "tool_calls")
    with openai_client(server) as client:
        stream = client.chat.completions.create(model="demo", messages=ASKED, tools=TOOLS, stream=True)
        *chunks, last = [chunk.choices[0] for chunk in stream]
    for chunk in chunks:
        calls = chunk.delta.tool_calls or ()
        assert chunk.delta.content or any(each.id or (each.function and each.function.arguments) for each in calls)
    assert [call.index for chunk in chunks for call in chunk.delta.tool_calls or () if call.id] == [0, 1]
    assert last.finish_reason == "tool_calls"


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("family", sorted(FORMATS))
def test_a_call_of_every_family(get: Get, family: str, api: str) -> None:
    server = get(tool_call_parser=family)
    ask, called, _ = APIS[api]
    server.answers(ANSWERS[family])
    assert ask(server) == ([("call", *CALL)], called)
    if family in MIXED:
        server.answers(f"Let me see.\n{ANSWERS[family]}")
        assert ask(server) == ([("text", "Let me see."), ("call", *CALL)], called)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("family", sorted(FORMATS))
def test_a_function_that_was_not_offered_is_not_called(get: Get, family: str, api: str) -> None:
    server = get(tool_call_parser=family)
    ask, _, ended = APIS[api]
    text = ANSWERS[family].replace("get_weather", "get_time")
    server.answers(text)
    assert ask(server) == ([("text", text)], ended)


@pytest.mark.parametrize("family", sorted(FORMATS))
def test_tool_choice_none_leaves_tools_out_of_prompt_and_answer(get: Get, family: str) -> None:
    server = get(tool_call_parser=family)
    server.answers(ANSWERS[family])
    assert chat(server, tool_choice="none") == ([("text", ANSWERS[family])], "stop")
    assert "get_weather" not in server.llm.prompts[-1]
    assert respond(server, tool_choice="none") == ([("text", ANSWERS[family])], "completed")
    assert "get_weather" not in server.llm.prompts[-1]
    assert message(server, tool_choice={"type": "none"}) == ([("text", ANSWERS[family])], "end_turn")
    assert "get_weather" not in server.llm.prompts[-1]
    chat(server)
    assert "get_weather" in server.llm.prompts[-1]


@pytest.mark.parametrize("family", sorted(FORMATS))
@pytest.mark.parametrize("named", [False, True], ids=["required", "named"])
def test_a_forced_call_is_begun_in_the_prompt_and_follows_a_grammar(get: Get, family: str, named: bool) -> None:
    server = get(tool_call_parser=family)
    prefix = FORMATS[family]().forced_prefix("get_weather" if named else None)
    server.answers(ANSWERS[family].removeprefix(prefix))
    choice: Any = {"type": "function", "function": {"name": "get_weather"}} if named else "required"
    assert chat(server, tool_choice=choice) == ([("call", *CALL)], "tool_calls")
    assert server.llm.prompts[-1].endswith(prefix)
    assert server.llm.params[-1].structured_outputs is not None
    choice = {"type": "function", "name": "get_weather"} if named else "required"
    assert respond(server, tool_choice=choice) == ([("call", *CALL)], "completed")
    choice = {"type": "tool", "name": "get_weather"} if named else {"type": "any"}
    assert message(server, tool_choice=choice) == ([("call", *CALL)], "tool_use")


@pytest.mark.parametrize("api", APIS)
def test_at_most_one_call_if_requested(get: Get, api: str) -> None:
    server = get(tool_call_parser="hermes")
    ask, called, _ = APIS[api]
    server.answers(f"{ANSWERS['hermes']}\n{ANSWERS['hermes']}")
    assert ask(server) == ([("call", *CALL), ("call", *CALL)], called)
    one: Any = {"parallel_tool_calls": False}
    if api == "messages":
        one = {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
    assert ask(server, **one) == ([("call", *CALL)], called)


@pytest.mark.parametrize("api", ["responses", "messages"])
def test_text_between_calls_keeps_its_place(get: Get, api: str) -> None:
    server = get(tool_call_parser="hermes")
    server.answers(f"One.\n{ANSWERS['hermes']}\nTwo.\n{ANSWERS['hermes']}")
    texts = [("text", "One."), ("call", *CALL), ("text", "\nTwo."), ("call", *CALL)]
    assert APIS[api][0](server)[0] == texts


# ---- Reasoning ----


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("parser", ["qwen3", "deepseek_r1"])
@pytest.mark.parametrize("step", [1, 3, 1000])
def test_reasoning_is_separated_from_the_answer(get: Get, parser: str, api: str, step: int) -> None:
    server = get(reasoning_parser=parser)
    ask, called, ended = APIS[api]
    server.answers(THOUGHT + "Sunny.", step=step)
    assert ask(server) == ([("reasoning", REASONING), ("text", "Sunny.")], ended)
    server.answers(THOUGHT + ANSWERS["hermes"], step=step)
    assert ask(server) == ([("reasoning", REASONING), ("call", *CALL)], called)
    # A call within the reasoning is not a call.
    server.answers(f"<think>{ANSWERS['hermes']}</think>Sunny.", step=step)
    assert ask(server) == ([("reasoning", ANSWERS["hermes"]), ("text", "Sunny.")], ended)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("step", [1, 1000])
def test_messages_of_gpt_oss(get: Get, api: str, step: int) -> None:
    server = get(reasoning_parser="openai_gptoss", tool_call_parser="openai")
    ask, called, ended = APIS[api]
    thought = "<|channel|>analysis<|message|>I need the\nweather.<|end|><|start|>assistant"
    server.answers(f"{thought}<|channel|>final<|message|>Sunny.", step=step)
    assert ask(server) == ([("reasoning", REASONING), ("text", "Sunny.")], ended)
    server.answers(thought + ANSWERS["openai"], step=step)
    assert ask(server) == ([("reasoning", REASONING), ("call", *CALL)], called)
    preamble = "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant"
    server.answers(thought + preamble + ANSWERS["openai"], step=step)
    assert ask(server) == ([("reasoning", REASONING), ("text", "Let me see."), ("call", *CALL)], called)
    # Reasoning after content, which a chat completion does not order.
    again = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    server.answers(thought + preamble + again + ANSWERS["openai"], step=step)
    blocks: Blocks = [("reasoning", REASONING), ("text", "Let me see."), ("reasoning", "\n\nHm."), ("call", *CALL)]
    if api == "chat":
        blocks = [("reasoning", f"{REASONING}\n\nHm."), ("text", "Let me see."), ("call", *CALL)]
    assert ask(server) == (blocks, called)


@pytest.mark.parametrize("api", APIS)
def test_reasoning_that_is_cut_off(get: Get, api: str) -> None:
    server = get(reasoning_parser="qwen3")
    server.answers("<think>\nI need", finish_reason="length")
    reason = {"chat": "length", "responses": "incomplete", "messages": "max_tokens"}[api]
    assert APIS[api][0](server) == ([("reasoning", "I need")], reason)


def test_without_a_parser_reasoning_is_content(get: Get) -> None:
    server = get()
    server.answers(THOUGHT + "Sunny.")
    assert chat(server) == ([("text", THOUGHT + "Sunny.")], "stop")


def test_reasoning_can_be_left_out_or_left_in_the_content(get: Get) -> None:
    server = get(reasoning_parser="qwen3")
    server.answers(THOUGHT + "Sunny.")
    assert chat(server, extra_body={"include_reasoning": False}) == ([("text", "Sunny.")], "stop")
    assert chat(server, extra_body={"separate_reasoning": False}) == ([("text", THOUGHT + "Sunny.")], "stop")


def test_constraints_apply_after_the_reasoning(get: Get) -> None:
    server = get(reasoning_parser="qwen3")
    server.answers(THOUGHT + '{"a": 1}')
    schema = {"type": "object"}
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    assert chat(server, response_format=wanted)[0][1:] == [("text", '{"a": 1}')]
    outputs = server.llm.params[-1].structured_outputs
    assert outputs is not None
    assert outputs.reasoning == server.service.reasoning.grammar(server.service.reasoning.by_default)
    # A forced call is not begun in the prompt: the model may reason before it.
    server.answers(THOUGHT + ANSWERS["hermes"])
    assert chat(server, tool_choice="required") == ([("reasoning", REASONING), ("call", *CALL)], "tool_calls")
    assert "tool_call>" not in server.llm.prompts[-1].rpartition("assistant")[2]
    outputs = server.llm.params[-1].structured_outputs
    assert outputs is not None
    assert outputs.reasoning


def test_reasoning_is_passed_back_into_the_prompt(get: Get, tmp_path: Any) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((Setup().folder / name).read_bytes())
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}[{{ m.role }}|{{ m.reasoning_content or '' }}|{{ m.content }}"
        "|{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}]"
        "{% endfor %}{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}"
        "{% if add_generation_prompt %}<think>\n{% endif %}"
    )
    server = get(reasoning_parser="qwen3", tool_call_parser="hermes", folder=folder)
    server.answers("Hm.\n</think>\n\nSunny.")
    turn = {"role": "assistant", "content": "Rain?", "reasoning": "First."}
    assert chat(server, messages=[*ASKED, turn, *ASKED])[0] == [("reasoning", "Hm."), ("text", "Sunny.")]
    assert "[assistant|First.|Rain?|]" in server.llm.prompts[-1]
    for none in ({"arguments": ""}, {"arguments": None}, {}):
        called = {"id": "1", "type": "function", "function": {"name": "now", **none}}
        chat(server, messages=[*ASKED, {"role": "assistant", "content": "", "tool_calls": [called]}, *ASKED])
        assert "|now{}]" in server.llm.prompts[-1]
    with openai_client(server) as client:
        first = client.responses.create(model="demo", input=QUESTION)
        again = client.responses.create(model="demo", input=[*ASKED, *first.output, *ASKED])  # pyright: ignore
        kept = client.responses.create(model="demo", input=ASKED, previous_response_id=first.id)
        assert again.output_text == kept.output_text == "Sunny."
        client.responses.create(model="demo", input=QUESTION, reasoning={"effort": "none"})
    assert server.llm.prompts[-2] == server.llm.prompts[-3]
    assert "[assistant|Hm.|Sunny.|]" in server.llm.prompts[-2]
    assert "False" in server.llm.prompts[-1]
    with anthropic_client(server) as client:
        first = client.messages.create(model="demo", max_tokens=9, messages=ASKED)
        turns: Any = [*ASKED, {"role": "assistant", "content": first.content}, *ASKED]
        client.messages.create(model="demo", max_tokens=9, messages=turns, thinking={"type": "disabled"})
    assert "[assistant|Hm.|Sunny.|]" in server.llm.prompts[-1]
    assert "False" in server.llm.prompts[-1]

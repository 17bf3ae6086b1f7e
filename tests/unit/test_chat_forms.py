"""The form of an answer beside tools: which of them constrains it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.frontend.input_processor import InputProcessor
from penstock.messages.sampling_params import SamplingParams
from penstock.messages.structured_outputs import StructuredOutputsParams
from penstock.server.openai import conversation
from penstock.server.openai.protocol import ChatCompletionRequest
from penstock.server.openai.reasoning import Start
from penstock.server.openai.reasoning_formats import REASONING_FORMATS
from penstock.server.openai.tool_calls.hermes import HermesFormat
from penstock.server.openai.tool_calls.pythonic import PythonicFormat
from penstock.server.openai.tool_calls.tool_format import ToolCallFormat
from penstock.server.openai.tool_use import ToolUse
from penstock.utils.errors import RequestError

CHOICE = ["yes", "no"]
FORMS: list[dict[str, Any]] = [{"guided_choice": CHOICE}, {"structured_outputs": {"choice": CHOICE}}]


def form_of(tool_format: type[ToolCallFormat] = HermesFormat, **fields: Any) -> StructuredOutputsParams | None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    message = {"role": "user", "content": "x"}
    body = ChatCompletionRequest.model_validate({"messages": [message], "tools": [tool], **fields})
    service: Any = SimpleNamespace(reasoning=REASONING_FORMATS["none"], default_sampling_params=SamplingParams())
    tools = ToolUse(body, tool_format())
    return conversation._sampling_params(body, service, tools, Start.OVER).structured_outputs  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize("form", FORMS)
def test_a_form_is_kept_beside_tools_that_are_not_called(form: dict[str, Any]) -> None:
    found = form_of(**form, tool_choice="none")
    assert found is not None
    assert (found.choice, found.grammar) == (CHOICE, None)


@pytest.mark.parametrize("form", FORMS)
def test_a_form_excludes_a_forced_call(form: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="a forced tool call excludes response_format and structured_outputs"):
        form_of(**form, tool_choice="required")


def test_tools_that_are_too_large_for_a_grammar_are_named() -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "string", "description": "d" * 2000}}}
    tools = [{"type": "function", "function": {"name": f"f{n}", "parameters": parameters}} for n in range(40)]
    with pytest.raises(RequestError, match="tools: grammar must be at most 65536 bytes") as caught:
        form_of(tools=tools, tool_choice="required")
    assert caught.value.field == "tools"


def test_rules_of_tools_that_are_too_large_are_named_too() -> None:
    parameters = {"type": "object", "properties": {f"a{number}": {} for number in range(500)}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    with pytest.raises(RequestError, match="tools: grammar must be at most 65536 bytes") as caught:
        form_of(PythonicFormat, tools=tools, tool_choice="required")
    assert caught.value.field == "tools"


def test_bad_words_of_many_prompts_are_encoded_once() -> None:
    encoded: list[str] = []

    def encode(text: str, *, add_special_tokens: bool) -> list[int]:
        encoded.append(text)
        return [len(text)]

    tokenizer: Any = SimpleNamespace(encode=encode)
    processor = InputProcessor(tokenizer=tokenizer, vocab_size=9, max_model_len=64, eos_token_ids=frozenset(), seed=0)
    for number in range(3):
        for words, expected in ((["ab", "c"], ((2,), (3,), (1,))), (["c"], ((1,), (2,))), ([], ())):
            params = SamplingParams(bad_words=words)
            (child,) = processor.process(f"{number}", {"prompt_token_ids": [1]}, params).completions
            assert child is not None
            assert child.bad_words_token_ids == expected
    assert encoded == ["ab", " ab", "c", " c", "c", " c"]


def test_repeated_allowed_tokens_are_sent_once() -> None:
    processor = InputProcessor(tokenizer=None, vocab_size=300, max_model_len=64, eos_token_ids=frozenset(), seed=0)
    params = SamplingParams(allowed_token_ids=[7, 3, 7, 5, 3] * 1000)
    (child,) = processor.process("a", {"prompt_token_ids": [1]}, params).completions
    assert child is not None
    assert child.sampling_params.allowed_token_ids == [3, 5, 7]
    with pytest.raises(RequestError, match="allowed_token_ids"):
        SamplingParams(allowed_token_ids=[7, True])

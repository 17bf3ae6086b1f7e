"""The formats of tool calls under vLLM's names, and their detection from chat templates."""

from __future__ import annotations

import re

from penstock.server.openai.tool_calls.deepseek import CALLS_BEGIN, DeepSeekV3Format, DeepSeekV31Format
from penstock.server.openai.tool_calls.hermes import OPENING_TAG, HermesFormat
from penstock.server.openai.tool_calls.llama3_json import PYTHON_TAG, Llama3JsonFormat
from penstock.server.openai.tool_calls.mistral import TOOL_CALLS, MistralFormat
from penstock.server.openai.tool_calls.pythonic import PythonicFormat
from penstock.server.openai.tool_calls.qwen3_coder import Qwen3CoderFormat
from penstock.server.openai.tool_calls.tool_format import ToolCallFormat
from penstock.tokenizer.tokenizer import Tokenizer

FORMATS: dict[str, type[ToolCallFormat]] = {
    each.NAME: each
    for each in (
        HermesFormat,
        Qwen3CoderFormat,
        Llama3JsonFormat,
        MistralFormat,
        DeepSeekV3Format,
        DeepSeekV31Format,
        PythonicFormat,
    )
}

# Other formats use hermes's tag too, but a different syntax inside it.
_QWEN3_CODER_MARK, _GLM_MARK = "<function=", "<arg_key>"
_LLAMA3_EXAMPLE = re.compile(r'\{\\?"name\\?": ?[^{}\n]{1,80}, ?\\?"parameters\\?":')
_PYTHONIC_EXAMPLE = re.compile(r"\[func_name1?\(params_name1=")


def detect_format(chat_template_source: str | None) -> str | None:
    """Returns the name of the format that a chat template describes to its model; None if it describes no known
    format.
    """
    source = chat_template_source or ""
    if OPENING_TAG in source:
        if _QWEN3_CODER_MARK in source:
            return Qwen3CoderFormat.NAME
        return None if _GLM_MARK in source else HermesFormat.NAME
    if CALLS_BEGIN in source:
        return DeepSeekV3Format.NAME if "```json" in source else DeepSeekV31Format.NAME
    if TOOL_CALLS in source:
        return MistralFormat.NAME
    if _PYTHONIC_EXAMPLE.search(source):
        return PythonicFormat.NAME
    if PYTHON_TAG in source or _LLAMA3_EXAMPLE.search(source):
        return Llama3JsonFormat.NAME
    return None


def make_format(parser: str, tokenizer: Tokenizer | None) -> ToolCallFormat | None:
    """The format of this name for a tokenizer; with "auto" the one that its chat template describes, if any."""
    source = None if tokenizer is None else tokenizer.chat_template_source
    name = detect_format(source) if parser == "auto" else parser
    if name is None or name not in FORMATS:
        return None
    return FORMATS[name]({} if tokenizer is None else tokenizer.added_tokens, source or "")

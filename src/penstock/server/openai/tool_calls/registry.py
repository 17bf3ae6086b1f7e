"""The formats of tool calls under vLLM's names, and their detection from chat templates."""

from __future__ import annotations

import re

from penstock.server.openai.tool_calls.deepseek import CALLS_BEGIN, DeepSeekV3Format, DeepSeekV31Format
from penstock.server.openai.tool_calls.glm import KEY, Glm45Format, Glm47Format
from penstock.server.openai.tool_calls.harmony import CALL_BEGIN, HarmonyFormat
from penstock.server.openai.tool_calls.hermes import OPENING_TAG, HermesFormat
from penstock.server.openai.tool_calls.json_array import GRANITE_TAG, GraniteFormat, PhiFormat
from penstock.server.openai.tool_calls.kimi import CALLS_BEGIN as KIMI_CALLS_BEGIN
from penstock.server.openai.tool_calls.kimi import KimiK2Format
from penstock.server.openai.tool_calls.llama3_json import PYTHON_TAG, Llama3JsonFormat
from penstock.server.openai.tool_calls.mistral import TOOL_CALLS, MistralFormat
from penstock.server.openai.tool_calls.pythonic import LFM2_START, Lfm2Format, PythonicFormat
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
        Lfm2Format,
        Glm45Format,
        Glm47Format,
        GraniteFormat,
        PhiFormat,
        KimiK2Format,
        HarmonyFormat,
    )
}

# Other formats use hermes's tag too, but a different syntax inside it.
_QWEN3_CODER_MARK = "<function="
_GLM_BREAK = re.compile(r"(\n|\\n)<arg_key>")
# Marks of the formats that have one of their own.
_MARKS = {
    KIMI_CALLS_BEGIN: KimiK2Format.NAME,
    TOOL_CALLS: MistralFormat.NAME,
    LFM2_START: Lfm2Format.NAME,
    "<|tool_list_start|>": Lfm2Format.NAME,
    GRANITE_TAG: GraniteFormat.NAME,
    "<|/tool|>": PhiFormat.NAME,
}
_LLAMA3_EXAMPLE = re.compile(r'\{\\?"name\\?": ?[^{}\n]{1,80}, ?\\?"parameters\\?":')
_PYTHONIC_EXAMPLE = re.compile(r"\[func_name1?\(params_name1=")


def detect_format(chat_template_source: str | None) -> str | None:
    """Returns the name of the format that a chat template describes to its model; None if it describes no known
    format.
    """
    source = chat_template_source or ""
    if CALL_BEGIN.split()[0] in source:
        return HarmonyFormat.NAME
    if OPENING_TAG in source:
        if _QWEN3_CODER_MARK in source:
            return Qwen3CoderFormat.NAME
        if KEY in source:
            return Glm45Format.NAME if _GLM_BREAK.search(source) else Glm47Format.NAME
        return HermesFormat.NAME
    if CALLS_BEGIN in source:
        return DeepSeekV3Format.NAME if "```json" in source else DeepSeekV31Format.NAME
    for mark, name in _MARKS.items():
        if mark in source:
            return name
    if _PYTHONIC_EXAMPLE.search(source):
        return PythonicFormat.NAME
    if PYTHON_TAG in source or _LLAMA3_EXAMPLE.search(source):
        return Llama3JsonFormat.NAME
    return None


def make_format(parser: str, tokenizer: Tokenizer | None) -> ToolCallFormat | None:
    """The format of this name for a tokenizer; with "auto" the one that its chat template describes, if any."""
    source = None if tokenizer is None else tokenizer.chat_template_source
    name = detect_format(source) if parser == "auto" else parser
    if parser == "auto" and name is None and tokenizer is not None and LFM2_START in tokenizer.added_tokens:
        # LFM2.5's template has the calls in the text of messages.
        name = Lfm2Format.NAME
    if name is None or name not in FORMATS:
        return None
    return FORMATS[name]({} if tokenizer is None else tokenizer.added_tokens, source or "")

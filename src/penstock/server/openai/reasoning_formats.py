"""The formats of reasoning under vLLM's names, and their detection from chat templates."""

from __future__ import annotations

from penstock.server.openai.harmony import CHANNEL, MESSAGE, HarmonyReasoning
from penstock.server.openai.reasoning import ReasoningFormat, Start
from penstock.tokenizer.tokenizer import Tokenizer

_THINK = ("<think>", "</think>")
REASONING_FORMATS: dict[str, ReasoningFormat] = {
    each.name: each
    for each in (
        ReasoningFormat("qwen3", *_THINK, Start.POSSIBLE),
        ReasoningFormat("deepseek_r1", *_THINK, Start.EXPECTED),
        ReasoningFormat("glm45", *_THINK, Start.POSSIBLE),
        ReasoningFormat("granite", "Here is my thought process:", "Here is my response:", Start.POSSIBLE),
        HarmonyReasoning("openai_gptoss", f"{CHANNEL}analysis{MESSAGE}", "<|end|>", Start.POSSIBLE),
        ReasoningFormat("none", "", "", Start.OVER),
    )
}
_DEEPSEEK_MARK = "<｜Assistant｜>"


def detect_reasoning(chat_template_source: str | None) -> str:
    """Returns the name of the format that a chat template knows, or "none"."""
    source = chat_template_source or ""
    if f"{CHANNEL}analysis" in source:
        return "openai_gptoss"
    if _THINK[1] in source:
        # Since V3.1 the template writes the tag, and some answers have no reasoning.
        return "deepseek_r1" if _DEEPSEEK_MARK in source and "thinking" not in source else "qwen3"
    return "granite" if REASONING_FORMATS["granite"].closing in source else "none"


def make_reasoning_format(name: str, tokenizer: Tokenizer | None) -> ReasoningFormat:
    """Returns the format of this name, with the tokens of its tags in this tokenizer; with "auto" the one that its chat
    template knows.
    """
    if name == "auto":
        name = detect_reasoning(None if tokenizer is None else tokenizer.chat_template_source)
    return REASONING_FORMATS[name].with_tokens({} if tokenizer is None else tokenizer.added_tokens)

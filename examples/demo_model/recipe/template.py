"""Converts messages to text with the chat template that is also shipped with the model.

The environment is the one of Hugging Face's `apply_chat_template` (block trimming, a `tojson` that neither sorts keys
nor escapes for HTML), so that training text and a server's prompts are the same bytes.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from recipe.draw import Item, Message

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
ASSISTANT_HEADER = "assistant\n"


def template_text() -> str:
    """Returns the chat template's source."""
    return (Path(__file__).parent / "chat_template.jinja").read_text(encoding="utf-8")


@functools.cache
def _compiled() -> Any:
    import jinja2

    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, autoescape=False)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(template_text())


def render(messages: list[Message], tools: list[dict[str, Any]], add_generation_prompt: bool = False) -> str:
    """Returns the conversation as the text that a model reads, with `tools` listed in its system turn."""
    return _compiled().render(messages=messages, tools=tools, add_generation_prompt=add_generation_prompt)


def document(item: Item) -> str:
    """Returns the item's whole training text, without the end-of-text mark that separates documents."""
    return render(item.messages, item.tools) if item.messages else item.text


def prompt_and_answer(item: Item) -> tuple[str, str]:
    """Returns the text before the item's last answer, and that answer with its end-of-turn mark."""
    prompt = render(item.messages[:-1], item.tools, add_generation_prompt=True)
    whole = render(item.messages, item.tools)
    answer = whole[len(prompt) :].rstrip("\n")
    assert whole.startswith(prompt), f"the template is not a prefix of itself in an item of {item.task}"
    return prompt, answer

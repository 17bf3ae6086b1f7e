"""Validation of conversations, and the tokenization of prompts."""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.frontend.input_processor import Prompt
from penstock.server import limits
from penstock.server.openai.dialects import is_ignored
from penstock.server.openai.protocol import (
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    GenerationRequest,
    TemplateOptions,
)
from penstock.server.service import Service
from penstock.tokenizer.tokenizer import Truncation
from penstock.utils.errors import RequestError
from penstock.utils.names import did_you_mean

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
# The API's fields of a message besides the declared ones. Others must occur in the template.
_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content")


@dataclass(frozen=True, slots=True)
class Tokenizing:
    """Whether the tokenizer adds its special tokens, and to how many tokens the prompt is truncated."""

    add_special_tokens: bool = False
    truncation: Truncation | None = None


AS_WRITTEN = Tokenizing()
"""For the text of a chat template, which writes the special tokens itself."""


def max_tokens_of(body: ChatCompletionRequest | CompletionRequest) -> int | None:
    """Returns the limit of a completion, under either of its names."""
    return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens


def tokenizing_of(
    body: GenerationRequest, service: Service, max_tokens: int | None, adds_by_default: bool = False
) -> Tokenizing:
    """Returns the request's settings. Raises RequestError if they exceed the model's context."""
    adds = adds_by_default if body.add_special_tokens is None else body.add_special_tokens
    wanted, longest = body.truncate_prompt_tokens, service.llm.max_model_len
    if wanted is None:
        return Tokenizing(adds)
    if wanted == 0 or wanted >= longest:
        raise RequestError(
            f"truncate_prompt_tokens must be -1 or from 1 to {longest - 1}, so that max_model_len={longest} leaves one "
            f"token to generate, got {wanted}",
            "truncate_prompt_tokens",
        )
    if wanted < 0:
        wanted = max(1, longest - (max_tokens or 1))
    return Tokenizing(adds, Truncation(wanted, keeps_end=body.truncation_side != "right"))


async def encode_prompts(service: Service, prompts: Sequence[Prompt], tokenizing: Tokenizing) -> list[Prompt]:
    """Returns the prompts of a completion as tokens; prompts that were not truncated keep their text."""
    truncation = tokenizing.truncation
    found: list[Prompt] = []
    for prompt in prompts:
        if isinstance(prompt, str) and prompt:
            encode = service.llm.get_tokenizer().encode
            work = service.llm.text_work.run(len(prompt), encode, prompt, tokenizing.add_special_tokens, truncation)
            # A task of its own lets other clients have their turn, also between short prompts.
            text, tokens = {} if truncation else {"prompt": prompt}, await asyncio.create_task(work)
            # A prompt that is too long is refused before the others are tokenized.
            service.llm.check_prompt(tokens)
            found.append({**text, "prompt_token_ids": tokens})
        else:
            found.append(prompt if truncation is None else truncation.cut(prompt))
    return found


def template_variables(body: TemplateOptions) -> dict[str, Any]:
    """Returns the fields of a request that are variables of the chat template."""
    if not isinstance(body, ChatCompletionRequest):
        return {}
    known = {"reasoning_effort": body.reasoning_effort, "documents": body.documents}
    return {name: value for name, value in known.items() if value is not None}


def num_characters(value: Any) -> int:
    """Counts the characters of all texts in a conversation, plus some per value for the template's own text."""
    total, values = 0, [value]
    while values:
        value = values.pop()
        total += len(value) if isinstance(value, str) else 20
        values += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return total


def check_messages(messages: Sequence[ChatMessage], template: str) -> None:
    """Raises RequestError for roles and fields that neither the API nor the model's template knows."""
    # A template takes long to search, and thousands of messages may have its words as fields.
    mentions = functools.cache(functools.partial(_mentions, template))
    for number, message in enumerate(messages):
        if message.role not in _ROLES and not mentions(message.role):
            near = did_you_mean(message.role, _ROLES)
            raise RequestError(f"messages.{number}.role: {message.role!r} is not a role{near}", "messages")
        for name in message.model_extra or ():
            if name not in _FIELDS and not mentions(name) and not is_ignored(name):
                near = did_you_mean(shown := name[: limits.MAX_NAME_CHARACTERS], _FIELDS)
                raise RequestError(f"messages.{number}.{shown} is not a field of a message{near}", "messages")


def with_known_role(message: dict[str, Any], template: str) -> dict[str, Any]:
    """Returns the message with a role that the template knows."""
    if message["role"] == "function":
        message["role"] = "tool"
    elif message["role"] == "developer" and not _mentions(template, "developer"):
        message["role"] = "system"
    return message


def _mentions(template: str, name: str) -> bool:
    return name in template and re.search(rf"\b{re.escape(name)}\b", template) is not None

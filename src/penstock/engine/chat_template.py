"""Chat templates: Jinja programs from the checkpoint, run in a sandbox without access to anything but the messages."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from penstock.utils.clock import SystemClock
from penstock.utils.errors import ConfigError, RequestError

_MAX_RENDERED_CHARACTERS = 16 << 20


class ChatTemplate:
    """One compiled template; rendering is thread-safe."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols], autoescape=False
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, TypeError) as error:
            raise ConfigError(f"the chat template cannot be compiled: {error}") from None
        self._special_tokens = dict(special_tokens)

    @classmethod
    def load(cls, folder: Path, config: Mapping[str, Any]) -> ChatTemplate | None:
        """The template of a checkpoint folder: `chat_template.jinja`, or in its tokenizer configuration."""
        file = folder / "chat_template.jinja"
        source = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
        if isinstance(source, list):
            named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, Mapping)}
            source = named.get("default")
        if not source:
            return None
        if not isinstance(source, str):
            raise ConfigError(f"{folder}: chat_template must be text")
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        values = {name: config.get(name) for name in names}
        tokens = {name: v["content"] if isinstance(v, Mapping) else v for name, v in values.items() if v}
        return cls(source, tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The conversation as text. Raises RequestError when the template refuses it."""
        if tools is not None and not (isinstance(tools, Sequence) and all(isinstance(tool, Mapping) for tool in tools)):
            raise RequestError("tools must be a list of objects", "tools")
        known = {"messages": _plain_messages(messages), "tools": list(tools) if tools else None}
        known["add_generation_prompt"] = add_generation_prompt
        try:
            text = self._template.render({**self._special_tokens, **variables, **known})
        except Exception as error:  # noqa: BLE001 - a template is a program, and what it raises is its own affair
            raise RequestError(f"the chat template cannot render these messages: {error}", "messages") from None
        if len(text) > _MAX_RENDERED_CHARACTERS:
            raise RequestError(f"the conversation is longer than {_MAX_RENDERED_CHARACTERS} characters", "messages")
        return text


def _plain_messages(messages: Any) -> list[dict[str, Any]]:
    """The messages with every content as text; parts of type text are joined. Raises RequestError for anything else."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise RequestError("messages must be a list that is not empty", "messages")
    plain: list[dict[str, Any]] = []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(f"messages[{number}] must be an object with a role", "messages")
        content = message.get("content")
        if isinstance(content, Sequence) and not isinstance(content, str):
            if not all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content):
                raise RequestError(f"messages[{number}].content has parts that are not text", "messages")
            content = "".join(part["text"] for part in content)
        if content is None and message.get("tool_calls"):
            content = ""
        if not isinstance(content, str):
            raise RequestError(f"messages[{number}].content must be text", "messages")
        plain.append({**message, "content": content})
    return plain


def _strftime_now(form: str) -> str:
    return datetime.datetime.fromtimestamp(SystemClock().wall()).strftime(form)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **_: Any) -> str:
    # Jinja's own filter escapes HTML characters, which would end up in the prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)

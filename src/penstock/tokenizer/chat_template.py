"""Chat templates: Jinja programs from the checkpoint, run in a sandbox without access to anything but the messages."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from penstock.utils.clock import SystemClock
from penstock.utils.errors import ConfigError, RequestError

_MAX_RENDERED_CHARACTERS = 16 << 20
_MAX_SECONDS = 5.0
# Ends the content of a message that is to be continued, whose text may occur again after it.
_CONTENT_END = "[end of the content]"
_deadline: ContextVar[float] = ContextVar("deadline")


class _LimitError(jinja2.TemplateError):
    """The template exceeded its limit of time or memory."""


class _Sandbox(ImmutableSandboxedEnvironment):
    """Checks the time limit whenever a template calls or looks up something, and before it repeats a text."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def parse(self, source: str, name: str | None = None, filename: str | None = None) -> nodes.Template:
        """Inserts a call into every iteration of a loop, so that each checks the time limit."""
        tree: Any = super().parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            tick = nodes.Call(nodes.Name("_tick", "load"), [], [], None, None)
            loop.body.insert(0, nodes.ExprStmt(tick, lineno=loop.lineno))
        return tree.set_environment(self)

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        _check_deadline()
        return super().call(context, obj, *args, **kwargs)

    def getattr(self, obj: Any, attribute: str) -> Any:
        _check_deadline()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        _check_deadline()
        return super().getitem(obj, argument)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _check_deadline()
        if operator == "*":
            for repeated, times in ((left, right), (right, left)):
                if isinstance(repeated, Sequence) and isinstance(times, int) and len(repeated) * times > 1 << 20:
                    raise _LimitError("a template must not repeat a text that often")
        if operator == "**":
            raise _LimitError("a template must not raise to a power")
        return super().call_binop(context, operator, left, right)


def _check_deadline() -> None:
    if SystemClock().now() > _deadline.get():
        raise _LimitError(f"it took longer than {_MAX_SECONDS:g} s")


class ChatTemplate:
    """One compiled template; rendering is thread-safe. `source` is its text."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols], autoescape=False)
        environment.filters["tojson"] = _to_json
        environment.globals["_tick"] = lambda: None
        environment.globals.pop("lipsum")
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(environment.parse(source))
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
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The conversation as text; with `continue_final_message` it ends at the end of the last message's content.
        Raises RequestError if the template refuses it.
        """
        if tools is not None and not (isinstance(tools, Sequence) and all(isinstance(tool, Mapping) for tool in tools)):
            raise RequestError("tools must be a list of objects", "tools")
        plain = _plain_messages(messages)
        if continue_final_message:
            plain[-1]["content"] = plain[-1]["content"].rstrip() + _CONTENT_END
        known = {"messages": plain, "tools": list(tools or ()) or None, "add_generation_prompt": add_generation_prompt}
        try:
            text = self._render({**self._special_tokens, **variables, **known})
        except Exception as error:  # noqa: BLE001 - a template is a program, and what it raises is its own affair
            raise RequestError(f"the chat template cannot render these messages: {error}", "messages") from None
        end = text.rfind(_CONTENT_END) if continue_final_message else len(text)
        if end < 0:
            raise RequestError("the chat template does not show the last message verbatim", "continue_final_message")
        return text[:end]

    def _render(self, context: Mapping[str, Any]) -> str:
        """Renders piece by piece, so that an endless template is stopped."""
        _deadline.set(SystemClock().now() + _MAX_SECONDS)
        pieces: list[str] = []
        size = 0
        for piece in self._template.generate(context):
            _check_deadline()
            size += len(piece)
            if size > _MAX_RENDERED_CHARACTERS:
                raise _LimitError(f"the conversation is longer than {_MAX_RENDERED_CHARACTERS} characters")
            pieces.append(piece)
        return "".join(pieces)


def _plain_messages(messages: Any) -> list[dict[str, Any]]:
    """Returns the messages with content as text; parts of type text are joined. Raises RequestError for anything
    else.
    """
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

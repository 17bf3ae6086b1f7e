"""Chat templates: Jinja programs from the checkpoint, run in a sandbox without access to anything but the messages."""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from penstock.utils.clock import SystemClock
from penstock.utils.errors import ConfigError, RequestError

_MAX_RENDERED_CHARACTERS = 16 << 20
_MAX_SECONDS = 5.0
# The templates of a checkpoint by their names, and their files. The second one is for conversations with tools.
_FILES = {"default": "chat_template.jinja", "tool_use": "additional_chat_templates/tool_use.jinja"}
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


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training: its contents are rendered as they are."""

    tags = {"generation"}  # noqa: RUF012 - declared by the base class

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=lineno)


class ChatTemplate:
    """The compiled templates of a checkpoint; rendering is thread-safe. `source` is their text. Most checkpoints have
    one template, and some have another one for conversations with tools.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], tool_source: str | None = None) -> None:
        self.source = source if tool_source is None else f"{source}\n{tool_source}"
        extensions = [loopcontrols, _Generation]
        environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=extensions, autoescape=False)
        environment.filters["tojson"] = _to_json
        environment.globals.pop("lipsum")
        environment.globals.update(_tick=lambda: None, raise_exception=_raise, strftime_now=_strftime_now)
        try:
            both = [environment.from_string(environment.parse(each)) for each in (source, tool_source or source)]
        except (jinja2.TemplateError, TypeError) as error:
            raise ConfigError(f"the chat template cannot be compiled: {error}") from None
        self._template, self._tool_template = both
        self._special_tokens = dict(special_tokens)

    @classmethod
    def load(cls, folder: Path, config: Mapping[str, Any]) -> ChatTemplate | None:
        """The templates of a checkpoint folder: files, or in its tokenizer configuration."""
        files = {name: folder / file for name, file in _FILES.items()}
        try:
            read: dict[Any, Any] = {name: each.read_text("utf-8") for name, each in files.items() if each.is_file()}
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"a chat template in {folder} cannot be read: {error}") from None
        stored: Any = [] if "default" in read else config.get("chat_template")
        entries = stored if isinstance(stored, list) else [{"name": "default", "template": stored}]
        named = {each.get("name"): each.get("template") for each in entries if isinstance(each, Mapping)} | read
        source, tool_source = named.get("default"), named.get("tool_use") or None
        if not source:
            return None
        if not isinstance(source, str) or not isinstance(tool_source, str | None):
            raise ConfigError(f"{folder}: chat_template must be text")
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        return cls(source, {name: token for name in names if (token := special_token(config, name))}, tool_source)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
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
        pieces, size = list[str](), 0
        for piece in (self._tool_template if context["tools"] else self._template).generate(context):
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
        calls = message.get("tool_calls")
        parsed = {"tool_calls": [*map(_plain_call, calls)]} if isinstance(calls, list | tuple) else {}
        plain.append({**message, "content": content, **parsed})
    return plain


def _plain_call(call: Any) -> Any:
    """Returns a tool call with its arguments as an object, which templates expect, if they are the JSON text of one."""
    match call:
        case {"function": {"arguments": str(text)} as function}:
            with contextlib.suppress(ValueError, RecursionError):
                if isinstance(arguments := json.loads(text.strip() or "{}"), dict):
                    return {**call, "function": {**function, "arguments": arguments}}
    return call


def special_token(config: Mapping[str, Any], name: str) -> str | None:
    """Returns the text of a special token in a tokenizer's configuration; None if there is none."""
    value = config.get(name)
    return value.get("content") if isinstance(value, Mapping) else value


def _strftime_now(form: str) -> str:
    return datetime.datetime.fromtimestamp(SystemClock().wall()).strftime(form)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's own filter escapes HTML characters, which would end up in the prompt. The arguments are transformers'.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)

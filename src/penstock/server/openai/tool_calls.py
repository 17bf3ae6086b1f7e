"""Tool calls in an answer's text: recognised while it is still coming, in the formats that models are trained on.

Purpose: a model calls a function by writing JSON. A `ToolCallParser` takes the answer's text in pieces of any size and
says which of it is content and which are calls; how the text is cut changes nothing in the merged result.
Lifecycle: one parser per completion; `feed` any number of times, `finish` once, nothing after it.
Failure: none. The text is a model's and may be anything. What turns out to be no call is content, verbatim. A call has
begun once it has been reported; a call that breaks off after that ends where it breaks, and what follows is content.
Cost: linear in the text. What is undecided is held back and looked at once.

Inside, a parser is a coroutine that is sent one character at a time, so that each grammar reads from top to bottom.
Its parts follow one convention: whoever cannot use a character hands it back, and it is the last one in `_held`.
"""

from __future__ import annotations

import json
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

MAX_TOOL_CALLS = 128
"""Calls in one answer; the text of any further one is content."""

_WHITESPACE = " \t\r\n"
_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_HEX = frozenset("0123456789abcdefABCDEF")
_SCALAR = frozenset("+-.0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_ARGUMENTS_KEYS = ("arguments", "parameters")

_T = TypeVar("_T")
_Scan = Generator[None, str, _T]
_Emit = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """What one piece of text brought for one call.

    `index` counts the answer's calls from 0. `id` and `name` come whole, with the call's first delta and no other.
    `arguments` is the next piece of the arguments' JSON text, as the model wrote it.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class ParsedDelta:
    """What one piece of text brought: at most one delta per call, in their order, and whole when its text is."""

    content: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


class ToolCallParser(ABC):
    """Parses one completion; the formats differ in `_answer`, which is sent the text one character at a time.

    `num_calls` counts the calls begun so far.
    """

    _separators = _WHITESPACE

    def __init__(self) -> None:
        self.num_calls = 0
        self._held: list[str] = []  # characters not known yet to be content or part of a call
        self._separating = True  # since the last call, or the start, only separators have come
        self._in_call = False  # a call has begun and its object is still open
        self._content: list[str] = []
        self._heads: dict[int, tuple[str, str]] = {}  # index -> id and name, of the calls begun in this piece
        self._arguments: dict[int, list[str]] = {}  # index -> what this piece brought
        self._scan = self._answer()
        next(self._scan)

    @abstractmethod
    def _answer(self) -> _Scan[None]:
        """Reads the whole answer and never returns."""

    def feed(self, text: str) -> ParsedDelta:
        """Takes the completion's next piece, which may be empty, and says what it brought."""
        for char in text:
            self._held.append(char)
            self._scan.send(char)
        return self._take()

    def finish(self) -> ParsedDelta:
        """The completion has ended: what was held back is content, unless it only set calls apart."""
        self._scan.close()
        separator = self.num_calls and self._separating and not "".join(self._held).strip(self._separators)
        if not self._in_call and not separator:
            self._release()
        return self._take()

    def _take(self) -> ParsedDelta:
        deltas = tuple(
            ToolCallDelta(index, *self._heads.get(index, (None, None)), "".join(pieces))
            for index, pieces in self._arguments.items()
        )
        delta = ParsedDelta("".join(self._content), deltas)
        self._content.clear()
        self._heads.clear()
        self._arguments.clear()
        return delta

    def _release(self, keep: int = 0) -> None:
        """Makes content of what is held back, but for its last `keep` characters."""
        cut = len(self._held) - keep
        self._content.extend(self._held[:cut])
        del self._held[:cut]
        self._separating = False

    def _call(self, char: str, content: str, needs_arguments: bool) -> _Scan[tuple[bool, str]]:
        """Reads a call's object, which `char` should open; returns whether it was a call, and the next character.

        `content` is as much of what is held back as is content even if this is a call.
        """

        def begin(name: str) -> None:
            self._content.append(content)
            self._held.clear()
            self._separating = self._in_call = True
            self._heads[self.num_calls] = (f"call_{secrets.token_hex(12)}", name)
            self._arguments[self.num_calls] = []
            self.num_calls += 1

        def emit(arguments: str) -> None:
            self._arguments.setdefault(self.num_calls - 1, []).append(arguments)
            self._held.clear()

        call = _CallObject(begin, emit, needs_arguments)
        try:
            yield from call.read(char)
        except _Malformed:
            if call.begun:
                del self._held[:-1]
            else:
                self._release(keep=1)
            self._in_call = False
            return call.begun, self._held[-1]
        self._held.clear()
        self._in_call = False
        return True, (yield)


class _HermesParser(ToolCallParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them, anywhere in the text."""

    OPENING, CLOSING = "<tool_call>", "</tool_call>"

    def _answer(self) -> _Scan[None]:
        unclosed = False
        char = yield
        while True:
            char = yield from _skip_whitespace(char)
            if char != "<":
                self._release()
                char = yield
                continue
            before = len(self._held) - 1
            tag, char = yield from _tag(self.OPENING, self.CLOSING if unclosed else self.OPENING)
            if not tag:
                self._release(keep=1)
            elif tag == self.CLOSING:
                unclosed = False
                self._held.clear()
                self._separating = True
                char = yield
            elif self.num_calls == MAX_TOOL_CALLS:
                unclosed = False
                self._release()
                char = yield
            else:
                content = "" if self._separating else "".join(self._held[:before]).rstrip("\n")
                char = yield from _skip_whitespace((yield))
                unclosed, char = yield from self._call(char, content, needs_arguments=False)


class _Llama3Parser(ToolCallParser):
    """`{"name": ..., "parameters": {...}}`, several set apart by `;`, perhaps behind `<|python_tag|>`: all the answer.

    An answer may be JSON without being a call, and have a "name": without the tag, only the arguments make it a call.
    """

    TAG = "<|python_tag|>"
    _separators = _WHITESPACE + ";"

    def _answer(self) -> _Scan[None]:
        tagged = False
        is_call = True
        char = yield
        while is_call:
            while char in _WHITESPACE or (char == ";" and self.num_calls):
                char = yield
            if self.num_calls == MAX_TOOL_CALLS:
                break
            if char == "<":
                tag, char = yield from _tag(self.TAG)
                if not tag:
                    break
                tagged = True
                char = yield from _skip_whitespace((yield))
            is_call, char = yield from self._call(char, "", needs_arguments=not tagged)
        while True:
            self._release()
            yield


class _Malformed(Exception):  # noqa: N818
    """The last character cannot be part of a call. Control flow inside this file; never leaves a parser."""


class _CallObject:
    """A call's object, its members in any order: `begin` hears the name once, then `emit` the arguments' text."""

    def __init__(self, begin: _Emit, emit: _Emit, needs_arguments: bool) -> None:
        self.begun = False
        self._begin = begin
        self._emit = emit
        self._needs_arguments = needs_arguments
        self._name: str | None = None
        self._has_arguments = False
        self._early: list[str] = []  # arguments that came before the call could begin
        self._is_empty = True

    def read(self, char: str) -> _Scan[None]:
        """Reads from the opening brace to the closing one. Raises `_Malformed` at what is no call's object."""
        _require(char == "{")
        char = yield from _skip_whitespace((yield))
        while char != "}":
            _require(char == '"')
            key: list[str] = []
            yield from _string(key.append)
            char = yield from _skip_whitespace((yield))
            _require(char == ":")
            char = yield from _skip_whitespace((yield))
            char = yield from self._member("".join(key), char)
            char = yield from _skip_whitespace(char)
            _require(char in ",}")
            if char == ",":
                char = yield from _skip_whitespace((yield))
        _require(self.begun)
        if self._is_empty:
            self._emit("{}")

    def _member(self, key: str, char: str) -> _Scan[str]:
        """Reads the value that begins with `char`; returns the first character after it. Of a key's values the first
        one counts."""
        if key == "name" and self._name is None:
            _require(char == '"')
            name: list[str] = []
            yield from _string(name.append)
            self._name = "".join(name)
            _require(bool(self._name))
            self._begin_if_known()
            return (yield)
        if key not in _ARGUMENTS_KEYS or self._has_arguments:
            return (yield from _value(char, _ignore))
        if char == '"':
            yield from _string(self._take_arguments)
            self._take_arguments("")
            return (yield)
        return (yield from _value(char, self._take_arguments))

    def _take_arguments(self, text: str) -> None:
        self._has_arguments = True
        self._is_empty = self._is_empty and not text
        if self.begun:
            self._emit(text)
        else:
            self._early.append(text)
            self._begin_if_known()

    def _begin_if_known(self) -> None:
        if self._name is not None and (self._has_arguments or not self._needs_arguments):
            self.begun = True
            self._begin(self._name)
            self._emit("".join(self._early))


def _require(condition: bool) -> None:
    if not condition:
        raise _Malformed


def _ignore(text: str) -> None:
    """Takes a value that nobody asked for."""


def _skip_whitespace(char: str) -> _Scan[str]:
    while char in _WHITESPACE:
        char = yield
    return char


def _tag(*tags: str) -> _Scan[tuple[str, str]]:
    """Reads on after a "<"; returns the tag that it opens, or "" and the first character that fits none."""
    read = "<"
    while read not in tags:
        char = yield
        if not any(tag.startswith(read + char) for tag in tags):
            return "", char
        read += char
    return read, ""


def _value(char: str, emit: _Emit) -> _Scan[str]:
    """Reads any JSON value and emits it as it stands; returns the first character after it.

    Brackets are counted and not matched: arguments that are slightly wrong reach the client, who can say so. Only a
    "<" outside a string ends them, for it must be the tag that ends the call.
    """
    if char not in '"{[':
        _require(char in _SCALAR)
        while char in _SCALAR:
            emit(char)
            char = yield
        return char
    depth, in_string, escaped = 0, False, False
    while True:
        _require(in_string or char != "<")
        emit(char)
        if escaped:
            escaped = False
        elif in_string and char == "\\":
            escaped = True
        elif char == '"':
            in_string = not in_string
        elif not in_string:
            depth += (char in "{[") - (char in "}]")
        if not depth and not in_string:
            return (yield)
        char = yield


def _string(emit: _Emit) -> _Scan[None]:
    """Reads a JSON string after its opening quote, to the closing one, and emits the text that it stands for.

    Half of a surrogate pair becomes U+FFFD, since no answer could carry it.
    """
    high = ""
    while (char := (yield)) != '"':
        if char == "\\":
            char = yield from _escape()
        if high and "\udc00" <= char <= "\udfff":
            emit((high + char).encode("utf-16", "surrogatepass").decode("utf-16"))
            high = ""
            continue
        if high:
            emit("\ufffd")
        high = char if "\ud800" <= char <= "\udbff" else ""
        if not high:
            emit("\ufffd" if "\udc00" <= char <= "\udfff" else char)
    if high:
        emit("\ufffd")


def _escape() -> _Scan[str]:
    char = yield
    if char != "u":
        _require(char in _ESCAPES)
        return _ESCAPES[char]
    digits = ""
    while len(digits) < 4:
        char = yield
        _require(char in _HEX)
        digits += char
    return chr(int(digits, 16))


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """How a family of models writes calls. Stateless: `parser` makes a new parser for each completion."""

    name: str
    parser: Callable[[], ToolCallParser]
    opening: str
    closing: str
    arguments_key: str

    def forced_prefix(self, function: str | None) -> str:
        """The text with which an answer begins that is a call of `function`, or of any function.

        It does not end in a space, because most tokenizers put the space at the beginning of what the model says next.
        """
        if function is None:
            return f'{self.opening}{{"name": "'
        return f'{self.opening}{{"name": {json.dumps(function, ensure_ascii=False)}, "{self.arguments_key}":'

    def forced_grammar(self, schemas: Mapping[str, Mapping[str, Any]], function: str | None) -> str:
        """A Lark grammar of what must follow `forced_prefix(function)`: one call, with arguments that fit their schema.

        `schemas` maps the functions that may be called to the JSON schemas of their arguments.
        """
        rules: list[str] = []
        for number, (name, schema) in enumerate(schemas.items()):
            head = "" if function is not None else f'{name}", "{self.arguments_key}":'
            pieces = [_lark_string(head)] if head else []
            rules.append(
                f"call_{number}: {' '.join(pieces)} /[ ]?/ arguments_{number} {_lark_string('}' + self.closing)}"
            )
            rules.append(f"arguments_{number}: %json {json.dumps(schema)}")
        calls = " | ".join(f"call_{number}" for number in range(len(schemas)))
        return "\n".join([f"start: {calls}", *rules])


def _lark_string(text: str) -> str:
    return json.dumps(text)


FORMATS: dict[str, ToolCallFormat] = {
    each.name: each
    for each in (
        ToolCallFormat("hermes", _HermesParser, f"{_HermesParser.OPENING}\n", "\n</tool_call>", "arguments"),
        ToolCallFormat("llama3_json", _Llama3Parser, "", "", "parameters"),
    )
}

# These families use the tag as well, but write the call inside it as XML.
_NOT_HERMES = ("<function=", "<arg_key>")
_LLAMA3_EXAMPLE = re.compile(r'\{\\?"name\\?": ?[^{}\n]{1,80}, ?\\?"parameters\\?":')


def detect_format(chat_template_source: str | None) -> str | None:
    """The name of the format that a chat template teaches its model, None where it teaches none that is known."""
    source = chat_template_source or ""
    if _HermesParser.OPENING in source:
        return None if any(mark in source for mark in _NOT_HERMES) else "hermes"
    if _Llama3Parser.TAG in source or _LLAMA3_EXAMPLE.search(source):
        return "llama3_json"
    return None

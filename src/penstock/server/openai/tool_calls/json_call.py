"""Calls written as JSON objects, and JSON values in calls of any format."""

from __future__ import annotations

from collections.abc import Callable

from penstock.server.openai.tool_calls.parser import (
    Emit,
    Malformed,
    Scan,
    ToolCallParser,
    ignore,
    require,
    skip_whitespace,
)

_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_HEX = frozenset("0123456789abcdefABCDEF")
_SCALAR = frozenset("+-.0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_ARGUMENTS_KEYS = ("arguments", "parameters")


class JsonCallParser(ToolCallParser):
    """A parser of a format whose calls are objects with a name and arguments."""

    def _call(self, char: str, content: str, needs_arguments: bool = False) -> Scan[tuple[bool, str]]:
        """Reads a call's object, which `char` should open; returns whether it was a call, and the next character.

        `content` is the part of the held-back text that is content even if this is a call.
        """

        def begin(name: str) -> None:
            require(name in self._tools)
            self._begin(name, content)

        call = _CallObject(begin, self._emit, needs_arguments)
        try:
            yield from call.read(char)
        except Malformed:
            return call.begun, self._break_off()
        self._end()
        return True, (yield)


class _CallObject:
    """A call's object with its members in any order: calls `begin` with the name once, then `emit` with the arguments'
    text.
    """

    def __init__(self, begin: Callable[[str], None], emit: Emit, needs_arguments: bool) -> None:
        self.begun = False
        self._begin = begin
        self._emit = emit
        self._needs_arguments = needs_arguments
        self._name: str | None = None
        self._has_arguments = False
        self._early: list[str] = []  # arguments received before the call could begin
        self._is_empty = True

    def read(self, char: str) -> Scan[None]:
        """Reads from the opening brace to the closing one. Raises `Malformed` if the object is not a call."""
        require(char == "{")
        char = yield from skip_whitespace((yield))
        while char != "}":
            require(char == '"')
            key: list[str] = []
            yield from read_string(key.append)
            char = yield from skip_whitespace((yield))
            require(char == ":")
            char = yield from skip_whitespace((yield))
            char = yield from self._member("".join(key), char)
            char = yield from skip_whitespace(char)
            require(char in ",}")
            if char == ",":
                char = yield from skip_whitespace((yield))
        require(self.begun)
        if self._is_empty:
            self._emit("{}")

    def _member(self, key: str, char: str) -> Scan[str]:
        """Reads the value that begins with `char`; returns the first character after it. If a key is repeated, its
        first value is used.
        """
        if key == "name" and self._name is None:
            require(char == '"')
            name: list[str] = []
            yield from read_string(name.append)
            self._name = "".join(name)
            require(bool(self._name))
            self._begin_if_known()
            return (yield)
        if key not in _ARGUMENTS_KEYS or self._has_arguments:
            return (yield from read_value(char, ignore))
        if char == '"':
            yield from read_string(self._take_arguments)
            self._take_arguments("")
            return (yield)
        return (yield from read_value(char, self._take_arguments))

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
            self._begin(self._name)
            self.begun = True
            self._emit("".join(self._early))


def read_value(char: str, emit: Emit) -> Scan[str]:
    """Reads any JSON value and emits it unchanged; returns the first character after it.

    Brackets are counted and not matched: slightly malformed arguments are passed to the client, which can report them.
    Only a "<" outside a string ends them, because it must be the tag that ends the call.
    """
    if char not in '"{[':
        require(char in _SCALAR)
        while char in _SCALAR:
            emit(char)
            char = yield
        return char
    yield from read_until_closed(char, emit)
    return (yield)


def read_until_closed(char: str, emit: Emit) -> Scan[None]:
    """Reads the string, the object or the array that begins with `char`, to its last character."""
    depth, in_string, escaped = 0, False, False
    while True:
        require(in_string or char != "<")
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
            return
        char = yield


def read_string(emit: Emit) -> Scan[None]:
    """Reads a JSON string after its opening quote, to the closing one, and emits the decoded text.

    Half of a surrogate pair becomes U+FFFD, because an answer cannot contain it.
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


def _escape() -> Scan[str]:
    char = yield
    if char != "u":
        require(char in _ESCAPES)
        return _ESCAPES[char]
    digits = ""
    while len(digits) < 4:
        char = yield
        require(char in _HEX)
        digits += char
    return chr(int(digits, 16))

"""Recognition of tool calls in streamed text, in the formats that models are trained on.

Purpose: a model calls a function by writing JSON, XML or Python. A `ToolCallParser` takes the answer's text in pieces
of any size and separates content from calls; the merged result does not depend on how the text is divided. Lifecycle:
one parser per completion; `feed` any number of times, `finish` once, nothing after it. Failure: none. A model may write
any text. Text that is not a call, or calls a function that was not offered, is returned verbatim as content. A call has
begun once it has been reported; if it is malformed after that, it ends there, and the following text is content. Cost:
linear in the text. Undecided text is held back and examined once. Internally, a parser is a coroutine that receives one
character at a time, so that each grammar reads from top to bottom. Its parts follow one convention: a part that cannot
use a character returns it, and it is the last one in `_held`.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from typing import Any, ClassVar, TypeVar

from penstock.server.openai.answer_parts import Part, PartList

MAX_TOOL_CALLS = 128
"""Maximum calls in one answer; the text of further calls is content."""

WHITESPACE = " \t\r\n"

_T = TypeVar("_T")
Scan = Generator[None, str, _T]
Emit = Callable[[str], object]
Tools = Mapping[str, Mapping[str, Any]]
"""The functions that are offered: name -> JSON schema of the arguments."""
MakeId = Callable[..., str]
"""Returns 32 hexadecimal digits that are unique to numbers within an answer."""
_ID_CHARACTERS = 24


def random_id(*_: object) -> str:
    return secrets.token_hex(16)


class Malformed(Exception):  # noqa: N818
    """The last character cannot be part of a call. Used for control flow inside this folder; never propagates out of a
    parser.
    """


class ToolCallParser(ABC):
    """Parses one completion; the formats differ in `_answer`, which is sent the text one character at a time.

    `num_calls` counts the calls begun so far. `SEPARATORS` are the characters that may stand between calls, and are
    not content there.
    """

    SEPARATORS: ClassVar[str] = WHITESPACE

    def __init__(self, tools: Tools, make_id: MakeId) -> None:
        self.num_calls = 0
        self._id_of = make_id
        self._ids: set[str] = set()
        self._tools = tools
        self._held: list[str] = []  # characters not yet known to be content or part of a call
        self._separating = True  # only separators since the last call, or the start
        self._in_call = False  # a call has begun and is still open
        self._parts = PartList()
        self._scan = self._answer()
        next(self._scan)

    @abstractmethod
    def _answer(self) -> Scan[None]:
        """Reads the whole answer and never returns."""

    def feed(self, text: str) -> list[Part]:
        """Takes the completion's next piece, which may be empty, and returns its content and calls."""
        for char in text:
            self._held.append(char)
            self._scan.send(char)
        return self._parts.take()

    def finish(self) -> list[Part]:
        """Ends the completion: held text is content, unless it only separates calls."""
        self._scan.close()
        separator = self.num_calls and self._separating and not "".join(self._held).strip(self.SEPARATORS)
        if not self._in_call and not separator:
            self._release()
        return self._parts.take()

    @property
    def _may_call(self) -> bool:
        return self.num_calls < MAX_TOOL_CALLS

    def _release(self, keep: int = 0) -> None:
        """Releases held text as content, except its last `keep` characters."""
        cut = len(self._held) - keep
        self._parts.add_text("".join(self._held[:cut]))
        del self._held[:cut]
        self._separating = False

    def _content_before(self, length: int) -> str:
        """Returns the part of the first `length` held characters that is content even if a call follows."""
        return "" if self._separating else "".join(self._held[:length]).rstrip("\n")

    def _begin(self, name: str, content: str = "", call_id: str | None = None) -> None:
        """Begins a call of `name`; `content` is the text before it."""
        self._parts.add_text(content)
        self._held.clear()
        self._separating = self._in_call = True
        if call_id is None or call_id in self._ids:
            # A model may repeat an id, but results refer to calls by id.
            call_id = self._make_id()
        self._ids.add(call_id)
        self._parts.begin_call(self.num_calls, call_id, name)
        self.num_calls += 1

    def _emit(self, arguments: str) -> None:
        """Adds the next piece of the open call's arguments."""
        self._parts.add_arguments(self.num_calls - 1, arguments)
        self._held.clear()

    def _end(self) -> None:
        """Completes the open call."""
        self._held.clear()
        self._in_call = False

    def _break_off(self) -> str:
        """A call is malformed at the last character: text held before its start is content. Returns the character."""
        if self._in_call:
            del self._held[:-1]
        else:
            self._release(keep=1)
        self._in_call = False
        return self._held[-1]

    def _list(self, read_call: Callable[[str, str], Scan[tuple[bool, str]]], content: str) -> Scan[str]:
        """Reads calls with commas between them, after the opening bracket; returns the first character after the
        closing one, or the one at which the list becomes malformed. `content` is the text before the first call.

        `read_call` takes a call's first character and the text before it; it returns as `_call_after_tag` does.
        """
        char = yield from skip_whitespace((yield))
        while self._may_call:
            is_call, char = yield from read_call(char, content)
            if not is_call:
                break
            content = ""
            char = yield from skip_whitespace(char)
            if char == "]":
                self._held.clear()
                return (yield)
            if char != ",":
                break
            char = yield from skip_whitespace((yield))
        return char

    def _make_id(self) -> str:
        return f"call_{self._id_of(self.num_calls)[:_ID_CHARACTERS]}"


class TaggedParser(ToolCallParser):
    """Parses any number of calls anywhere in the text, each after the tag `BEGIN`.

    The tags of `OUTER` may come before `BEGIN`, and those of `ENDS` after a call, the last of them after all calls.
    They carry no information, and their absence is no error.
    """

    BEGIN: ClassVar[str]
    OUTER: ClassVar[tuple[str, ...]] = ()
    ENDS: ClassVar[tuple[str, ...]] = ()

    def _answer(self) -> Scan[None]:
        has_called = False
        first = self.BEGIN[0]
        char = yield
        while True:
            char = yield from skip_whitespace(char)
            if char != first:
                self._release()
                char = yield
                continue
            before = len(self._held) - 1
            ends = self.ENDS if has_called else ()
            tag, char = yield from read_tag(first, self.BEGIN, *self.OUTER, *ends)
            if tag in ends:
                has_called = tag != self.ENDS[-1]
                self._held.clear()
                self._separating = True
                char = yield
                continue
            if tag in self.OUTER:
                char = yield from skip_whitespace((yield))
                tag, char = ("", char) if char != first else (yield from read_tag(first, self.BEGIN))
            if not tag:
                self._release(keep=1)
            elif not self._may_call:
                has_called = False
                self._release()
                char = yield
            else:
                has_called, char = yield from self._call_after_tag(self._content_before(before))

    @abstractmethod
    def _call_after_tag(self, content: str) -> Scan[tuple[bool, str]]:
        """Reads a call after `BEGIN`; returns whether it was one, and the next character. `content` is the held text
        that is content even if a call follows.
        """


def require(condition: bool) -> None:
    if not condition:
        raise Malformed


def ignore(text: str) -> None:
    """Discards a value."""


def skip_whitespace(char: str) -> Scan[str]:
    while char in WHITESPACE:
        char = yield
    return char


def read_tag(first: str, *tags: str) -> Scan[tuple[str, str]]:
    """Reads on after `first`; returns the tag that it opens, or "" and the first character that matches none."""
    read = first
    while read not in tags:
        char = yield
        if not any(tag.startswith(read + char) for tag in tags):
            return "", char
        read += char
    return read, ""


def expect(text: str, char: str) -> Scan[None]:
    """Reads exactly this text, which `char` should open. Raises `Malformed`."""
    require(char == text[0])
    for wanted in text[1:]:
        require((yield) == wanted)


def read_name(char: str, ends: str) -> Scan[tuple[str, str]]:
    """Reads a function's name; returns it without whitespace around it, and which of `ends` came after it.

    Raises `Malformed` if it is empty or too long.
    """
    name: list[str] = []
    while char not in ends:
        require(len(name) < _MAX_NAME_CHARACTERS and char not in "\r\n")
        name.append(char)
        char = yield
    text = "".join(name).strip()
    require(bool(text))
    return text, char


_MAX_NAME_CHARACTERS = 256

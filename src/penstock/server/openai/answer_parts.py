"""The parts of an answer in order: reasoning, text and tool calls, complete or received so far."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Text:
    """The next piece of content."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The next piece of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """The part of one call contained in a piece of text. `index` counts the answer's calls from 0. `id` and `name` are
    complete and only in the call's first delta. `arguments` is the next piece of the arguments' JSON text.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


Part = Text | Reasoning | ToolCallDelta


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """The parts contained in a piece of text, in order: adjacent parts of one kind are merged, and a call is one
    part.
    """

    parts: tuple[Part, ...] = ()

    @property
    def content(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, Text))

    @property
    def reasoning(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, Reasoning))

    @property
    def tool_calls(self) -> tuple[ToolCallDelta, ...]:
        """At most one delta per call, in their order."""
        return tuple(part for part in self.parts if isinstance(part, ToolCallDelta))


class PartList:
    """Collects parts until they are taken. Joins texts once, so that the cost is linear in them."""

    def __init__(self) -> None:
        self._parts: list[tuple[Part, list[str]]] = []  # a part as it began, and the text added since

    def add_text(self, text: str) -> None:
        self._add(Text(""), text)

    def add_reasoning(self, text: str) -> None:
        self._add(Reasoning(""), text)

    def begin_call(self, index: int, call_id: str, name: str) -> None:
        self._parts.append((ToolCallDelta(index, call_id, name), []))

    def add_arguments(self, index: int, arguments: str) -> None:
        """Continues the call that began last."""
        last = self._parts[-1][0] if self._parts else None
        if isinstance(last, ToolCallDelta) and last.index == index:
            self._parts[-1][1].append(arguments)
        else:
            self._parts.append((ToolCallDelta(index), [arguments]))

    def take(self) -> AnswerDelta:
        parts = tuple(_joined(part, "".join(pieces)) for part, pieces in self._parts)
        self._parts.clear()
        return AnswerDelta(parts)

    def _add(self, part: Part, text: str) -> None:
        if not text:
            return
        if self._parts and type(self._parts[-1][0]) is type(part):
            self._parts[-1][1].append(text)
        else:
            self._parts.append((part, [text]))


def _joined(part: Part, text: str) -> Part:
    return replace(part, arguments=text) if isinstance(part, ToolCallDelta) else replace(part, text=text)

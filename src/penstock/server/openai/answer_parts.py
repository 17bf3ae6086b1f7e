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


class PartList:
    """Collects parts until they are taken. Joins texts once, so that the cost is linear in them. Adjacent parts of one
    kind are merged, and a call is one part.
    """

    def __init__(self) -> None:
        self._parts: list[tuple[Part, list[str]]] = []  # a part as it began, and the text added since

    def add_text(self, text: str) -> None:
        if not text:
            return
        if self._parts and isinstance(self._parts[-1][0], Text):
            self._parts[-1][1].append(text)
        else:
            self._parts.append((Text(""), [text]))

    def begin_call(self, index: int, call_id: str, name: str) -> None:
        self._parts.append((ToolCallDelta(index, call_id, name), []))

    def add_arguments(self, index: int, arguments: str) -> None:
        """Continues the call that began last."""
        last = self._parts[-1][0] if self._parts else None
        if isinstance(last, ToolCallDelta) and last.index == index:
            self._parts[-1][1].append(arguments)
        else:
            self._parts.append((ToolCallDelta(index), [arguments]))

    def take(self) -> list[Part]:
        parts = [_joined(part, "".join(pieces)) for part, pieces in self._parts]
        self._parts.clear()
        return parts


def _joined(part: Part, text: str) -> Part:
    return replace(part, arguments=text) if isinstance(part, ToolCallDelta) else replace(part, text=text)

"""Feeds parsers of tool calls, and merges their deltas as a client would."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.server.openai.answer_parts import Part, Text, ToolCallDelta
from penstock.server.openai.tool_calls.parser import ToolCallParser, Tools
from penstock.server.openai.tool_calls.registry import FORMATS


class _AnyTool(Mapping[str, Any]):
    """Offers every function, with an empty schema."""

    def __getitem__(self, name: str) -> Mapping[str, Any]:
        return {}

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


ANY_TOOL = _AnyTool()


@dataclass
class Streamed:
    """A client's view of a stream: the deltas merged."""

    content: str = ""
    ids: list[str] = field(default_factory=list)
    calls: list[tuple[str, str]] = field(default_factory=list)


def content_of(parts: list[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Text))


def calls_of(parts: list[Part]) -> list[ToolCallDelta]:
    return [part for part in parts if isinstance(part, ToolCallDelta)]


def stream(parser: ToolCallParser, pieces: list[str]) -> Streamed:
    """Feeds the pieces and merges the deltas, checking the order and form of each."""
    merged = Streamed()
    for delta in [*map(parser.feed, pieces), parser.finish()]:
        merged.content += content_of(delta)
        indices = [call.index for call in calls_of(delta)]
        assert indices == sorted(set(indices))
        for call in calls_of(delta):
            if call.index == len(merged.calls):
                assert re.fullmatch(r"call_[0-9a-f]{24}|[0-9A-Za-z]{9}|functions\..+:[0-9]+", call.id or "")
                assert call.name
                merged.ids.append(call.id)
                merged.calls.append((call.name, call.arguments))
            else:
                assert call.index == len(merged.calls) - 1
                assert call.id is None
                assert call.name is None
                merged.calls[-1] = (merged.calls[-1][0], merged.calls[-1][1] + call.arguments)
    assert len(set(merged.ids)) == len(merged.calls) == parser.num_calls
    return merged


def merged(deltas: Iterable[list[Part]]) -> tuple[str, list[list[str]]]:
    """Returns the content, and each call's name and arguments."""
    content, calls = "", list[list[str]]()
    for delta in deltas:
        content += content_of(delta)
        for call in calls_of(delta):
            if call.name is not None:
                calls.append([call.name, ""])
            calls[-1][1] += call.arguments
    return content, calls


def assert_any_split_agrees(name: str, text: str, cuts: list[int], tools: Tools = ANY_TOOL) -> Streamed:
    """Feeds the text whole, by character and cut at `cuts`; the results are the same."""
    borders = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(borders)]
    whole, *others = [stream(FORMATS[name]().parser(tools), split) for split in ([text], list(text), pieces)]
    for other in others:
        assert (other.content, other.calls) == (whole.content, whole.calls)
    # A stream that continues elsewhere reads its beginning at once: it must have given as much as its pieces had.
    for end in borders[1:-1][:3]:
        at_once, by_character = (FORMATS[name]().parser(tools) for _ in range(2))
        given = [merged([at_once.feed(text[:end])]), merged(map(by_character.feed, text[:end]))]
        assert given[0] == given[1], text[:end]
    # A complete text gives complete calls: one delta per call, with its name.
    deltas = calls_of(FORMATS[name]().parser(tools).feed(text))
    assert [(call.name, call.arguments) for call in deltas] == whole.calls
    return whole

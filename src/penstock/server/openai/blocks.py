"""An answer as a sequence of blocks, each of one kind, shared by all APIs that answer conversations."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from penstock.messages.outputs import CompletionOutput
from penstock.server.openai.answer_parts import Part, Reasoning, ToolCallDelta
from penstock.server.openai.conversation import Chat
from penstock.server.openai.generation import Cursor, Delta


class BlockKind(enum.Enum):
    REASONING = enum.auto()
    TEXT = enum.auto()
    CALL = enum.auto()


@dataclass(slots=True)
class Block:
    """One block so far. `text` is the reasoning, the content, or the JSON of a call's arguments. `call_index` counts
    the answer's calls from 0.
    """

    kind: BlockKind
    index: int
    call_index: int = 0
    call_id: str = ""
    name: str = ""
    _pieces: list[str] = field(default_factory=list[str])

    @property
    def text(self) -> str:
        if len(self._pieces) > 1:
            self._pieces[:] = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def grow(self, text: str) -> None:
        self._pieces.append(text)


@dataclass(frozen=True, slots=True)
class Opened:
    """A new, empty block."""

    block: Block


@dataclass(frozen=True, slots=True)
class Grew:
    """`text` was appended to a block."""

    block: Block
    text: str


@dataclass(frozen=True, slots=True)
class Closed:
    """A block is complete."""

    block: Block


BlockEvent = Opened | Grew | Closed


@dataclass(frozen=True, slots=True)
class Update:
    """The new part of a completion, as the engine's output and as changes of blocks."""

    delta: Delta
    events: list[BlockEvent]

    def text(self, kind: BlockKind) -> str:
        """Returns the text that blocks of this kind have gained."""
        return "".join(each.text for each in self.events if isinstance(each, Grew) and each.block.kind is kind)


class AnswerBlocks:
    """Reads one completion of a conversation's answer into blocks, at once or as it is generated. `blocks` are the
    blocks so far; `completion` is the engine's output so far.
    """

    def __init__(self, chat: Chat, number: int = 0) -> None:
        self.blocks: list[Block] = []
        self.generation = chat.generation
        self._number = number
        self._reader = chat.reader(number)
        self._cursor = Cursor()
        self._is_open = False

    @property
    def completion(self) -> CompletionOutput:
        return self.generation.outputs[0].outputs[self._number]

    @property
    def called(self) -> bool:
        """Whether the answer contains a call."""
        return self._reader.called

    def skip_given(self) -> None:
        """Reads the output that the request continues, which is not new to its reader. Called first, if at all."""
        text = self._cursor.skip_given(self.completion)
        if self.completion.num_given_tokens:
            for _ in self._add(self._reader.read(text, is_last=False)):
                pass

    def advance(self) -> Update | None:
        """Reads the new part of the completion; None if there is none."""
        delta = self._cursor.advance(self.completion)
        return None if delta is None else Update(delta, list(self._events(delta)))

    def _events(self, delta: Delta) -> Iterator[BlockEvent]:
        is_last = delta.finish_reason is not None
        yield from self._add(self._reader.read(delta.text, is_last))
        if is_last:
            yield from self._close()

    def _add(self, parts: list[Part]) -> Iterator[BlockEvent]:
        for part in parts:
            if not self._continues(part):
                yield from self._close()
                self.blocks.append(self._make_block(part))
                self._is_open = True
                yield Opened(self.blocks[-1])
            text = part.arguments if isinstance(part, ToolCallDelta) else part.text
            if text:
                self.blocks[-1].grow(text)
                yield Grew(self.blocks[-1], text)

    def _continues(self, part: Part) -> bool:
        """Whether a part continues the open block."""
        return self._is_open and _kind(part) is self.blocks[-1].kind and getattr(part, "name", None) is None

    def _make_block(self, part: Part) -> Block:
        index = len(self.blocks)
        if isinstance(part, ToolCallDelta):
            return Block(BlockKind.CALL, index, part.index, part.id or "", part.name or "")
        return Block(_kind(part), index)

    def _close(self) -> Iterator[BlockEvent]:
        if self._is_open:
            self._is_open = False
            yield Closed(self.blocks[-1])


def _kind(part: Part) -> BlockKind:
    if isinstance(part, ToolCallDelta):
        return BlockKind.CALL
    return BlockKind.REASONING if isinstance(part, Reasoning) else BlockKind.TEXT


def text_of(blocks: list[Block], kind: BlockKind) -> str:
    """Returns the text of all blocks of this kind."""
    return "".join(block.text for block in blocks if block.kind is kind)


def calls_of(blocks: list[Block]) -> list[dict[str, Any]]:
    """Returns the calls in the form of chat completions."""
    return [
        {"id": block.call_id, "type": "function", "function": {"name": block.name, "arguments": block.text}}
        for block in blocks
        if block.kind is BlockKind.CALL
    ]


def assistant_message(blocks: list[Block]) -> dict[str, Any]:
    """Returns the answer as a conversation turn in the form of chat completions."""
    message: dict[str, Any] = {"role": "assistant", "content": text_of(blocks, BlockKind.TEXT)}
    if reasoning := text_of(blocks, BlockKind.REASONING):
        message["reasoning_content"] = reasoning
    if calls := calls_of(blocks):
        message["tool_calls"] = calls
    return message

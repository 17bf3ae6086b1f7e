"""An answer as a sequence of blocks, each of one kind, shared by the APIs that answer in items or blocks."""

from __future__ import annotations

import enum
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from penstock.messages.outputs import CompletionOutput
from penstock.server.openai.answer_parts import AnswerDelta, Part, Reasoning, ToolCallDelta
from penstock.server.openai.chat import Chat
from penstock.server.openai.generation import Cursor


class BlockKind(enum.Enum):
    REASONING = enum.auto()
    TEXT = enum.auto()
    CALL = enum.auto()


@dataclass(slots=True)
class Block:
    """One block so far. `text` is the reasoning, the content, or the JSON of a call's arguments."""

    kind: BlockKind
    index: int
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


class AnswerBlocks:
    """Reads a conversation's only completion into blocks, at once or as it is generated. `blocks` are the blocks so
    far; `completion` is the engine's output so far.
    """

    def __init__(self, chat: Chat) -> None:
        self.blocks: list[Block] = []
        self.generation = chat.generation
        self._reader = chat.reader()
        self._cursor = Cursor()
        self._is_open = False

    @property
    def completion(self) -> CompletionOutput:
        return self.generation.outputs[0].outputs[0]

    @property
    def called(self) -> bool:
        """Whether the answer contains a call."""
        return self._reader.called

    def read_whole(self) -> list[Block]:
        """The blocks of a finished completion."""
        list(self._advance())
        return self.blocks

    async def stream(self) -> AsyncGenerator[list[BlockEvent], None]:
        """Yields the changes of every update, at least one and possibly empty. Raises the engine's errors."""
        async with aclosing(self.generation.updates()) as updates:
            async for _ in updates:
                yield list(self._advance())

    def _advance(self) -> Iterator[BlockEvent]:
        delta = self._cursor.advance(self.completion)
        if delta is None:
            return
        is_last = delta.finish_reason is not None
        yield from self._add(self._reader.read(delta.text, is_last))
        if is_last:
            yield from self._close()

    def _add(self, delta: AnswerDelta) -> Iterator[BlockEvent]:
        for part in delta.parts:
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
            return Block(BlockKind.CALL, index, part.id or "", part.name or "")
        return Block(_kind(part), index)

    def _close(self) -> Iterator[BlockEvent]:
        if self._is_open:
            self._is_open = False
            yield Closed(self.blocks[-1])


def _kind(part: Part) -> BlockKind:
    if isinstance(part, ToolCallDelta):
        return BlockKind.CALL
    return BlockKind.REASONING if isinstance(part, Reasoning) else BlockKind.TEXT


def assistant_message(blocks: list[Block]) -> dict[str, Any]:
    """Returns the answer as a conversation turn in the form of chat completions."""
    content = "".join(block.text for block in blocks if block.kind is BlockKind.TEXT)
    reasoning = "".join(block.text for block in blocks if block.kind is BlockKind.REASONING)
    calls = [
        {"id": block.call_id, "type": "function", "function": {"name": block.name, "arguments": block.text}}
        for block in blocks
        if block.kind is BlockKind.CALL
    ]
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message

"""The engine's KV memory as a connector sees it: its layout, and access to bytes of blocks by group or by layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from penstock.messages.kv_layout import KVLayout

Place = tuple[int, int]
"""(group, block id)."""

Parts = Sequence[memoryview]
"""A block's bytes, layer after layer."""

Take = Callable[[int, Parts], None]
"""A function that takes a block's index in `places` and its parts, which are valid only during the call."""


class Transfer(Protocol):
    """A transfer of blocks in progress."""

    def done(self) -> bool: ...

    def result(self) -> None:
        """Waits for its end; raises the error if it failed."""
        ...


class KVCacheView(Protocol):
    """One rank's cache. `layout` gives the location of all KV; the methods move bytes of blocks.

    A block's bytes are those of every layer of its group one after the other, in the layout's order.
    """

    layout: KVLayout

    def region_memory(self) -> Sequence[memoryview]:
        """Returns the bytes of the layout's regions, in order. Raises ConfigError if the host cannot access them."""
        ...

    def block_parts(self, group: int, block_id: int) -> Sequence[memoryview]:
        """Returns the block's current bytes, layer after layer, for immediate use.

        They are the cache itself if the host can access it, and may then be written; otherwise they are a copy.
        """
        ...

    def read_blocks(self, places: Sequence[Place], take: Take) -> Transfer:
        """Calls `take` for each block in order, with its bytes as the steps launched so far leave them.

        Steps launched later have no effect. The calls may come from another thread, until the transfer is done.
        """
        ...

    def write_blocks(self, places: Sequence[Place], data: Sequence[Parts], take: Take) -> Transfer:
        """Overwrites the blocks, after the steps launched so far, and calls `take` with each block's new content.

        `data` is each block's bytes, as consecutive pieces of any sizes, which must not change until the transfer is
        done. Steps launched after that find the blocks written.
        """
        ...

    def read_layer(self, layer_name: str, block_id: int, into: memoryview) -> None:
        """Copies one layer's bytes of a block."""
        ...

    def write_layer(self, layer_name: str, block_id: int, data: memoryview) -> None:
        """Overwrites one layer's bytes of a block."""
        ...


class Done:
    """A transfer that has ended."""

    def done(self) -> bool:
        return True

    def result(self) -> None: ...


DONE = Done()


def gather(parts: Parts, into: memoryview) -> None:
    """Copies the parts into `into`, one after the other."""
    start = 0
    for part in parts:
        into[start : start + len(part)] = part
        start += len(part)


def read_now(view: KVCacheView, places: Sequence[Place], take: Take) -> Transfer:
    """Implements `read_blocks` for memory that the host can access."""
    for number, place in enumerate(places):
        take(number, view.block_parts(*place))
    return DONE


def copy(pieces: Parts, parts: Parts) -> None:
    """Copies the bytes of the pieces, one after the other, over those of the parts, which have the same total size."""
    rest, open_parts = memoryview(b""), iter(parts)
    for piece in pieces:
        while piece:
            rest = rest or next(open_parts)
            count = min(len(piece), len(rest))
            rest[:count] = piece[:count]
            piece, rest = piece[count:], rest[count:]
    assert not rest and next(open_parts, None) is None, "the pieces are fewer bytes than the parts"


def write_now(view: KVCacheView, places: Sequence[Place], data: Sequence[Parts], take: Take) -> Transfer:
    """Implements `write_blocks` for memory that the host can access."""
    for number, (place, pieces) in enumerate(zip(places, data, strict=True)):
        parts = view.block_parts(*place)
        copy(pieces, parts)
        take(number, parts)
    return DONE

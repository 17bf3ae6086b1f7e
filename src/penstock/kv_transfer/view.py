"""The engine's KV memory as a connector sees it: its layout, and bytes of blocks by group or by layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from penstock.messages.kv_layout import KVLayout

Place = tuple[int, int]
"""(group, block id)."""

Parts = Sequence[memoryview]
"""A block's bytes, a layer's after the other's."""

Take = Callable[[int, Parts], None]
"""Is given the number of a block among those that were asked for, and its parts, which are good during the call."""


class Transfer(Protocol):
    """Blocks on their way."""

    def done(self) -> bool: ...

    def result(self) -> None:
        """Waits for its end; raises what ended it before its time."""
        ...


class KVCacheView(Protocol):
    """One rank's cache. `layout` says where everything lies; the methods move bytes of blocks.

    A block's bytes are those of every layer of its group one after the other, in the layout's order.
    """

    layout: KVLayout

    def region_memory(self) -> Sequence[memoryview]:
        """The bytes of the layout's regions, in its order. Raises ConfigError where the host cannot see them."""
        ...

    def block_parts(self, group: int, block_id: int) -> Sequence[memoryview]:
        """The block's bytes, a layer's after the other's, as they lie in the cache now, to be used at once.

        They are the cache itself where the host can see it, and may be written; elsewhere they are a copy.
        """
        ...

    def read_blocks(self, places: Sequence[Place], take: Take) -> Transfer:
        """Has `take` called for each block in order, with its bytes as the steps launched so far leave them.

        What is launched afterwards changes nothing. The calls may come from another thread, until the transfer is done.
        """
        ...

    def write_blocks(self, places: Sequence[Place], data: Sequence[Parts], take: Take) -> Transfer:
        """Overwrites the blocks, behind the steps launched so far, and shows `take` what each holds afterwards.

        `data` is each block's bytes, in pieces of any sizes one after the other, to be left alone until the transfer is
        done. Steps that are launched by then find the blocks written.
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
    """Copies the parts one after the other."""
    start = 0
    for part in parts:
        into[start : start + len(part)] = part
        start += len(part)


def read_now(view: KVCacheView, places: Sequence[Place], take: Take) -> Transfer:
    """`read_blocks` of memory that the host can see."""
    for number, place in enumerate(places):
        take(number, view.block_parts(*place))
    return DONE


def copy(pieces: Parts, parts: Parts) -> None:
    """Copies the bytes of the pieces, one after the other, over those of the parts, which are as many."""
    rest, open_parts = memoryview(b""), iter(parts)
    for piece in pieces:
        while piece:
            rest = rest or next(open_parts)
            count = min(len(piece), len(rest))
            rest[:count] = piece[:count]
            piece, rest = piece[count:], rest[count:]
    assert not rest and next(open_parts, None) is None, "the pieces are fewer bytes than the parts"


def write_now(view: KVCacheView, places: Sequence[Place], data: Sequence[Parts], take: Take) -> Transfer:
    """`write_blocks` of memory that the host can see."""
    for number, (place, pieces) in enumerate(zip(places, data, strict=True)):
        parts = view.block_parts(*place)
        copy(pieces, parts)
        take(number, parts)
    return DONE

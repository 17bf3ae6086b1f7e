"""The blocks that an instance holds according to its published KV events (docs/KV_EVENTS.md). No sockets.

The events are a hint: an error or a gap in a view costs a prefix hit and nothing else.
"""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.utils.held_blocks import BlockHash, HeldBlocks
from penstock.utils.logging import get_logger

logger = get_logger(__name__)

# The memory that the model computes in. KV in other media has to be loaded first.
_MEDIA = (None, "GPU")


class _Stored(msgspec.Struct, tag_field="type", tag="BlockStored"):
    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    medium: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class _Removed(msgspec.Struct, tag_field="type", tag="BlockRemoved"):
    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None


class _Cleared(msgspec.Struct, tag_field="type", tag="AllBlocksCleared"):
    pass


class _Batch(msgspec.Struct, array_like=True):
    timestamp: float
    events: list[_Stored | _Removed | _Cleared]


_decode = msgspec.msgpack.Decoder(_Batch).decode


class KVView:
    """The view of one instance: `held` has its blocks. `receive` takes published batches, and returns the number of the
    first missing one. `take` takes replayed batches, and then the batch that showed the gap; if some are missing even
    then, the view is reset.
    """

    def __init__(self) -> None:
        self.held = HeldBlocks()
        self._next = 0
        self._newest = -1

    @property
    def next_number(self) -> int:
        """The number of the batch to be applied next."""
        return self._next

    def restart(self) -> None:
        """Called when the instance is a new process."""
        self.held.clear()
        self._next, self._newest = 0, -1

    def receive(self, number: int, payload: bytes) -> int | None:
        """Applies a published batch; returns None, or else the number of the first batch missing before it."""
        if number <= self._newest:
            self.restart()
        self._newest = number
        if number > self._next:
            return self._next
        self.take(number, payload)
        return None

    def take(self, number: int, payload: bytes) -> None:
        """Applies a batch even if some before it are lost: the blocks that they removed are then unknown."""
        if number < self._next:
            return
        if number > self._next:
            self.held.clear()
            self._next = number
        self._apply(payload)

    # ---- Events ----

    def _apply(self, payload: bytes) -> None:
        self._next += 1
        try:
            batch = _decode(payload)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            logger.warning("invalid KV events: %s", error)
            self.held.clear()
            return
        for event in batch.events:
            if isinstance(event, _Cleared):
                self.held.clear()
            elif event.medium in _MEDIA:
                self._change(event)

    def _change(self, event: _Stored | _Removed) -> None:
        if isinstance(event, _Removed):
            self.held.remove(event.block_hashes, event.group_idx or 0)
        else:
            self.held.store(event)

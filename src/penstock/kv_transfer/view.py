"""The engine's KV memory as a connector sees it: bytes of blocks, by group or by layer, whatever holds them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from penstock.messages.kv_cache_spec import KVCacheConfig


class KVCacheView(Protocol):
    """One rank's cache. A block's bytes are those of every layer of its group one after the other, in the order of
    `layer_names`, the layers of a speculator included."""

    config: KVCacheConfig

    def layer_names(self, group: int) -> tuple[str, ...]:
        """The group's layers and those attached to it."""
        ...

    def block_bytes(self, group: int) -> int:
        """Bytes of one block in all layers of the group."""
        ...

    def layer_bytes(self, layer_name: str) -> int:
        """Bytes of one block in one layer."""
        ...

    def read_block(self, group: int, block_id: int, into: memoryview) -> None:
        """Copies the block's bytes to `into`, which is as long as they are."""
        ...

    def block_parts(self, group: int, block_id: int) -> Sequence[memoryview]:
        """The block's bytes as they lie in the cache now, to be read at once; a copy where the host cannot see them."""
        ...

    def write_block(self, group: int, block_id: int, data: memoryview) -> None:
        """Overwrites the block's bytes."""
        ...

    def read_layer(self, layer_name: str, block_id: int, into: memoryview) -> None: ...

    def write_layer(self, layer_name: str, block_id: int, data: memoryview) -> None: ...

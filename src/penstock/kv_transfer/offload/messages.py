"""The messages from the scheduler side of the `OffloadingConnector` to the worker sides."""

from __future__ import annotations

import msgspec

from penstock.messages.kv_layout import MemoryRegion
from penstock.messages.kv_transfer import ConnectorSetup, KVConnectorMetadata, TransferId
from penstock.utils.wire import register_kind


class StoreBlock(msgspec.Struct, frozen=True):
    """Engine block -> chunk; `is_attested` requests the digest of its bytes."""

    group: int
    block_id: int
    chunk_id: int
    is_attested: bool


class LoadBlock(msgspec.Struct, frozen=True):
    """Chunk -> engine block, which is block `index` of its request; checked against the digest if there is one."""

    group: int
    block_id: int
    chunk_id: int
    index: int
    digest: bytes | None


class OffloadStore(msgspec.Struct, frozen=True):
    job_id: TransferId
    blocks: tuple[StoreBlock, ...]


class OffloadLoad(msgspec.Struct, frozen=True):
    job_id: TransferId
    blocks: tuple[LoadBlock, ...]


@register_kind
class OffloadMetadata(KVConnectorMetadata, msgspec.Struct, frozen=True, tag=True):
    """Stores are read before the step writes anything; loads are written in parallel with it. Of `cancelled` loads,
    which may be among `loads`, no further block is copied.
    """

    stores: tuple[OffloadStore, ...] = ()
    loads: tuple[OffloadLoad, ...] = ()
    cancelled: tuple[TransferId, ...] = ()


class StateChunks(msgspec.Struct, frozen=True):
    """The chunks for the blocks of the `group` of recurrent layers, each of which holds a state."""

    group: int
    num_chunks: int
    chunk_bytes: int


@register_kind
class OffloadSetup(ConnectorSetup, msgspec.Struct, frozen=True, tag=True):
    """The memory of the CPU tier, with chunks for blocks of tokens, and for states if there are any."""

    memory: MemoryRegion
    chunk_bytes: int
    states: StateChunks | None = None

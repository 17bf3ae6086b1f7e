"""What the scheduler's part of the `OffloadingConnector` tells the workers' parts."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.messages.kv_transfer import KVConnectorMetadata, TransferId


@dataclass(frozen=True, slots=True)
class StoreBlock:
    """Engine block -> chunk; `is_attested` asks for the digest of its bytes."""

    group: int
    block_id: int
    chunk_id: int
    is_attested: bool


@dataclass(frozen=True, slots=True)
class LoadBlock:
    """Chunk -> engine block, which is block `index` of its request; checked against the digest where there is one."""

    group: int
    block_id: int
    chunk_id: int
    index: int
    digest: bytes | None


@dataclass(frozen=True, slots=True)
class OffloadStore:
    job_id: TransferId
    blocks: tuple[StoreBlock, ...]


@dataclass(frozen=True, slots=True)
class OffloadLoad:
    job_id: TransferId
    blocks: tuple[LoadBlock, ...]


@dataclass(frozen=True, slots=True)
class OffloadMetadata(KVConnectorMetadata):
    """Stores are read before the step writes anything, loads are written beside it."""

    stores: tuple[OffloadStore, ...] = ()
    loads: tuple[OffloadLoad, ...] = ()

"""What an engine tells others of the KV blocks that it holds, in vLLM's terms (`vllm/distributed/kv_events.py`).

A block is named by its hash, which stands for all tokens from the start of the prompt to the block's end, and by the KV
group and the medium that hold it. The hashes are whole here; `kv_transfer.events` shortens them for the wire.
"""

from __future__ import annotations

from dataclasses import dataclass

MEDIUM_GPU = "GPU"
"""The memory that the model computes in, whatever the device."""
MEDIUM_CPU = "CPU"
MEDIUM_STORAGE = "STORAGE"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStored:
    """Blocks one behind the other that can be found from now on.

    `token_ids` are the tokens of these blocks, `block_size` to each; `parent_block_hash` is the block before the first,
    None at the start of a prompt. `extra_keys` has, for each block, what its hash covers beside these tokens: the cache
    salt in a prompt's first block, and then the tokens ahead (`core.block_hash`) as text.
    """

    block_hashes: tuple[bytes, ...]
    parent_block_hash: bytes | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: int | None = None
    medium: str = MEDIUM_GPU
    lora_name: str | None = None
    extra_keys: tuple[tuple[str, ...] | None, ...] | None = None
    group_idx: int = 0
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRemoved:
    """Blocks of one group that cannot be found any more."""

    block_hashes: tuple[bytes, ...]
    medium: str = MEDIUM_GPU
    group_idx: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AllBlocksCleared:
    """Nothing is held on any medium: whatever was told before is void."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared

"""Events about the KV blocks that an engine holds, in vLLM's terms (`vllm/distributed/kv_events.py`).

A block is identified by its hash, which covers all tokens from the start of the prompt to the block's end, and by its
KV group and medium. The hashes are complete here; `engine.kv_events` shortens them for the wire.
"""

from __future__ import annotations

import msgspec

MEDIUM_GPU = "GPU"
"""The memory in which the model computes, on any device."""
MEDIUM_CPU = "CPU"
MEDIUM_STORAGE = "STORAGE"


class BlockStored(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """Consecutive blocks that entered the prefix cache. `token_ids` are the tokens of these blocks, `block_size` each;
    `parent_block_hash` is that of the block before the first, None at the start of a prompt. `extra_keys` has, for each
    block, what its hash covers in addition to these tokens: the cache salt in a prompt's first block, and then the
    tokens ahead (`core.block_hash`) as text.
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


class BlockRemoved(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """Blocks of one group that left the prefix cache."""

    block_hashes: tuple[bytes, ...]
    medium: str = MEDIUM_GPU
    group_idx: int = 0


class AllBlocksCleared(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """No blocks are held on any medium: all earlier events are void."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared

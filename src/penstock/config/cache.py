"""The size of the KV cache and what it keeps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The KV cache's budget: a number of blocks, or bytes, or a share of the device's memory, in that order.

    `num_sharers` engines divide that share equally. If there are recurrent layers, `state_share` of the cache holds
    states; they are kept every `checkpoint_interval` tokens, None for a default by their size.
    """

    block_size: int
    enable_prefix_caching: bool
    gpu_memory_utilization: float
    kv_cache_memory: int | None
    num_blocks_override: int | None
    state_share: float = 0.5
    checkpoint_interval: int | None = None
    num_sharers: int = 1

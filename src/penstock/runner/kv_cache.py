"""The KV cache as tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch

from penstock.messages.kv_cache_spec import DTYPE_BYTES, KVCacheConfig, KVCacheSpec
from penstock.utils.shared_memory import SharedMemory

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_BYTES}


@dataclass(frozen=True, slots=True)
class KVCache:
    """One rank's allocated cache: one tensor per layer name; layers at the same position in their groups share memory.

    `shared` is the named memory that contains tensors, by the address of their storage.
    """

    config: KVCacheConfig
    tensors: dict[str, torch.Tensor]  # each [num_blocks, 2, num_kv_heads, block_size, head_size]
    shared: Mapping[int, SharedMemory] = field(default_factory=dict[int, SharedMemory])


def allocate_kv_cache(config: KVCacheConfig, allocate: Callable[[int], torch.Tensor]) -> KVCache:
    """Builds the cache from memory of `allocate` (`DeviceParts`), uninitialised: only written KV may be read."""

    def tensor(spec: KVCacheSpec) -> torch.Tensor:
        shape, dtype = _shape(config, spec), TORCH_DTYPES[spec.dtype]
        return allocate(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)

    storages = [tensor(config.shared_spec) for _ in range(config.num_tensors)]
    tensors = {
        name: storages[index].view(_shape(config, group.spec))
        for group in config.groups
        for index, name in enumerate(group.layer_names)
    }
    tensors.update((layer.name, tensor(layer.spec)) for layer in config.attached)
    return KVCache(config, tensors)


def allocate_shared_kv_cache(config: KVCacheConfig, allocate: Callable[[int], SharedMemory]) -> KVCache:
    """Does the same with memory that other processes can map (`DeviceParts.allocate_shared`)."""
    shared: dict[int, SharedMemory] = {}

    def allocate_bytes(num_bytes: int) -> torch.Tensor:
        memory = allocate(num_bytes)
        shared[memory.address] = memory
        return torch.frombuffer(memory.view, dtype=torch.uint8)

    return replace(allocate_kv_cache(config, allocate_bytes), shared=shared)


def _shape(config: KVCacheConfig, spec: KVCacheSpec) -> tuple[int, ...]:
    plane, *others = spec.planes
    assert all((p.num_heads, p.head_size) == (plane.num_heads, plane.head_size) for p in others), spec.planes
    return (config.num_blocks, len(spec.planes), plane.num_heads, config.block_size, plane.head_size)

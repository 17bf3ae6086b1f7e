"""The KV cache as tensors, and as connectors see it: its layout and the bytes of its blocks (`KVCacheView`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch

from penstock.kernels.kv_rows import is_layer_in_pairs
from penstock.messages.kv_cache_spec import DTYPE_BYTES, NULL_BLOCK, KVCacheConfig, KVCacheSpec
from penstock.messages.kv_layout import KVLayout, LayerLayout, MemoryRegion
from penstock.utils.errors import ConfigError
from penstock.utils.shared_memory import SharedMemory

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_BYTES}


@dataclass(frozen=True, slots=True)
class KVCache:
    """One rank's allocated cache: one tensor per layer name; layers at the same position in groups of one size share
    memory.

    `shared` is the named memory that contains tensors, by the address of their storage.
    """

    config: KVCacheConfig
    tensors: dict[str, torch.Tensor]  # each [blocks, planes, num_kv_heads, rows of a block, row_size]
    shared: Mapping[int, SharedMemory] = field(default_factory=dict[int, SharedMemory])

    def fill(self, group: int, block_ids: Iterable[int], byte: int) -> None:
        """Overwrites every byte of a group's blocks in all of its layers, except the null block."""
        config = self.config
        layers = [(name, config.groups[group].spec) for name in config.groups[group].layer_names]
        layers += [(layer.name, layer.spec) for layer in config.attached if layer.group == group]
        block_ids = [block_id for block_id in block_ids if block_id != NULL_BLOCK]
        for name, spec in layers:
            rows = [block_id - config.first_block(spec) for block_id in block_ids]
            self.tensors[name].view(torch.uint8)[rows] = byte


def allocate_kv_cache(config: KVCacheConfig, allocate: Callable[[int], torch.Tensor]) -> KVCache:
    """Builds the cache from memory of `allocate` (`DeviceParts`), uninitialised: only written KV may be read."""

    def tensor(spec: KVCacheSpec) -> torch.Tensor:
        shape, dtype = _shape(config, spec), TORCH_DTYPES[spec.dtype]
        return allocate(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)

    storages = {size: [tensor(spec) for spec in specs] for size, specs in config.shared_specs.items()}
    tensors = {
        name: tensor(spec) if spec.is_recurrent else storages[spec.token_bytes][index].view(_shape(config, spec))
        for spec, names in ((group.spec, group.layer_names) for group in config.groups)
        for index, name in enumerate(names)
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
    num_blocks, num_rows = config.num_blocks_of(spec), spec.rows_per_block(config.block_size)
    return (num_blocks, len(spec.planes), plane.num_heads, num_rows, spec.row_size(plane))


# The axes of the tensors that `allocate_kv_cache` makes.
_AXES = ("block", "kv", "head", "token", "dim")


class TensorKVCacheView:
    """The common part of the views of all devices. A view reads and writes one layer's part of a block, and moves many
    blocks at once; the rest is derived from these.
    """

    def __init__(self, cache: KVCache) -> None:
        self.layout = layout_of(cache)
        groups = range(len(cache.config.groups))
        self._names = [tuple(layer.name for layer in self.layout.layers_of(group)) for group in groups]
        self._first_blocks = {layer.name: layer.first_block for layer in self.layout.layers}
        # [blocks, bytes of a block] per layer, over the same memory.
        self._rows = {name: tensor.view(torch.uint8).flatten(1) for name, tensor in cache.tensors.items()}
        self._num_bytes = {name: rows.shape[1] for name, rows in self._rows.items()}

    def region_memory(self) -> list[memoryview]:
        raise ConfigError("this KV connector moves memory of the host only: run on a CPU, or choose another connector")

    def block_parts(self, group: int, block_id: int) -> list[memoryview]:
        return [self._row(name, block_id) for name in self._names[group]]

    def write_layer(self, layer_name: str, block_id: int, data: memoryview) -> None:
        raise NotImplementedError

    def _place(self, layer_name: str, block_id: int) -> int:
        """Returns the number of a block in its layer's tensor."""
        return block_id - self._first_blocks[layer_name]

    def read_layer(self, layer_name: str, block_id: int, into: memoryview) -> None:
        into[:] = self._row(layer_name, block_id)

    def _row(self, layer_name: str, block_id: int) -> memoryview:
        """Returns a block's bytes in one layer: the memory itself if the host can access it, else a copy."""
        raise NotImplementedError


def layout_of(cache: KVCache) -> KVLayout:
    """Describes the tensors; those of one storage are in one region."""
    places = [(name, n, group.spec) for n, group in enumerate(cache.config.groups) for name in group.layer_names]
    places += [(layer.name, layer.group, layer.spec) for layer in cache.config.attached]
    regions: dict[int, MemoryRegion] = {}
    layers: list[LayerLayout] = []
    for name, group, spec in places:
        tensor = cache.tensors[name]
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        path = cache.shared[address].name if address in cache.shared else None
        region = MemoryRegion(f"kv.{len(regions)}", storage.nbytes(), tensor.device.type, address, path)
        region = regions.setdefault(region.address, region)
        layer = LayerLayout(
            name=name,
            group=group,
            region=region.name,
            offset=tensor.data_ptr() - region.address,
            dtype=str(tensor.dtype).removeprefix("torch."),
            axes=_AXES,
            shape=tuple(tensor.shape),
            strides=tuple(stride * tensor.itemsize for stride in tensor.stride()),
            heads=spec.heads,
            first_block=cache.config.first_block(spec),
            is_recurrent=spec.is_recurrent,
            in_pairs=not spec.is_recurrent and is_layer_in_pairs(tensor),
        )
        layers.append(layer)
    return KVLayout(cache.config.block_size, tuple(regions.values()), tuple(layers))

"""The allocated cache as connectors see it: bytes of blocks (`kv_transfer.view.KVCacheView`)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from penstock.kernels.dispatch import has_gpu_kernels
from penstock.kernels.staging import CudaCopyQueue, NoQueue
from penstock.kv_transfer.view import Place, Take, Transfer, read_now, write_now
from penstock.messages.kv_layout import KVLayout, LayerLayout, MemoryRegion
from penstock.runner.load import KVCache

if TYPE_CHECKING:
    from penstock.runner.gpu.block_transfers import BlockTransfers

# Of the tensors that `allocate_kv_cache` makes.
_AXES = ("block", "kv", "head", "token", "dim")


class TorchKVCacheView:
    """Copies between tensors and host memory.

    On a CPU these are plain memory copies: torch's own would wake its threads for each of them, which takes longer than
    to copy a block of a layer, and so would an index into a tensor. On a GPU `read_blocks` and `write_blocks` go on
    beside the steps; all else waits.
    """

    def __init__(self, cache: KVCache) -> None:
        self.layout = layout_of(cache)
        groups = range(len(cache.config.groups))
        self._names = [tuple(layer.name for layer in self.layout.layers_of(group)) for group in groups]
        # [num_blocks, bytes of a block] per layer, over the same memory.
        self._rows = {name: tensor.view(torch.uint8).flatten(1) for name, tensor in cache.tensors.items()}
        self._num_bytes = {name: rows.shape[1] for name, rows in self._rows.items()}
        # Where the host can see the memory: all rows one after the other.
        self._host = {name: rows.view(-1).numpy().data for name, rows in self._rows.items() if rows.is_cpu}
        # A CPU may stand in for a GPU.
        self._is_remote = any(has_gpu_kernels(rows.device) for rows in self._rows.values())

    def block_parts(self, group: int, block_id: int) -> list[memoryview]:
        return [self._row(name, block_id) for name in self._names[group]]

    def read_blocks(self, places: Sequence[Place], take: Take) -> Transfer:
        return self._transfers.read_blocks(places, take) if self._is_remote else read_now(self, places, take)

    def write_blocks(self, places: Sequence[Place], data: Sequence[memoryview], take: Take) -> Transfer:
        if not self._is_remote:
            return write_now(self, places, data, take)
        return self._transfers.write_blocks(places, data, take)

    @functools.cached_property
    def _transfers(self) -> BlockTransfers:
        """Made when it is first wanted, which in most engines is never: it has a thread, and memory of its own."""
        # Only now: a CPU needs no Triton.
        from penstock.runner.gpu.block_transfers import BlockTransfers

        layers = [[self._rows[name] for name in names] for names in self._names]
        device = layers[0][0].device
        if device.type == "cuda":
            return BlockTransfers(layers, CudaCopyQueue(device))
        # The interpreter is for one thread at a time.
        return BlockTransfers(layers, NoQueue(), waits=True)

    def read_layer(self, layer_name: str, block_id: int, into: memoryview) -> None:
        into[:] = self._row(layer_name, block_id)

    def write_layer(self, layer_name: str, block_id: int, data: memoryview) -> None:
        if layer_name in self._host:
            self._row(layer_name, block_id)[:] = data
        else:
            self._rows[layer_name][block_id].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def _row(self, layer_name: str, block_id: int) -> memoryview:
        """A block's bytes themselves where the host can see them, else a copy."""
        if layer_name not in self._host:
            return self._rows[layer_name][block_id].cpu().numpy().data
        start = block_id * self._num_bytes[layer_name]
        return self._host[layer_name][start : start + self._num_bytes[layer_name]]


def layout_of(cache: KVCache) -> KVLayout:
    """Describes the tensors as they are; those of one storage lie in one region."""
    group_of = {layer.name: layer.group for layer in cache.config.attached}
    group_of |= {name: number for number, group in enumerate(cache.config.groups) for name in group.layer_names}
    names = [name for group in cache.config.groups for name in group.layer_names]
    regions: dict[int, MemoryRegion] = {}
    layers: list[LayerLayout] = []
    for name in (*names, *(layer.name for layer in cache.config.attached)):
        tensor = cache.tensors[name]
        storage = tensor.untyped_storage()
        region = MemoryRegion(f"kv.{len(regions)}", storage.nbytes(), tensor.device.type, storage.data_ptr())
        region = regions.setdefault(region.address, region)
        layer = LayerLayout(
            name=name,
            group=group_of[name],
            region=region.name,
            offset=tensor.data_ptr() - region.address,
            dtype=str(tensor.dtype).removeprefix("torch."),
            axes=_AXES,
            shape=tuple(tensor.shape),
            strides=tuple(stride * tensor.itemsize for stride in tensor.stride()),
            heads=(0, tensor.shape[_AXES.index("head")]),
        )
        layers.append(layer)
    return KVLayout(cache.config.block_size, tuple(regions.values()), tuple(layers))

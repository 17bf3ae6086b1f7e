"""The allocated cache as connectors see it: bytes of blocks (`kv_transfer.view.KVCacheView`)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from penstock.kernels.dispatch import has_gpu_kernels
from penstock.kernels.staging import CudaCopyQueue, NoQueue
from penstock.kv_transfer.view import Place, Take, Transfer, read_now, write_now
from penstock.runner.load import KVCache

if TYPE_CHECKING:
    from penstock.runner.gpu.block_transfers import BlockTransfers


class TorchKVCacheView:
    """Copies between tensors and host memory.

    On a CPU these are plain memory copies: torch's own would wake its threads for each of them, which takes longer than
    to copy a block of a layer, and so would an index into a tensor. On a GPU `read_blocks` and `write_blocks` go on
    beside the steps; all else waits.
    """

    def __init__(self, cache: KVCache) -> None:
        self.config = cache.config
        self._names = [
            (*group.layer_names, *(layer.name for layer in cache.config.attached if layer.group == number))
            for number, group in enumerate(cache.config.groups)
        ]
        # [num_blocks, bytes of a block] per layer, over the same memory.
        self._rows = {name: tensor.view(torch.uint8).flatten(1) for name, tensor in cache.tensors.items()}
        self._num_bytes = {name: rows.shape[1] for name, rows in self._rows.items()}
        # Where the host can see the memory: all rows one after the other.
        self._host = {name: rows.view(-1).numpy().data for name, rows in self._rows.items() if rows.is_cpu}
        # A CPU may stand in for a GPU.
        self._is_remote = any(has_gpu_kernels(rows.device) for rows in self._rows.values())

    def layer_names(self, group: int) -> tuple[str, ...]:
        return self._names[group]

    def block_bytes(self, group: int) -> int:
        return self.config.block_bytes(group)

    def layer_bytes(self, layer_name: str) -> int:
        return self._num_bytes[layer_name]

    def block_parts(self, group: int, block_id: int) -> list[memoryview]:
        return [self._row(name, block_id) for name in self._names[group]]

    def read_block(self, group: int, block_id: int, into: memoryview) -> None:
        start = 0
        for part in self.block_parts(group, block_id):
            into[start : start + len(part)] = part
            start += len(part)

    def write_block(self, group: int, block_id: int, data: memoryview) -> None:
        start = 0
        for name in self._names[group]:
            end = start + self._num_bytes[name]
            self.write_layer(name, block_id, data[start:end])
            start = end

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

"""KV blocks in a GPU's memory."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from penstock.kernels.staging import CudaCopyQueue, NoQueue
from penstock.kv_transfer.view import Parts, Place, Take, Transfer
from penstock.runner.gpu.block_transfers import BlockTransfers
from penstock.runner.kv_cache import TensorKVCacheView


class GpuKVCacheView(TensorKVCacheView):
    """`read_blocks` and `write_blocks` run in parallel with the steps; everything else waits (`KVCacheView`)."""

    def read_blocks(self, places: Sequence[Place], take: Take) -> Transfer:
        return self._transfers.read_blocks(self._in_tensors(places), take)

    def write_blocks(self, places: Sequence[Place], data: Sequence[Parts], take: Take) -> Transfer:
        return self._transfers.write_blocks(self._in_tensors(places), data, take)

    def _in_tensors(self, places: Sequence[Place]) -> list[Place]:
        return [(group, self._place(self._names[group][0], block_id)) for group, block_id in places]

    @functools.cached_property
    def _transfers(self) -> BlockTransfers:
        """Created on first use, because it has its own thread and memory and most engines never use it."""
        layers = [[self._rows[name] for name in names] for names in self._names]
        device = next(iter(self._rows.values())).device
        if device.type == "cuda":
            return BlockTransfers(layers, CudaCopyQueue(device))
        # Triton's interpreter is not thread-safe.
        return BlockTransfers(layers, NoQueue(), waits=True)

    def write_layer(self, layer_name: str, block_id: int, data: memoryview) -> None:
        row = self._rows[layer_name][self._place(layer_name, block_id)]
        row.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def _row(self, layer_name: str, block_id: int) -> memoryview:
        """Returns a copy, unless the tensor is in the CPU's memory."""
        return self._rows[layer_name][self._place(layer_name, block_id)].cpu().numpy().data

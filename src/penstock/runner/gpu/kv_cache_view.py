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
        return self._transfers.read_blocks(places, take)

    def write_blocks(self, places: Sequence[Place], data: Sequence[Parts], take: Take) -> Transfer:
        return self._transfers.write_blocks(places, data, take)

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
        self._rows[layer_name][block_id].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def _row(self, layer_name: str, block_id: int) -> memoryview:
        """Returns a copy, unless the tensor is in the CPU's memory."""
        return self._rows[layer_name][block_id].cpu().numpy().data

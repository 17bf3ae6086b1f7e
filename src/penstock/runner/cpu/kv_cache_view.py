"""KV blocks in the CPU's own memory."""

from __future__ import annotations

import torch

from penstock.kv_transfer.view import read_now, write_now
from penstock.runner.kv_cache import KVCache, TensorKVCacheView


class HostKVCacheView(TensorKVCacheView):
    """Plain memory copies (`KVCacheView`).

    Torch's copies would wake its threads each time, which takes longer than copying a block of a layer; so would
    indexing a tensor.
    """

    read_blocks, write_blocks = read_now, write_now

    def __init__(self, cache: KVCache) -> None:
        super().__init__(cache)
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in cache.tensors.values()}
        self._regions = [
            torch.empty(0, dtype=torch.uint8).set_(storages[region.address]).numpy().data
            for region in self.layout.regions
        ]
        # All blocks of a layer, one after the other.
        self._host = {name: rows.view(-1).numpy().data for name, rows in self._rows.items()}

    def region_memory(self) -> list[memoryview]:
        return self._regions

    def write_layer(self, layer_name: str, block_id: int, data: memoryview) -> None:
        self._row(layer_name, block_id)[:] = data

    def _row(self, layer_name: str, block_id: int) -> memoryview:
        start = self._place(layer_name, block_id) * self._num_bytes[layer_name]
        return self._host[layer_name][start : start + self._num_bytes[layer_name]]

"""The allocated cache as connectors see it: bytes of blocks (`kv_transfer.view.KVCacheView`)."""

from __future__ import annotations

import torch

from penstock.runner.load import KVCache


class TensorKVCacheView:
    """What views of every device have in common. A view reads and writes one layer's part of a block, and moves many
    blocks at once; the rest follows from that."""

    def __init__(self, cache: KVCache) -> None:
        self.config = cache.config
        self._names = [
            (*group.layer_names, *(layer.name for layer in cache.config.attached if layer.group == number))
            for number, group in enumerate(cache.config.groups)
        ]
        # [num_blocks, bytes of a block] per layer, over the same memory.
        self._rows = {name: tensor.view(torch.uint8).flatten(1) for name, tensor in cache.tensors.items()}
        self._num_bytes = {name: rows.shape[1] for name, rows in self._rows.items()}

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

    def write_layer(self, layer_name: str, block_id: int, data: memoryview) -> None:
        raise NotImplementedError

    def read_layer(self, layer_name: str, block_id: int, into: memoryview) -> None:
        into[:] = self._row(layer_name, block_id)

    def _row(self, layer_name: str, block_id: int) -> memoryview:
        """A block's bytes in one layer: themselves where the host can see them, else a copy."""
        raise NotImplementedError

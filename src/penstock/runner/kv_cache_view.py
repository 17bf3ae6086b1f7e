"""The allocated cache as connectors see it: bytes of blocks (`kv_transfer.view.KVCacheView`)."""

from __future__ import annotations

import torch

from penstock.runner.load import KVCache


class TorchKVCacheView:
    """Copies between tensors and host memory; on a CPU these are plain memory copies."""

    def __init__(self, cache: KVCache) -> None:
        self.config = cache.config
        self._names = [
            (*group.layer_names, *(layer.name for layer in cache.config.attached if layer.group == number))
            for number, group in enumerate(cache.config.groups)
        ]
        # [num_blocks, bytes of a block] per layer, over the same memory.
        self._bytes = {name: tensor.view(torch.uint8).flatten(1) for name, tensor in cache.tensors.items()}

    def layer_names(self, group: int) -> tuple[str, ...]:
        return self._names[group]

    def block_bytes(self, group: int) -> int:
        return self.config.block_bytes(group)

    def layer_bytes(self, layer_name: str) -> int:
        return self._bytes[layer_name].shape[1]

    def read_block(self, group: int, block_id: int, into: memoryview) -> None:
        host = torch.frombuffer(into, dtype=torch.uint8)
        start = 0
        for name in self._names[group]:
            row = self._bytes[name][block_id]
            host[start : start + len(row)].copy_(row)
            start += len(row)

    def block_parts(self, group: int, block_id: int) -> list[memoryview]:
        return [self._bytes[name][block_id].cpu().numpy().data for name in self._names[group]]

    def write_block(self, group: int, block_id: int, data: memoryview) -> None:
        host = _tensor(data)
        start = 0
        for name in self._names[group]:
            row = self._bytes[name][block_id]
            row.copy_(host[start : start + len(row)])
            start += len(row)

    def read_layer(self, layer_name: str, block_id: int, into: memoryview) -> None:
        torch.frombuffer(into, dtype=torch.uint8).copy_(self._bytes[layer_name][block_id])

    def write_layer(self, layer_name: str, block_id: int, data: memoryview) -> None:
        self._bytes[layer_name][block_id].copy_(_tensor(data))


def _tensor(data: memoryview) -> torch.Tensor:
    """The bytes as a tensor; torch takes none that may not be written."""
    return torch.frombuffer(bytearray(data) if data.readonly else data, dtype=torch.uint8)

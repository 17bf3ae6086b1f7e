"""The allocated cache as connectors see it: bytes of blocks (`kv_transfer.view.KVCacheView`)."""

from __future__ import annotations

import torch

from penstock.runner.load import KVCache


class TorchKVCacheView:
    """Copies between tensors and host memory.

    On a CPU these are plain memory copies: torch's own would wake its threads for each of them, which takes longer than
    to copy a block of a layer.
    """

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

    def block_parts(self, group: int, block_id: int) -> list[memoryview]:
        return [_host_bytes(self._bytes[name][block_id]) for name in self._names[group]]

    def read_block(self, group: int, block_id: int, into: memoryview) -> None:
        start = 0
        for part in self.block_parts(group, block_id):
            into[start : start + len(part)] = part
            start += len(part)

    def write_block(self, group: int, block_id: int, data: memoryview) -> None:
        start = 0
        for name in self._names[group]:
            end = start + self.layer_bytes(name)
            self.write_layer(name, block_id, data[start:end])
            start = end

    def read_layer(self, layer_name: str, block_id: int, into: memoryview) -> None:
        into[:] = _host_bytes(self._bytes[layer_name][block_id])

    def write_layer(self, layer_name: str, block_id: int, data: memoryview) -> None:
        row = self._bytes[layer_name][block_id]
        if row.device.type == "cpu":
            _host_bytes(row)[:] = data
        else:
            row.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))


def _host_bytes(row: torch.Tensor) -> memoryview:
    """The bytes themselves on a CPU, else a copy of them."""
    return row.cpu().numpy().data

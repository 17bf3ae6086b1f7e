"""The block tables of all rows, one per KV group, on the device."""

from __future__ import annotations

import numpy as np
import torch

from penstock.messages.kv_cache_spec import KVCacheConfig
from penstock.messages.scheduler_output import BlockIds
from penstock.runner.buffers import TableWriter
from penstock.utils.math import cdiv


class BlockTables:
    def __init__(
        self, cache: KVCacheConfig, max_num_reqs: int, max_model_len: int, device: torch.device, writer: TableWriter
    ) -> None:
        num_groups, width = len(cache.groups), cdiv(max_model_len, cache.block_size)
        self.block_size = cache.block_size
        self.is_recurrent = [group.spec.is_recurrent for group in cache.groups]
        # [num_groups, max_num_reqs + 1, max blocks of a request] int32; the last row is padding's: null blocks
        self.tables = torch.zeros((num_groups, max_num_reqs + 1, width), dtype=torch.int32, device=device)
        # Of recurrent layers the table has the number of the block's vector, from 1 on, and 0 or less for none.
        self._offsets = [max(0, cache.first_block(group.spec) - 1) for group in cache.groups]
        self._num_blocks = np.zeros((num_groups, max_num_reqs), dtype=np.int64)
        self._writer = writer

    def clear(self, row: int) -> None:
        """Forgets a row's blocks; old entries of the table after the new ones are never read."""
        self._num_blocks[:, row] = 0

    def append(self, row: int, block_ids: BlockIds) -> None:
        """Stages blocks at the end of a row, by group."""
        for group, ids in enumerate(block_ids):
            if ids:
                offset = self._offsets[group]
                entries = [block_id - offset for block_id in ids] if offset else ids
                self._writer.write(self.tables[group], row, int(self._num_blocks[group, row]), entries)
                self._num_blocks[group, row] += len(ids)

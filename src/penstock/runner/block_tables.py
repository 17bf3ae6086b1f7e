"""The block tables of all rows, one per KV group, on the device."""

from __future__ import annotations

import numpy as np
import torch

from penstock.messages.scheduler_output import BlockIds
from penstock.runner.buffers import StagedWriter
from penstock.utils.math import cdiv


class BlockTables:
    def __init__(
        self, num_groups: int, max_num_reqs: int, max_model_len: int, block_size: int, device: torch.device
    ) -> None:
        width = cdiv(max_model_len, block_size)
        self.block_size = block_size
        self.tables = [  # each [max_num_reqs, max blocks of a request] int32
            torch.zeros((max_num_reqs, width), dtype=torch.int32, device=device) for _ in range(num_groups)
        ]
        self._num_blocks = np.zeros((num_groups, max_num_reqs), dtype=np.int64)
        self._writers = [StagedWriter(table) for table in self.tables]

    def clear(self, row: int) -> None:
        """Forgets a row's blocks; what the table still holds beyond the new ones is never read."""
        self._num_blocks[:, row] = 0

    def append(self, row: int, block_ids: BlockIds) -> None:
        """Stages blocks at the end of a row, by group."""
        for group, ids in enumerate(block_ids):
            if ids:
                self._writers[group].write(row, int(self._num_blocks[group, row]), ids)
                self._num_blocks[group, row] += len(ids)

    def num_blocks(self, group: int, rows: np.ndarray) -> np.ndarray:
        """[len(rows)] int64: blocks that each of these rows holds."""
        return self._num_blocks[group, rows]

    def apply_staged_writes(self) -> None:
        for writer in self._writers:
            writer.apply()

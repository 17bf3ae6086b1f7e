"""Sampling parameters by state row, on the device: the columns of all features."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import torch

from penstock.kernels.triton.sampling.adjust import RULE_COLUMNS, AdjustTables, pack_rules
from penstock.kernels.triton.sampling.tiles import SamplingTables
from penstock.messages.requests import RowRequest
from penstock.runner.buffers import TableWriter
from penstock.runner.gpu.buffers import upload
from penstock.runner.sampling.features import FEATURES, LOGITS
from penstock.runner.sampling.logprobs import num_top

_COLUMNS = [column for feature in FEATURES for column in feature.columns]


class SamplingRows:
    """Written when a request gets its row. Lists of tokens have their own memory, whose address is in the table."""

    def __init__(self, max_num_reqs: int, vocab_size: int, device: torch.device, writer: TableWriter) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._writer = writer

        def table(dtype: torch.dtype, width: int) -> torch.Tensor:
            return torch.zeros((max_num_reqs, width), dtype=dtype, device=device)

        tables = {column.name: table(column.dtype, column.width) for column in _COLUMNS}
        self._columns = [(column.of, tables[column.name]) for column in _COLUMNS]
        self.tables = SamplingTables(**{each.name: tables[each.name] for each in fields(SamplingTables)})
        self.adjust_tables = AdjustTables(table(torch.int64, RULE_COLUMNS), tables["penalties"])
        self.num_top = tables["num_top"]
        self._num_top_np = np.zeros(max_num_reqs, dtype=np.int64)
        # Kept until the row is given to another request: kernels that read a list are then earlier on the stream.
        self._lists: dict[int, torch.Tensor] = {}

    def add(self, row: int, request: RowRequest) -> None:
        for of, table in self._columns:
            self._writer.write(table, row, 0, of(request, self._vocab_size))
        self._writer.write(self.adjust_tables.rules, row, 0, self._store_rules(row, request))
        (self._num_top_np[row],) = num_top(request, self._vocab_size)

    def num_top_logprobs(self, rows: np.ndarray) -> np.ndarray:
        """Returns [len(rows)] int64: how many of the likeliest tokens each row's request asks for, -1: no logprobs."""
        return self._num_top_np[rows]

    def _store_rules(self, row: int, request: RowRequest) -> tuple[int, int, int, int, int]:
        lists: dict[str, Any] = {}
        for feature in LOGITS:
            lists |= feature.token_lists(request)
        packed, prompt_len = pack_rules(**lists, vocab_size=self._vocab_size), request.num_prompt_tokens
        if not len(packed.words):
            return packed.columns(0, prompt_len)
        words = self._lists[row] = upload(packed.words, self._device)
        return packed.columns(words.data_ptr(), prompt_len)

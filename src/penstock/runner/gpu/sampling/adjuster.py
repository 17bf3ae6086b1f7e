"""Adjusts a step's logits to its requests' parameters and grammars."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from penstock.kernels.triton.sampling.adjust import adjust_logits, count_tokens
from penstock.messages.scheduler_output import GrammarOutput
from penstock.runner.gpu.buffers import PinnedRing
from penstock.runner.gpu.sampling.rows import SamplingRows
from penstock.runner.host_batch import HostBatch
from penstock.runner.input_batch import InputBatch
from penstock.runner.sampling.features import CHANGED_LOGITS, COUNTED_TOKENS
from penstock.utils.math import round_up

_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Bitmasks:
    """The grammar bitmasks of a step, on the device."""

    mask_of_row: torch.Tensor  # [num_logits] int32: index of its mask, -1 for none; empty if no row has one
    masks: torch.Tensor  # [num_masks, words] int32


class BitmaskUploader:
    """Uploads all masks of a step in one copy."""

    def __init__(self, device: torch.device, depth: int) -> None:
        self._device = device
        self._ring = PinnedRing(1 << 16, depth + 1, device)
        self.none = Bitmasks(*(torch.zeros(shape, dtype=torch.int32, device=device) for shape in ((0,), (0, 1))))

    def upload(self, host: HostBatch, grammars: GrammarOutput, num_logits: int) -> Bitmasks:
        if not grammars.bitmasks:
            return self.none
        starts = dict(zip(host.sampling_request_ids, host.window_starts.tolist(), strict=True))
        masks = [(starts[name], mask) for name, mask in grammars.bitmasks.items() if name in starts]
        if not masks:
            return self.none
        num_masks, num_words = sum(len(mask) for _, mask in masks), masks[0][1].shape[1]
        first = round_up(4 * num_logits, _ALIGNMENT)
        num_bytes = first + 4 * num_masks * num_words
        memory = self._ring.open(num_bytes)[:num_bytes].view(np.int32)
        mask_of_row, words = memory[:num_logits], memory[first // 4 :].reshape(num_masks, num_words)
        mask_of_row[:] = -1
        count = 0
        for start, mask in masks:
            end = count + len(mask)
            mask_of_row[start : start + len(mask)] = np.arange(count, end)
            words[count:end] = mask
            count = end
        # New memory from torch's own pool: kernels that still read the last step's are earlier on the stream.
        copied = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        self._ring.copy(num_bytes, copied)
        whole = copied.view(torch.int32)
        return Bitmasks(whole[:num_logits], whole[first // 4 :].view(num_masks, num_words))


class LogitsAdjuster:
    """Computes adjusted logits from the model's; launches nothing if no row needs it."""

    def __init__(self, rows: SamplingRows, token_ids: torch.Tensor, max_num_logits: int) -> None:
        self._rows = rows
        self._max_num_logits = max_num_logits
        self._token_ids = token_ids
        # [rows, vocab_size], all 0 between steps; allocated for the first request with a penalty.
        self._counts = torch.zeros((0, 1), dtype=torch.int32, device=token_ids.device)

    def adjust(self, logits: torch.Tensor, batch: InputBatch, needs: int, bitmasks: Bitmasks) -> torch.Tensor:
        """Returns `logits` themselves, or a copy in float32: [num_logits, vocab_size]. `needs` are the step's."""
        if not needs & CHANGED_LOGITS and not len(bitmasks.mask_of_row):
            return logits
        tables = self._rows.adjust_tables
        where = (batch.tensors.logits_rows, batch.tensors.logits_positions, self._token_ids)
        if needs & COUNTED_TOKENS:
            if not len(self._counts):
                # Allocated for the largest step: growing in steps would leave memory that fits no later one.
                self._counts = logits.new_zeros((self._max_num_logits, logits.shape[1]), dtype=torch.int32)
            count_tokens(*where, batch.host.max_seq_len, tables, self._counts)
        adjusted = logits.new_empty(logits.shape, dtype=torch.float32)
        adjust_logits(logits, *where, tables, self._counts, bitmasks.mask_of_row, bitmasks.masks, adjusted)
        return adjusted

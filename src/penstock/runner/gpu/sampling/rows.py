"""Sampling parameters by state row, on the device, and which rows need what."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np
import torch

from penstock.kernels.triton.sampling.adjust import PENALTY_COLUMNS, RULE_COLUMNS, AdjustTables, PackedRules, pack_rules
from penstock.kernels.triton.sampling.tiles import SamplingTables
from penstock.messages.requests import EngineRequest
from penstock.runner.buffers import TableWriter
from penstock.runner.gpu.buffers import upload
from penstock.runner.sampling.features import changes_logits
from penstock.runner.sampling.penalties import has_penalty

_SMALLEST_TEMPERATURE = 1e-6  # of requests that are not greedy


@dataclass(frozen=True, slots=True)
class Needs:
    """What a step launches for some of its rows and not for others."""

    truncation: bool = False
    adjustment: bool = False  # of logits: all that `changes_logits` names
    counts: bool = False  # of tokens, for penalties
    logprobs: bool = False
    top_logprobs: bool = False

    @property
    def bits(self) -> int:
        return sum(1 << place for place, name in enumerate(_NEEDS) if getattr(self, name))

    @classmethod
    def of(cls, bits: int) -> Needs:
        return cls(*(bool(bits >> place & 1) for place in range(len(_NEEDS))))


_NEEDS = tuple(each.name for each in fields(Needs))
_ALL_NEEDS = [Needs.of(bits) for bits in range(1 << len(_NEEDS))]


class SamplingRows:
    """Written when a request gets its row. Lists of tokens lie in memory of their own, whose address the table has."""

    def __init__(self, max_num_reqs: int, vocab_size: int, device: torch.device, writer: TableWriter) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._writer = writer

        def table(dtype: torch.dtype, width: int = 1) -> torch.Tensor:
            return torch.zeros((max_num_reqs, width), dtype=dtype, device=device)

        self.tables = SamplingTables(
            temperature=table(torch.float32),
            top_k=table(torch.int32),
            top_p=table(torch.float32),
            log_min_p=table(torch.float32),
            seed=table(torch.int64),
        )
        self.adjust_tables = AdjustTables(table(torch.int64, RULE_COLUMNS), table(torch.float32, PENALTY_COLUMNS))
        self.num_top = table(torch.int32)
        self._num_top_np = np.zeros(max_num_reqs, dtype=np.int64)
        self._needs = np.zeros(max_num_reqs, dtype=np.uint8)
        # Until the row is given to another request: what still reads a list then lies before it on the stream.
        self._lists: dict[int, torch.Tensor] = {}

    def add(self, row: int, request: EngineRequest) -> None:
        params, tables, write = request.sampling_params, self.tables, self._writer.write
        top_k = params.top_k if 0 < params.top_k < self._vocab_size else 0
        log_min_p = math.log(params.min_p) if params.min_p > 0 else -math.inf
        temperature = 0.0 if params.is_greedy else max(params.temperature, _SMALLEST_TEMPERATURE)
        num_top = -1 if params.logprobs is None else min(params.logprobs, self._vocab_size)
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        write(tables.temperature, row, 0, (temperature,))
        write(tables.top_k, row, 0, (top_k,))
        write(tables.top_p, row, 0, (params.top_p,))
        write(tables.log_min_p, row, 0, (log_min_p,))
        write(tables.seed, row, 0, ((request.seed + 2**63) % 2**64 - 2**63,))
        write(self.num_top, row, 0, (num_top,))
        write(self.adjust_tables.penalties, row, 0, penalties)
        write(self.adjust_tables.rules, row, 0, self._store_rules(row, request))
        self._num_top_np[row] = num_top
        self._needs[row] = _needs_of(request, top_k).bits

    def needs(self, rows: np.ndarray) -> Needs:
        """What any of these rows needs."""
        return _ALL_NEEDS[np.bitwise_or.reduce(self._needs[rows])]

    def num_top_logprobs(self, rows: np.ndarray) -> np.ndarray:
        """[len(rows)] int64: how many of the likeliest tokens each row's request wants to know, -1: no logprobs."""
        return self._num_top_np[rows]

    def _store_rules(self, row: int, request: EngineRequest) -> tuple[int, int, int, int, int]:
        packed, prompt_len = _pack(request, self._vocab_size), len(request.prompt_token_ids)
        if not len(packed.words):
            return packed.columns(0, prompt_len)
        words = self._lists[row] = upload(packed.words, self._device)
        return packed.columns(words.data_ptr(), prompt_len)


def _needs_of(request: EngineRequest, top_k: int) -> Needs:
    params = request.sampling_params
    return Needs(
        truncation=not params.is_greedy and (top_k > 0 or params.top_p < 1 or params.min_p > 0),
        adjustment=changes_logits(request),
        counts=has_penalty(request),
        logprobs=params.logprobs is not None,
        top_logprobs=bool(params.logprobs),
    )


def _pack(request: EngineRequest, vocab_size: int) -> PackedRules:
    params = request.sampling_params
    return pack_rules(
        bias=params.logit_bias or {},
        ends=request.eos_token_ids | request.stop_token_ids if params.min_tokens else (),
        min_len=len(request.prompt_token_ids) + params.min_tokens,
        bad_words=request.bad_words_token_ids,
        allowed=params.allowed_token_ids or (),
        vocab_size=vocab_size,
    )

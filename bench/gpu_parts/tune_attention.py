"""Tuning of attention: decode's split and tile, prefill's tile, and the one tile of a deterministic plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton

from gpu_parts.tuning import Tensors, neighbours, put, relative
from penstock.config.model import ModelConfig
from penstock.kernels.paged_attention import Softmax, paged_attention_reference
from penstock.kernels.rope_and_store_kv import rope_and_store_kv_reference
from penstock.kernels.triton.attention import plan as plans
from penstock.kernels.triton.attention.launcher import decode_attention_fused, paged_attention
from penstock.kernels.triton.attention.plan import (
    AttentionLimits,
    AttentionPlan,
    AttentionPlanner,
    AttentionShape,
    PrefillTile,
)
from penstock.kernels.triton.capabilities import Capabilities

_EPS = 1e-6
_MAX_CHAIN_BYTES, _MAX_LAYERS = 16 << 30, 28
_TOLERANCE = 2e-2
# The contexts for which an engine with max_model_len=4096 captures steps: a step uses the grid of the next one.
_CONTEXTS = (1024, 4096)
_ANY = 1 << 30


@dataclass(frozen=True)
class Split:
    """The settings of a decode choice, and the program that merges the parts."""

    split: int
    keys: int
    warps: int
    stages: int
    use_tma: bool = False
    merges: bool = True

    def __str__(self) -> str:
        tma, merges = " TMA" if self.use_tma else "", "" if self.merges else " merged by a separate kernel"
        return f"split {self.split} keys {self.keys} w{self.warps} s{self.stages}{tma}{merges}"

    def choice(self) -> Any:
        return plans._Choice(_ANY, _ANY, self.split, self.keys, self.warps, self.stages, self.use_tma)

    @classmethod
    def of(cls, choice: Any) -> Split:
        return cls(choice.split, choice.keys, choice.warps, choice.stages, choice.use_tma)


_AXES = {"split": (64, 128, 256, 512), "keys": (16, 32, 64), "warps": (1, 2, 4), "stages": (1, 2, 3, 4)}
_PREFILL_AXES = {"rows": (32, 64, 128), "keys": (32, 64, 128), "warps": (4, 8), "stages": (2, 3, 4)}
_PREFILL_HINTS = (
    PrefillTile(64, 64, 4, 3),
    PrefillTile(128, 64, 4, 3),
    PrefillTile(128, 64, 8, 3),
    PrefillTile(128, 64, 8, 2),
    PrefillTile(128, 128, 8, 2),
)


@dataclass(frozen=True)
class _Operands:
    qkv: torch.Tensor  # [T, (Hq + 2 Hkv) * D]
    caches: list[torch.Tensor]  # [num_blocks, 2, Hkv, block_size, D] each
    cos_sin: torch.Tensor
    norms: tuple[torch.Tensor, torch.Tensor]
    block_table: torch.Tensor
    starts: torch.Tensor
    seq_lens: torch.Tensor


@dataclass(frozen=True)
class _Attention:
    """`batch` requests whose last `queries` of `context` positions are new."""

    model: str
    shape: AttentionShape
    batch: int
    context: int
    queries: int = 1

    @classmethod
    def of(cls, model: ModelConfig, batch: int, context: int, queries: int = 1, block_size: int = 16) -> Any:
        heads = (model.num_attention_heads, model.num_key_value_heads, model.head_dim)
        return cls(model.path.name, AttentionShape(*heads, block_size, torch.bfloat16), batch, context, queries)

    @property
    def _label(self) -> str:
        block_size = self.shape.block_size
        page = "" if block_size == 16 else f" blocks of {block_size}"
        return f"{self.model} {self.batch} x {self.queries} of {self.context}{page}"

    @property
    def _longest(self) -> int:
        return next(context for context in (*_CONTEXTS, self.context) if context >= self.context)

    @property
    def _kv_bytes(self) -> int:
        return self.batch * self.context * 2 * self.shape.num_kv_heads * self.shape.head_dim * self.shape.dtype.itemsize

    @property
    def num_layers(self) -> int:
        return min(_MAX_LAYERS if self.queries == 1 else 4, max(2, _MAX_CHAIN_BYTES // self._kv_bytes))

    @property
    def work(self) -> tuple[float, str]:
        if self.queries == 1:
            return float(self._kv_bytes), "TB/s"
        seen = self.queries * (2 * self.context - self.queries + 1) / 2
        return 4.0 * self.batch * seen * self.shape.num_heads * self.shape.head_dim, "TFLOP/s"

    def tolerance(self) -> float:
        return _TOLERANCE

    def library(self, operands: _Operands) -> None:
        """torch has no such kernel for paged caches."""

    def make(self, on: torch.device, num_layers: int) -> _Operands:
        shape, dtype = self.shape, self.shape.dtype
        blocks = triton.cdiv(self.context, shape.block_size)
        size = (self.batch * blocks + 1, 2, shape.num_kv_heads, shape.block_size, shape.head_dim)
        width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        half = shape.head_dim // 2
        angles = torch.arange(self.context, device=on)[:, None] / 10000 ** (torch.arange(half, device=on) / half)
        # Block 0 belongs to no request, and the others are in random places.
        table = (1 + torch.randperm(self.batch * blocks, device=on)).int().view(self.batch, blocks)
        return _Operands(
            torch.randn(self.batch * self.queries, width, dtype=dtype, device=on),
            [torch.randn(size, dtype=dtype, device=on) for _ in range(num_layers)],
            torch.cat((angles.cos(), angles.sin()), 1).float().contiguous(),
            (torch.ones(shape.head_dim, dtype=dtype, device=on), torch.ones(shape.head_dim, dtype=dtype, device=on)),
            table,
            torch.arange(0, self.batch * self.queries + 1, self.queries, dtype=torch.int32, device=on),
            torch.full((self.batch,), self.context, dtype=torch.int32, device=on),
        )

    def _planner(self, operands: _Operands, capabilities: Capabilities, merges: bool = True) -> AttentionPlanner:
        limits = AttentionLimits(self.batch, max(_CONTEXTS[-1], self.context))
        on, is_deterministic = operands.qkv.device, isinstance(self, DeterministicCell)
        return AttentionPlanner(self.shape, limits, on, is_deterministic, merges, capabilities)

    def _plan(self, planner: AttentionPlanner) -> AttentionPlan:
        return planner.plan(self.batch, self.queries, self._longest)

    def _tuning(self) -> str:
        if self.shape.dtype == torch.float32:
            return "_FLOAT32"
        return "_NARROW" if self.shape.head_dim <= 128 else "_WIDE"

    def _attend(self, operands: _Operands, plan: AttentionPlan) -> Callable[[], Tensors]:
        heads, head_dim = self.shape.num_heads, self.shape.head_dim
        q = operands.qkv.view(len(operands.qkv), -1, head_dim)[:, :heads]
        batch = (operands.block_table, operands.starts, operands.seq_lens, head_dim**-0.5, 0, plan)

        def run() -> Tensors:
            return tuple(paged_attention(q, cache, *batch) for cache in operands.caches)[-1:]

        return run

    def error(self, operands: _Operands, outputs: Tensors) -> float:
        """Returns the error of the first and the last request; all others are alike. For prompts the last is enough."""
        shape = self.shape
        chosen = sorted({0 if self.queries == 1 else self.batch - 1, self.batch - 1})
        rows = [i * self.queries + query for i in chosen for query in range(self.queries)]
        qkv, cache = operands.qkv[rows].clone(), operands.caches[-1]
        table = operands.block_table[chosen]
        if isinstance(self, DecodeCell):
            cache = cache.clone()
            last = torch.full((len(chosen),), self.context - 1, device=qkv.device)
            slots = table[:, (self.context - 1) // shape.block_size].long() * shape.block_size
            slots += (self.context - 1) % shape.block_size
            heads = (shape.num_heads, shape.num_kv_heads)
            rope_and_store_kv_reference(qkv, *heads, operands.cos_sin, last, cache, slots, *operands.norms, _EPS)
        q = qkv.view(len(rows), -1, shape.head_dim)[:, : shape.num_heads].double()
        # Copies only the blocks that are seen, in order, so that not all of the cache is widened.
        seen = cache[table.long().flatten()].double()
        own = torch.arange(table.numel(), dtype=torch.int32, device=table.device).view_as(table)
        batch = (own, operands.starts[: len(chosen) + 1], operands.seq_lens[: len(chosen)])
        return relative(outputs[0][rows], paged_attention_reference(q, seen, *batch, Softmax(shape.head_dim**-0.5)))


@dataclass(frozen=True)
class DecodeCell(_Attention):
    @property
    def name(self) -> str:
        return f"decode attention {self._label}"

    def candidates(self) -> list[Split]:
        table = getattr(plans, self._tuning()).decode
        present = next(
            Split.of(choice)
            for choice in table
            if self.batch <= choice.max_num_reqs and self._longest <= choice.max_seq_len
        )
        found = [*neighbours(present, {**_AXES, "merges": (False,)}), *(Split.of(choice) for choice in table)]
        found += [replace(each, stages=3, warps=1, keys=32) for each in found[:5]]
        if self.shape.block_size >= 64:
            found += [replace(each, use_tma=True) for each in found]
        most = 4 * self.shape.block_size
        others = dict.fromkeys(each for each in found if each != present and each.keys <= min(most, each.split))
        return [present, *others]

    def chain(self, operands: _Operands, setting: Split, capabilities: Capabilities) -> Callable[[], Tensors]:
        name = self._tuning()
        with put(plans, name, replace(getattr(plans, name), decode=(setting.choice(),))):
            plan = self._plan(self._planner(operands, capabilities, setting.merges))
        batch = (operands.block_table, operands.starts, operands.seq_lens, self.shape.head_dim**-0.5, 0, plan)
        before = (operands.qkv, self.shape.num_heads, operands.cos_sin, operands.norms, _EPS)

        def run() -> Tensors:
            return tuple(decode_attention_fused(*before, cache, *batch) for cache in operands.caches)[-1:]

        return run


@dataclass(frozen=True)
class PrefillCell(_Attention):
    @property
    def name(self) -> str:
        return f"prefill attention {self._label}"

    def candidates(self) -> list[PrefillTile]:
        present = getattr(plans, self._tuning()).prefill
        block_size = self.shape.block_size
        if block_size >= max(present.keys, plans._MIN_TMA_BLOCK_SIZE):
            present = replace(present, use_tma=True)
        found = [*neighbours(present, _PREFILL_AXES), *_PREFILL_HINTS]
        if block_size > 16:
            # A tile of keys must be in one block to be loaded by TMA.
            found += [replace(each, keys=min(each.keys, block_size), use_tma=True) for each in found]
            found += [replace(each, use_tma=False) for each in found]
        most = 4 * block_size
        return [present, *(each for each in dict.fromkeys(found) if each != present and each.keys <= most)]

    def chain(self, operands: _Operands, setting: PrefillTile, capabilities: Capabilities) -> Callable[[], Tensors]:
        setting = replace(setting, use_tma=setting.use_tma and capabilities.tma)
        plan = self._plan(self._planner(operands, capabilities))
        return self._attend(operands, replace(plan, tile=setting))


@dataclass(frozen=True)
class DeterministicCell(_Attention):
    """One tile must be good for both decode and prefill: a deterministic plan has one for both."""

    @property
    def name(self) -> str:
        return f"deterministic attention {self._label}"

    def candidates(self) -> list[Split]:
        present = Split.of(getattr(plans, self._tuning()).deterministic)
        found = neighbours(present, _AXES)
        found += [Split(128, 32, 1, 3), Split(256, 32, 1, 3), Split(256, 16, 1, 4), Split(128, 32, 2, 3)]
        return list(dict.fromkeys(found))

    def chain(self, operands: _Operands, setting: Split, capabilities: Capabilities) -> Callable[[], Tensors]:
        name = self._tuning()
        with put(plans, name, replace(getattr(plans, name), deterministic=setting.choice())):
            plan = self._plan(self._planner(operands, capabilities))
        return self._attend(operands, plan)

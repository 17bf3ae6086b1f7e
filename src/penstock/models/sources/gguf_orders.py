"""Where a checkpoint's rows and inputs are in a GGUF file, in which llama.cpp's converter has reordered some.

- A rotated pair of a head's dimensions is two neighbours, not one dimension of each half.
- The value heads of a gated delta net come by their place within their key head, not by key head.
- Two tensors may be one, whose rows alternate in runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from penstock.config.gguf.family import Family, Fields, head_size

_KEYS_AND_VALUES = ("in_proj_qkv", "conv1d")
_RATES = ("in_proj_a", "in_proj_b")
_BY_VALUE_HEAD = (*_RATES, "A_log", "dt_bias")


@dataclass(frozen=True, slots=True)
class _ValueHeads:
    """Of a gated delta net: how many, of how many key heads; and the sizes of both."""

    count: int
    key_heads: int
    size: int
    key_size: int

    def tiled(self) -> torch.Tensor:
        """Returns [count] int64: the place of each head in the file."""
        return torch.arange(self.count).view(-1, self.key_heads).T.flatten()


class Orders:
    def __init__(self, family: Family, fields: Fields) -> None:
        """Raises KeyError if the fields do not tell the sizes of heads."""
        self._head_dim = head_size(fields) if family.has_pairs else 0
        self._is_tiled = family.has_tiled_values
        self._values: _ValueHeads | None = None
        if "linear_attn.in_proj_a" in family.tensors:
            count = fields["ssm.time_step_rank"]
            sizes = (fields["ssm.inner_size"] // count, fields["ssm.state_size"])
            self._values = _ValueHeads(count, fields["ssm.group_count"], *sizes)

    def rows(self, name: str, count: int, half: int | None = None) -> torch.Tensor | None:
        """Returns where the `count` rows of a tensor are, [count] int64; None if they are in order. With `half` they
        are the first or the second ones of two tensors in one.
        """
        module = name.removesuffix(".weight").removesuffix(".bias")
        kind = module.rpartition(".")[2]
        if half is not None:
            run = count if kind not in _RATES or self._values is None else count // self._values.key_heads
            rows = torch.arange(count)
            return rows // run * 2 * run + half * run + rows % run
        if self._head_dim and kind in ("q_proj", "k_proj"):
            return _pairs(self._head_dim, count)
        if self._values is None or not self._is_tiled:
            return None
        if kind in _KEYS_AND_VALUES:
            keys = 2 * self._values.key_heads * self._values.key_size
            return torch.cat((torch.arange(keys), keys + _of_heads(self._values.tiled(), self._values.size)))
        if kind == "in_proj_z":
            return _of_heads(self._values.tiled(), self._values.size)
        return self._values.tiled() if kind in _BY_VALUE_HEAD else None

    def inputs(self, name: str) -> tuple[torch.Tensor, int] | None:
        """Returns where the runs of a matrix' inputs are, [runs] int64, and how many inputs a run has; None if they are
        in order.
        """
        if self._values is None or not self._is_tiled or not name.endswith("linear_attn.out_proj.weight"):
            return None
        return self._values.tiled(), self._values.size


def _pairs(head_dim: int, count: int) -> torch.Tensor:
    in_head = torch.arange(head_dim).view(head_dim // 2, 2).T.flatten()
    return _of_heads(torch.arange(-(-count // head_dim)), head_dim).view(-1, head_dim)[:, in_head].flatten()


def _of_heads(heads: torch.Tensor, size: int) -> torch.Tensor:
    """Returns the rows of these heads, one head after another."""
    return (heads[:, None] * size + torch.arange(size)).flatten()

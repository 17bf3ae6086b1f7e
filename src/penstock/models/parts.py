"""The parts of a decoder's layers: attentions and feed-forwards.

A part takes its tensors when it is constructed and treats every row independently. It holds its own share of the
features that the ranks of a group divide; its inputs and outputs are whole. Shapes: T tokens of this step, H hidden
size, Q and KV heads of size D, I intermediate size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch

from penstock.attention.forward_context import ForwardContext
from penstock.config.families import GELU, GELU_TANH, SILU
from penstock.config.model import ModelConfig
from penstock.kernels.gelu import gelu_and_mul
from penstock.kernels.relu import squared_relu
from penstock.kernels.sigmoid import multiply_by_sigmoid
from penstock.kernels.silu_and_mul import silu_and_mul
from penstock.layers.attention import EncoderAttention, PagedAttention
from penstock.layers.linear import Gather, Linear
from penstock.layers.norm import Norm
from penstock.messages.kv_cache_spec import KVCacheSpec
from penstock.models.norms import ReadNorm
from penstock.models.weights import Weights
from penstock.parallel.groups import TensorGroup
from penstock.parallel.topology import HeadShare, head_share


class Attention(Protocol):
    kv_cache_specs: dict[str, KVCacheSpec]
    """Layer name -> its keys and values in the KV cache."""

    def __call__(self, x: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """[T, H] at `positions`, [T] -> [T, H]."""
        ...


FeedForward = Callable[[torch.Tensor], torch.Tensor]
"""[T, H] -> [T, H]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionVariant:
    """What distinguishes a family's attention and is not in `config.json`."""

    qkv_bias: bool = False  # also without `attention_bias`
    out_bias: bool = True  # with `attention_bias`
    stored_as: str | None = None  # the name of the one tensor of queries, keys and values
    out: str = "o_proj"  # the name of the projection of the result
    norm: str = "norm"  # the norms' names after "q_" and "k_"
    has_pairs: bool = False  # the rotated pairs are neighbours, not in halves
    head_norms: ReadNorm | None = None  # of every query head and every key head
    has_value_norm: bool = False  # value heads are also normalised, without a weight
    width_norms: ReadNorm | None = None  # of all query heads together, and of all key heads
    num_inputs: int = 1  # how many hidden states a row has, concatenated
    has_gate: bool = False  # a query head's tensor also has a gate, whose sigmoid multiplies the head's result


PLAIN = AttentionVariant()


class GroupedQueryAttention:
    """Query heads that share heads of keys and values in groups (Ainslie et al. 2023, arXiv:2305.13245)."""

    def __init__(
        self, config: ModelConfig, weights: Weights, layer: int, rotary: torch.Tensor, variant: AttentionVariant = PLAIN
    ) -> None:
        hidden, eps, num_heads = config.hidden_size, config.rms_norm_eps, config.num_attention_heads
        num_kv_heads, size = config.layer_heads(layer).count, config.layer_heads(layer).size
        sizes = {"q_proj": num_heads * size, "k_proj": num_kv_heads * size, "v_proj": num_kv_heads * size}
        has_own_kv = config.kv_source(layer) == layer
        heads = [head_share(num_heads, num_kv_heads, share) for share in weights.share.all]
        own = heads[weights.share.index]
        queries, kv = (range(part.start * size, part.stop * size) for part in (own.queries, own.kv))
        norms: list[torch.Tensor] = []
        if variant.head_norms is not None:
            normed = ("q", "k") if has_own_kv else ("q",)
            norms = [variant.head_norms(weights, f"{name}_{variant.norm}", size, eps).weight for name in normed]
            if variant.has_value_norm and has_own_kv:
                norms.append(torch.ones_like(norms[0]))
        self.width_norms: list[_WidthNorm] = []
        if variant.width_norms is not None:
            for name, parts in (("q", [each.queries for each in heads]), ("k", [each.kv for each in heads])):
                norm = variant.width_norms(weights, f"{name}_{variant.norm}", sizes[f"{name}_proj"], eps)
                self.width_norms.append(_WidthNorm(norm, weights.group, parts, size))
        self.gate: Linear | None = None
        if variant.has_gate:
            self.qkv, self.gate = _read_with_gates(config, weights, own)
        else:
            order = _order_of_halves(config, own) if variant.has_pairs else None
            if not has_own_kv:
                sizes = {"q_proj": sizes["q_proj"]}
            elif config.has_keys_as_values and not config.layer_windows[layer]:
                del sizes["v_proj"]
                keys = torch.arange(len(queries), len(queries) + len(kv))
                order = torch.cat((torch.arange(len(queries)), keys, keys))
            self.qkv = weights.linear(
                sizes,
                variant.num_inputs * hidden,
                variant.qkv_bias or config.attention_bias,
                own={"q_proj": queries, "k_proj": kv, "v_proj": kv},
                stored_as=variant.stored_as,
                order=order,
            )
        sinks = _read_sinks(num_heads, own.queries, weights) if config.has_attention_sinks else None
        self.kv_cache_specs: dict[str, KVCacheSpec] = {}
        if config.encoder is None:
            self.attend = PagedAttention(config, layer, rotary, own, norms, sinks)
            if has_own_kv:
                self.kv_cache_specs[self.attend.name] = self.attend.spec
        else:
            self.attend = EncoderAttention(config, own, rotary, layer)
        self.query_scales = _query_scales(config).to(weights.device) if config.multipliers.query_beta else None
        self.out = weights.joining_linear(
            variant.out,
            hidden,
            [len(each.queries) * size for each in heads],
            config.attention_bias and variant.out_bias,
        )
        self._num_queries, self._num_keys = len(queries), len(kv)

    def __call__(self, x: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        qkv = self.qkv(x)  # [T, H] -> [T, (own Q + 2 own KV) D]
        queries = qkv[:, : self._num_queries]
        keys = qkv[:, self._num_queries : self._num_queries + self._num_keys]
        for part, norm in zip((queries, keys), self.width_norms, strict=False):
            part.copy_(norm(part))
        if self.query_scales is not None:
            queries.copy_(queries * self.query_scales[positions])
        attended = self.attend(qkv, positions, context)  # -> [T, own Q D]
        if self.gate is not None:
            multiply_by_sigmoid(attended, self.gate(x))
        return self.out(attended)  # -> [T, H]


class _WidthNorm:
    """A norm over the heads of all ranks: every rank normalises whole rows and keeps its own heads."""

    def __init__(self, norm: Norm, group: TensorGroup, heads: Sequence[range], size: int) -> None:
        """`heads` of each rank, in their order; ranks may have the same ones."""
        self._norm = norm
        self._gather = Gather(group, [len(each) * size for each in heads])
        columns = torch.tensor([head * size + i for each in heads for head in each for i in range(size)])
        total = int(columns.max()) + 1
        # Where each feature of a row is among those gathered, if several ranks have the same ones.
        self._places: torch.Tensor | None = None
        if len(columns) > total:
            self._places = torch.zeros(total, dtype=torch.int64)
            self._places[columns] = torch.arange(len(columns))
            self._places = self._places.to(norm.weight.device)
        own = heads[group.index]
        self._own = slice(own.start * size, own.stop * size)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, own features] -> the same, normalised."""
        whole = self._gather(x.contiguous())
        return self._norm(whole if self._places is None else whole[:, self._places])[:, self._own]


def _read_with_gates(config: ModelConfig, weights: Weights, own: HeadShare) -> tuple[Linear, Linear]:
    """Returns the layers to queries, keys and values, and to the gates; a head's gate is stored after its query."""
    size, bias = config.head_dim, config.attention_bias
    rows = {"q_proj": 2 * config.num_attention_heads * size}
    rows |= dict.fromkeys(("k_proj", "v_proj"), config.num_key_value_heads * size)
    kv = range(own.kv.start * size, own.kv.stop * size)
    places = {"q_proj": range(2 * own.queries.start * size, 2 * own.queries.stop * size), "k_proj": kv, "v_proj": kv}
    of_heads = torch.arange(len(places["q_proj"])).view(-1, 2, size)
    others = torch.arange(len(places["q_proj"]), sum(map(len, places.values())))
    order = torch.cat((of_heads[:, 0].flatten(), others))
    qkv = weights.linear(rows, config.hidden_size, bias, own=places, order=order)
    queries = {"q_proj": rows["q_proj"]}
    gate = weights.linear(queries, config.hidden_size, bias, own=places, order=of_heads[:, 1].flatten())
    return qkv, gate


def halves_of_pairs(num_rotated: int) -> torch.Tensor:
    """Returns the order in which all first dimensions of neighbouring pairs precede all second ones.

    A permutation of both queries and keys changes no product, and the halves are then rotated as everywhere else.
    """
    order = torch.arange(num_rotated)
    return torch.cat((order[0::2], order[1::2]))


def _order_of_halves(config: ModelConfig, own: HeadShare) -> torch.Tensor:
    """Returns the order of a rank's queries, keys and values that makes halves of neighbouring pairs."""
    order = torch.arange((len(own.queries) + 2 * len(own.kv)) * config.head_dim).view(-1, config.head_dim)
    rotated = order[: len(own.queries) + len(own.kv), : config.rotary_dim]
    rotated.copy_(rotated[:, halves_of_pairs(config.rotary_dim)])
    return order.flatten()


def _query_scales(config: ModelConfig) -> torch.Tensor:
    """Returns [max_position_embeddings, 1] float32: what a query at each position is multiplied by (Llama 4)."""
    beta, context = config.multipliers.query_beta, config.multipliers.query_context
    scales = [1 + beta * math.log(1 + stretch) for stretch in range(-(-config.max_position_embeddings // context))]
    return torch.tensor(scales).repeat_interleave(context)[: config.max_position_embeddings, None]


_ACTIVATE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    SILU: silu_and_mul,
    GELU: gelu_and_mul,
    GELU_TANH: partial(gelu_and_mul, is_tanh=True),
}


def _read_sinks(num_heads: int, own: range, weights: Weights) -> torch.Tensor:
    """Returns [own heads] float32."""
    return replace(weights, dtype=torch.float32).tensors({"sinks": num_heads}, own={"sinks": own})


class GatedMLP:
    """A gated linear unit (Shazeer 2020, arXiv:2002.05202), in most models SwiGLU."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        inner: int | None = None,
        stored_as: str | None = None,
        down: str = "down_proj",
        gate_up: tuple[str, str] = ("gate_proj", "up_proj"),
    ) -> None:
        """`inner` is I, by default the configuration's. `stored_as` names the one tensor of gate and up."""
        hidden, inner = config.hidden_size, config.intermediate_size if inner is None else inner
        self.activation = config.activation
        self._activate = _ACTIVATE[config.activation]
        self.gate_up = weights.linear(dict.fromkeys(gate_up, inner), hidden, config.mlp_bias, stored_as=stored_as)
        self.down = weights.joining_linear(down, hidden, weights.share.sizes(inner), config.mlp_bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        activated = self._activate(self.gate_up(x))  # [T, H] -> [T, 2 own I] -> [T, own I]
        return self.down(activated)  # -> [T, H]


class UngatedMLP:
    """Two projections with a squared ReLU between them (Nemotron-H)."""

    def __init__(self, config: ModelConfig, weights: Weights, inner: int | None = None) -> None:
        """`inner` is I, by default the configuration's."""
        hidden, inner = config.hidden_size, config.intermediate_size if inner is None else inner
        self.up = weights.linear({"up_proj": inner}, hidden, config.mlp_bias)
        self.down = weights.joining_linear("down_proj", hidden, weights.share.sizes(inner), config.mlp_bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(squared_relu(self.up(x)))  # [T, H] -> [T, own I] -> [T, H]


def dense_mlp(
    config: ModelConfig,
    weights: Weights,
    layer: int,
    stored_as: str | None = None,
    down: str = "down_proj",
    gate_up: tuple[str, str] = ("gate_proj", "up_proj"),
    part: str = "mlp",
) -> GatedMLP:
    """The feed-forward part of every layer of a model without experts, with the names of `GatedMLP` in `part`."""
    return GatedMLP(config, weights / part, stored_as=stored_as, down=down, gate_up=gate_up)

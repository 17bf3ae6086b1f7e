"""A gated delta net (Yang et al. 2024, arXiv:2412.06464) in the place of attention, as in Qwen3-Next and Qwen3.5.

        x -> queries, keys, values -> convolution, silu -> gated delta rule -> norm, times silu(z) -> out
        x -> z, b, dt                                       (state)

What it stores is a state instead of keys and values (`kernels.recurrent`). Key heads, each with its value heads and its
part of the state, are divided among the ranks of a group.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from penstock.attention.forward_context import ForwardContext
from penstock.config.model import ModelConfig
from penstock.config.recurrent import DeltaSizes
from penstock.kernels.gated_delta import GatedDelta
from penstock.layers.linear import Linear
from penstock.messages.kv_cache_spec import KVCacheSpec
from penstock.models.recurrent import check_ranks, on_states
from penstock.models.weights import Weights
from penstock.parallel.topology import head_share


class GatedDeltaNet:
    """A rank's heads (`Attention`)."""

    def __init__(self, config: ModelConfig, weights: Weights, layer: int, rotary: torch.Tensor) -> None:
        sizes, share = config.delta, weights.share
        assert sizes is not None, config.model_type
        check_ranks(share, sizes.key_heads, "key heads of the model's recurrent layers")
        heads = [head_share(sizes.value_heads, sizes.key_heads, each) for each in share.all]
        own = heads[share.index]
        self.qkv, self.gates = _read_inputs(config, weights, sizes, own.kv)
        values = {"A_log": sizes.value_heads, "dt_bias": sizes.value_heads}
        numbers = replace(weights, dtype=torch.float32)
        a_log, dt_bias = (numbers.tensors({name: count}, own={name: own.queries}) for name, count in values.items())
        conv = torch.cat(
            [
                numbers.tensors({"conv1d.weight": sizes.channels}, 1, sizes.taps, own={"conv1d.weight": rows})
                for rows in _channels(sizes, own.kv)
            ]
        )
        norm = numbers.tensor("norm.weight", sizes.value_size)
        self._rule = GatedDelta(sizes.of(own.kv), conv.flatten(1), a_log, dt_bias, norm, config.rms_norm_eps)
        widths = [len(each.queries) * sizes.value_size for each in heads]
        self.out = weights.joining_linear("out_proj", config.hidden_size, widths)
        self._name = f"model.layers.{layer}.linear_attn"
        spec = KVCacheSpec.states(len(own.kv), sizes.head_size, own.kv.start, sizes.key_heads, sizes.draft_inputs)
        self.kv_cache_specs = {self._name: spec}

    def __call__(self, x: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        qkv, gates = self.qkv(x), self.gates(x)  # [T, own C], [T, own V E + 2 own V]
        return self.out(on_states(context, self._name, partial(self._rule, qkv, gates)))


def _channels(sizes: DeltaSizes, key_heads: range) -> list[range]:
    """Returns the channels of these key heads: queries, keys and values."""
    keys = range(key_heads.start * sizes.key_size, key_heads.stop * sizes.key_size)
    total, width = sizes.key_heads * sizes.key_size, sizes.group * sizes.value_size
    return [
        keys,
        range(total + keys.start, total + keys.stop),
        range(2 * total + key_heads.start * width, 2 * total + key_heads.stop * width),
    ]


def _read_inputs(config: ModelConfig, weights: Weights, sizes: DeltaSizes, key_heads: range) -> tuple[Linear, Linear]:
    """Returns the layers to [queries, keys, values] and to [z, b, dt] of these key heads."""
    hidden, keys = config.hidden_size, sizes.key_heads * sizes.key_size
    values, width = sizes.value_heads * sizes.value_size, sizes.group * sizes.value_size
    own_values = range(key_heads.start * width, key_heads.stop * width)
    own_rates = range(key_heads.start * sizes.group, key_heads.stop * sizes.group)
    if weights.has("in_proj_qkvz.weight"):
        return _read_by_head(hidden, weights, sizes, key_heads)
    own_keys = range(key_heads.start * sizes.key_size, key_heads.stop * sizes.key_size)
    qkv = weights.linear(
        {"q": keys, "k": keys, "v": values},
        hidden,
        own={"q": own_keys, "k": own_keys, "v": own_values},
        stored_as="in_proj_qkv",
    )
    gates = weights.linear(
        {"in_proj_z": values, "in_proj_b": sizes.value_heads, "in_proj_a": sizes.value_heads},
        hidden,
        own={"in_proj_z": own_values, "in_proj_b": own_rates, "in_proj_a": own_rates},
    )
    return qkv, gates


def _read_by_head(hidden: int, weights: Weights, sizes: DeltaSizes, key_heads: range) -> tuple[Linear, Linear]:
    """Reads Qwen3-Next's tensors, which have all parts of one key head after another."""
    width, own = sizes.group * sizes.value_size, len(key_heads)
    of_head, rates = sizes.unit + width, 2 * sizes.group
    rows = {"in_proj_qkvz": of_head * sizes.key_heads, "in_proj_ba": rates * sizes.key_heads}
    ranges = {
        name: range(key_heads.start * size, key_heads.stop * size)
        for name, size in zip(rows, (of_head, rates), strict=True)
    }
    numbers = torch.arange(own * of_head).view(own, of_head)
    query, key, value, z = numbers.split([sizes.key_size, sizes.key_size, width, width], 1)
    b, dt = (own * of_head + torch.arange(own * rates)).view(own, rates).split(sizes.group, 1)
    order = [torch.cat([part.flatten() for part in parts]) for parts in ((query, key, value), (z, b, dt))]
    qkvz = {"in_proj_qkvz": rows["in_proj_qkvz"]}
    qkv = weights.linear(qkvz, hidden, own={"in_proj_qkvz": ranges["in_proj_qkvz"]}, order=order[0])
    return qkv, weights.linear(rows, hidden, own=ranges, order=order[1])

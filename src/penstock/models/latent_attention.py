"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1), absorbed for every row.

        x -> norm of x W_DQ -> q per head: plain, rotated        x -> norm of x W_DKV: latent; x W_KR: rotated key part
        plain W_UK -> a query for latents                        [rotated key part, latent] -> cache, one for all heads
        attention over the latents -> per head W_UV -> W_O

The cache holds one vector for each token, and no head's keys or values are ever made of it: W_UK is multiplied with the
query and W_UV with the result. So a row's bits depend neither on the length of its chunk nor on whether others prefill.
A checkpoint whose rotated pairs are neighbours is reordered when it is loaded: a permutation of both queries and keys
changes no product, and the halves are then rotated as everywhere else.
"""

from __future__ import annotations

import torch

from penstock.attention.forward_context import ForwardContext
from penstock.config.latent import LatentConfig
from penstock.config.model import ModelConfig
from penstock.layers.attention import PagedAttention
from penstock.layers.linear import Linear
from penstock.layers.norm import RMSNorm
from penstock.models.parts import halves_of_pairs
from penstock.models.weights import Weights
from penstock.parallel.topology import head_share

# DeepSeek's norms of latents do not read `rms_norm_eps`.
_EPS = 1e-6


class LatentAttention:
    """A rank's query heads; the latents are the same on every rank of a group (`Attention`).

    Shapes: T tokens, Q own heads, R the latent's rank, P plain, D rotated and V value dimensions of a head.
    """

    def __init__(self, config: ModelConfig, weights: Weights, layer: int, rotary: torch.Tensor) -> None:
        assert config.latent is not None, config.model_type
        self._sizes = sizes = config.latent
        heads = [head_share(config.num_attention_heads, 1, share) for share in weights.share.all]
        own = heads[weights.share.index]
        self._num_heads = len(own.queries)
        self._compress = _compress(config, weights, sizes)
        self._latent_norm = RMSNorm(weights.tensor("kv_a_layernorm.weight", sizes.rank), _EPS)
        self._query_norm = None
        if sizes.query_rank:
            self._query_norm = RMSNorm(weights.tensor("q_a_layernorm.weight", sizes.query_rank), _EPS)
        self._queries = _queries(config, weights, sizes, own.queries)
        rows = range(own.queries.start * sizes.expanded_size, own.queries.stop * sizes.expanded_size)
        name, count = "kv_b_proj.weight", config.num_attention_heads * sizes.expanded_size
        expand = weights.tensors({name: count}, sizes.rank, own={name: rows}).unflatten(0, (-1, sizes.expanded_size))
        keys, values = expand.split([sizes.plain_size, sizes.value_size], 1)
        self._absorb = weights.heads_linear_of("kv_b_proj (keys)", keys.transpose(1, 2).contiguous())
        self._expand = weights.heads_linear_of("kv_b_proj (values)", values.contiguous())
        self.attend = PagedAttention(config, layer, rotary, own)
        widths = [len(each.queries) * sizes.value_size for each in heads]
        self.out = weights.joining_linear("o_proj", config.hidden_size, widths, config.attention_bias)
        self.kv_cache_specs = {self.attend.name: self.attend.spec}

    def __call__(self, x: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        sizes, num_heads = self._sizes, self._num_heads
        from_x, latents, rotated_keys = self._compress(x).split([sizes.query_rank, sizes.rank, sizes.rotary_size], 1)
        from_x = x if self._query_norm is None else self._query_norm(from_x.contiguous())
        queries = self._queries(from_x)  # [T, Q P + Q D]: all heads' plain parts, then their rotated ones
        plain = queries[:, : num_heads * sizes.plain_size].unflatten(1, (num_heads, -1))
        absorbed = self._absorb(plain.transpose(0, 1).contiguous())  # [Q, T, P] -> [Q, T, R]
        qk = x.new_empty((len(x), num_heads + 1, sizes.stored_size))
        for_rotated, for_latents = qk.split([sizes.rotary_size, sizes.rank], 2)
        for_rotated[:, :-1] = queries[:, num_heads * sizes.plain_size :].unflatten(1, (num_heads, -1))
        for_latents[:, :-1] = absorbed.transpose(0, 1)
        for_rotated[:, -1] = rotated_keys
        for_latents[:, -1] = self._latent_norm(latents.contiguous())
        attended = self.attend(qk.flatten(1), positions, context).unflatten(1, (num_heads, -1))  # [T, Q, R]
        values = self._expand(attended.transpose(0, 1).contiguous())  # -> [Q, T, V]
        return self.out(values.transpose(0, 1).flatten(1))


def _compress(config: ModelConfig, weights: Weights, sizes: LatentConfig) -> Linear:
    """Returns the layer from the hidden state to [queries' latent, latent, rotated key part], whole on every rank."""
    names = {"q_a_proj": sizes.query_rank} if sizes.query_rank else {}
    names["kv_a_proj_with_mqa"] = sizes.stored_size
    order = torch.arange(sizes.query_rank + sizes.stored_size)
    order[-sizes.rotary_size :] = order[-sizes.rotary_size :][_rotated(sizes)]
    return weights.whole().linear(names, config.hidden_size, config.attention_bias, order=order)


def _queries(config: ModelConfig, weights: Weights, sizes: LatentConfig, heads: range) -> Linear:
    """Returns the layer to [all plain parts, all rotated parts] of a rank's heads."""
    size = sizes.plain_size + sizes.rotary_size
    of_head = torch.arange(len(heads) * size).view(len(heads), size)
    plain, rotated = of_head.split([sizes.plain_size, sizes.rotary_size], 1)
    order = torch.cat((plain.flatten(), rotated[:, _rotated(sizes)].flatten()))
    name, width = ("q_b_proj", sizes.query_rank) if sizes.query_rank else ("q_proj", config.hidden_size)
    own = {name: range(heads.start * size, heads.stop * size)}
    return weights.linear({name: config.num_attention_heads * size}, width, own=own, order=order)


def _rotated(sizes: LatentConfig) -> torch.Tensor:
    """Returns the order of rotated dimensions in which all first ones of a pair precede all second ones."""
    return halves_of_pairs(sizes.rotary_size) if sizes.has_rotary_pairs else torch.arange(sizes.rotary_size)

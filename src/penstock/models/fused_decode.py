"""A decoder for few tokens with the kernels of `penstock.kernels.triton.linear`: five kernels per layer.

        ids -> prepare -> [ qkv -> attend -> out, + -> gate_up, silu -> down, + ] x layers -> norm -> logits

It wraps the model that it is made from, whose layers are grouped-query attention and gated MLPs, uses that model's own
weights and KV cache, and returns the same results except for rounding: a norm's gain is applied before its division,
and a sum is rounded once where the model rounds it between two layers. The two therefore differ in last bits; within 2
to 16 tokens, 17 to 32, and 33 to 64, a row's bits do not depend on the others. Larger batches use the model's own
forward.

The results of a pass are in tensors that torch allocates for it: a `ModelOutput` outlives the pass, and in a CUDA graph
the graph's own pool provides the fixed addresses.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from penstock.attention.forward_context import ForwardContext
from penstock.config.families import NO_MULTIPLIERS, SILU
from penstock.kernels.quantized import dense
from penstock.kernels.triton.capabilities import Capabilities
from penstock.kernels.triton.linear import decode
from penstock.kernels.triton.linear.tiles import MAX_TOKENS, Role
from penstock.layers.attention import PagedAttention
from penstock.layers.norm import Norm, RMSNorm, SumOnly
from penstock.models.decoder import BEFORE, Decoder, DecoderLayer
from penstock.models.interface import Model, ModelOutput
from penstock.models.norms import rms_norm
from penstock.models.parts import GatedMLP, GroupedQueryAttention

# Hidden sizes up to the first use these kernels up to their maximum number of tokens; for larger ones cuBLAS is assumed
# to be better from 32 tokens on, on the basis of a comparison with a prototype of these kernels.
_NARROW, _MAX_TOKENS_OF_WIDE = 2048, 16
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True)
class _Layer:
    qkv: decode.DecodeWeight
    attend: PagedAttention
    out: decode.DecodeWeight
    post_gain: torch.Tensor  # [H]: of the norm after `out`
    gate_up: decode.DecodeWeight
    down: decode.DecodeWeight
    next_gain: torch.Tensor  # [H]: of the norm after `down`, the next layer's or the last


class FusedDecoder:
    """A `Model`: uses its own kernels for at most `max_tokens` tokens or rows, and another model's for more.

    Its passes must run one after the other on one stream.
    """

    def __init__(self, model: Model, capabilities: Capabilities | None = None) -> None:
        """`capabilities`: what the kernels may use, detected by default. `supports` must have returned ""."""
        reason = self.supports(model)
        assert not reason and isinstance(model, Decoder), reason
        self.kv_cache_specs = model.kv_cache_specs
        self._model = model
        self._embedding = dense(model.embedding.weight)
        self._capabilities = Capabilities.of(self._embedding.device) if capabilities is None else capabilities
        self.max_tokens = MAX_TOKENS if self._embedding.shape[1] <= _NARROW else _MAX_TOKENS_OF_WIDE
        self._norm = model.end.norm
        self._head = self._weight(Role.HEAD, model.head.own.dense_weight())
        self._aux_layers = model.aux_layers
        self.logits_dtype = model.logits_dtype
        self._eps = model.config.rms_norm_eps
        layers = [layer for layer in model.layers if isinstance(layer, DecoderLayer)]  # all of them, see supports()
        self._first_gain, *next_gains = map(_gain, (*(layer.input_norm for layer in layers), self._norm))
        self._layers = [self._layer(layer, gain) for layer, gain in zip(layers, next_gains, strict=True)]

    @staticmethod
    def supports(model: Model) -> str:
        """Returns why the model cannot be decoded in this way; empty if it can."""
        if not isinstance(model, Decoder):
            return f"{type(model).__name__} is not a decoder made of parts"
        if not (model.stage.is_first and model.stage.is_last):
            return "it is a stage of a pipeline"
        if model.head.group_size > 1:
            return "ranks divide its layers"
        if model.embedding.dtype not in _DTYPES:
            return f"weights are {model.embedding.dtype}"
        if model.config.multipliers != NO_MULTIPLIERS:
            return "it has multipliers"
        plain = (rms_norm, BEFORE, False)
        if (model.architecture.read_norm, model.architecture.norms, model.architecture.is_parallel) != plain:
            return "its layers have other norms, or other places of them"
        for layer in model.layers:
            if not isinstance(layer, DecoderLayer):
                return "its layers are single parts"
            attention, mlp = layer.attention, layer.feed_forward
            if not isinstance(attention, GroupedQueryAttention) or not isinstance(mlp, GatedMLP):
                return f"layers are made of {type(attention).__name__} and {type(mlp).__name__}"
            if mlp.activation != SILU or attention.width_norms:
                return f"there are the activation {mlp.activation} or norms of all heads together"
            if any(linear.bias is not None for linear in (attention.out.own, mlp.gate_up, mlp.down.own)):
                return "there are biases after the attention or in the MLP"
        return ""

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> ModelOutput:
        if len(input_ids) > self.max_tokens:
            return self._model.forward(input_ids, positions, context)
        stream = decode.prepare(input_ids, self._embedding, self._first_gain, self._capabilities)
        kept = [stream.residual[:, :0]]  # the result if no layer is requested
        eps = self._eps
        for number, layer in enumerate(self._layers):
            if number in self._aux_layers:
                kept.append(stream.residual)
            qkv = decode.linear_normed(layer.qkv, stream, eps)
            attended = layer.attend(qkv, positions, context)
            stream = decode.linear_residual(layer.out, attended, stream, layer.post_gain)
            inner = decode.linear_silu(layer.gate_up, stream, eps)
            stream = decode.linear_residual(layer.down, inner, stream, layer.next_gain)
        if len(self._layers) in self._aux_layers:
            kept.append(stream.residual)
        return ModelOutput(self._norm(stream.residual), torch.cat(kept, -1))

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if len(hidden) > self.max_tokens:
            return self._model.compute_logits(hidden)
        return decode.linear(self._head, hidden)

    def _layer(self, layer: DecoderLayer, next_gain: torch.Tensor) -> _Layer:
        attention, mlp = layer.attention, layer.feed_forward
        assert isinstance(attention, GroupedQueryAttention) and isinstance(mlp, GatedMLP), "see supports()"
        assert isinstance(attention.attend, PagedAttention), "an encoder's attention"
        return _Layer(
            self._weight(Role.QKV, attention.qkv.dense_weight(), attention.qkv.bias),
            attention.attend,
            self._weight(Role.OUT, attention.out.own.dense_weight()),
            _gain(layer.post_norm),
            self._weight(Role.GATE_UP, mlp.gate_up.dense_weight()),
            self._weight(Role.DOWN, mlp.down.own.dense_weight()),
            next_gain,
        )

    def _weight(self, role: Role, weight: torch.Tensor, bias: torch.Tensor | None = None) -> decode.DecodeWeight:
        return decode.DecodeWeight(role, weight, bias, self._capabilities)


def _gain(norm: Norm | SumOnly) -> torch.Tensor:
    assert isinstance(norm, RMSNorm), "see supports()"
    return norm.weight

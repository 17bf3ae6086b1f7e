"""The encoder, whose tensors an `EncoderArchitecture` names (Devlin et al. 2018, arXiv:1810.04805).

        ids, types, positions -> embeddings -> norm -> [ attention -> + -> norm -> feed-forward -> + -> norm ] x layers

Every token attends to all tokens of its prompt, so that a step must hold whole prompts. Keys and values are stored for
the duration of one layer: the model has no KV cache. Shapes: T tokens of this step, H hidden size, I intermediate size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from penstock.attention.forward_context import ForwardContext
from penstock.config.encoder import EncoderConfig
from penstock.config.model import ModelConfig
from penstock.kernels.gelu import gelu
from penstock.layers.attention import EncoderAttention
from penstock.layers.norm import LayerNorm
from penstock.layers.rotary import RotaryTables
from penstock.messages.kv_cache_spec import KVCacheSpec
from penstock.models.decoder import Architecture, DecoderLayer
from penstock.models.interface import ModelOutput
from penstock.models.parts import GroupedQueryAttention
from penstock.models.weights import Weights
from penstock.parallel.topology import head_share


@dataclass(frozen=True, slots=True)
class EncoderArchitecture:
    """Names of tensors: the prefix of the encoder's tensors in a checkpoint that contains more, and the two layers of a
    classifier. `layers` are those of an encoder with a decoder's layers.
    """

    prefix: str
    head_dense: str
    head_out: str
    layers: Architecture | None = None


class Encoder:
    """A `Model` without logits and without a KV cache. Token types other than zero need `encode`."""

    def __init__(self, architecture: EncoderArchitecture, config: ModelConfig, weights: Weights) -> None:
        assert config.encoder is not None, f"{config.path} holds no encoder"
        if weights.has(f"{architecture.prefix}.embeddings.word_embeddings.weight"):
            weights = weights / architecture.prefix
        self.kv_cache_specs: dict[str, KVCacheSpec] = {}
        self.embeddings = Embeddings(config, config.encoder, weights / "embeddings")
        self.words = self.embeddings.words
        self.layers = [
            EncoderLayer(config, config.encoder, weights / "encoder" / "layer" / layer)
            for layer in range(config.num_hidden_layers)
        ]

    @property
    def workspace_spec(self) -> KVCacheSpec:
        """The keys and values that one layer stores while it runs: the same for every layer."""
        return self.layers[0].attention.attend.spec

    @property
    def logits_dtype(self) -> torch.dtype:
        raise AssertionError("an encoder has no logits")

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        raise AssertionError("an encoder has no logits")

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> ModelOutput:
        return self.encode(input_ids, torch.zeros_like(input_ids), positions, context)

    def encode(
        self, input_ids: torch.Tensor, token_types: torch.Tensor, positions: torch.Tensor, context: ForwardContext
    ) -> ModelOutput:
        """[T] int64 each: token ids, 1 in the second text of a pair and else 0, and positions in the prompt."""
        x = self.embeddings(input_ids, token_types, positions)
        for layer in self.layers:
            x = layer(x, positions, context)
        return ModelOutput(x, x[:, :0])


class GatedEncoder(Encoder):
    """An encoder with a decoder's layers (Warner et al. 2024, arXiv:2412.13663). It has one type of tokens.

    ids -> embedding -> norm -> [ norm -> attention -> + -> norm -> gated MLP -> + ] x layers -> norm

    The first layer has no norm before its attention.
    """

    def __init__(self, architecture: EncoderArchitecture, config: ModelConfig, weights: Weights) -> None:
        layers, hidden, eps = architecture.layers, config.hidden_size, config.rms_norm_eps
        assert layers is not None, f"{config.path} holds another encoder"
        if weights.has(f"{architecture.prefix}.embeddings.tok_embeddings.weight"):
            weights = weights / architecture.prefix
        self.kv_cache_specs: dict[str, KVCacheSpec] = {}
        self.words = (weights / "embeddings").embedding("tok_embeddings", config.vocab_size, hidden)
        self._embedding_norm = layers.read_norm(weights / "embeddings", "norm", hidden, eps)
        rotary = RotaryTables(config.max_position_embeddings, weights.device)
        first = replace(layers, norms=replace(layers.norms, attention=None))
        self._gated_layers = [
            DecoderLayer(
                layers if layer else first,
                config,
                weights / "layers" / layer,
                layer,
                rotary.table(config.layer_rope(layer), config.rotary_dim),
            )
            for layer in range(config.num_hidden_layers)
        ]
        self._norm = layers.read_norm(weights, "final_norm", hidden, eps)

    @property
    def workspace_spec(self) -> KVCacheSpec:
        attention = self._gated_layers[0].attention
        assert isinstance(attention, GroupedQueryAttention), type(attention)
        return attention.attend.spec

    def encode(
        self, input_ids: torch.Tensor, token_types: torch.Tensor, positions: torch.Tensor, context: ForwardContext
    ) -> ModelOutput:
        residual = self._embedding_norm(self.words(input_ids))
        x = torch.zeros_like(residual)
        for layer in self._gated_layers:
            x = layer(x, residual, positions, context)
        x = self._norm.add(x, residual)
        return ModelOutput(x, x[:, :0])


class Embeddings:
    def __init__(self, config: ModelConfig, encoder: EncoderConfig, weights: Weights) -> None:
        hidden = config.hidden_size
        self.words = weights.embedding("word_embeddings", config.vocab_size, hidden)
        self.positions = weights.tensor("position_embeddings.weight", encoder.num_positions, hidden)
        self.types = weights.tensor("token_type_embeddings.weight", encoder.num_token_types, hidden)
        self.norm = read_norm(weights / "LayerNorm", hidden, encoder)
        self.first_position = encoder.first_position

    def __call__(self, input_ids: torch.Tensor, token_types: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[T] int64 each -> [T, H]."""
        # A model with one type does not distinguish the texts of a pair.
        types = F.embedding(token_types.clamp(max=len(self.types) - 1), self.types)
        return self.norm(self.words(input_ids) + types, F.embedding(positions + self.first_position, self.positions))


class EncoderLayer:
    def __init__(self, config: ModelConfig, encoder: EncoderConfig, weights: Weights) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        self.attention = SelfAttention(config, weights / "attention")
        self.attention_norm = read_norm(weights / "attention" / "output" / "LayerNorm", hidden, encoder)
        self.up = (weights / "intermediate").linear({"dense": inner}, hidden, bias=True)
        self.down = (weights / "output").joining_linear("dense", hidden, weights.share.sizes(inner), bias=True)
        self.norm = read_norm(weights / "output" / "LayerNorm", hidden, encoder)
        self.has_tanh_gelu = encoder.has_tanh_gelu

    def __call__(self, x: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """[T, H] -> [T, H]."""
        x = self.attention_norm(self.attention(x, positions, context), x)
        activated = gelu(self.up(x), self.has_tanh_gelu)  # [T, H] -> [T, own I]
        return self.norm(self.down(activated), x)  # -> [T, H]


class SelfAttention:
    """Self-attention by a rank's own heads."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        hidden, size, num_heads = config.hidden_size, config.head_dim, config.num_attention_heads
        heads = [head_share(num_heads, num_heads, share) for share in weights.share.all]
        own = heads[weights.share.index]
        columns = range(own.queries.start * size, own.queries.stop * size)
        names = ("query", "key", "value")
        self.qkv = (weights / "self").linear(
            dict.fromkeys(names, num_heads * size), hidden, bias=True, own=dict.fromkeys(names, columns)
        )
        # The positions are in the embeddings.
        rotary = torch.empty((config.max_position_embeddings, 0), device=weights.device)
        self.attend = EncoderAttention(config, own, rotary, layer=0)
        widths = [len(each.queries) * size for each in heads]
        self.out = (weights / "output").joining_linear("dense", hidden, widths, bias=True)

    def __call__(self, x: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        attended = self.attend(self.qkv(x), positions, context)  # [T, H] -> [T, own heads * D]
        return self.out(attended)  # -> [T, H]


def read_norm(weights: Weights, hidden: int, encoder: EncoderConfig) -> LayerNorm:
    """Reads the layer norm of `hidden` features from these tensors."""
    # The names of BERT's first checkpoints, in TensorFlow's terms.
    scale, shift = ("weight", "bias") if weights.has("weight") else ("gamma", "beta")
    return LayerNorm(weights.tensor(scale, hidden), weights.tensor(shift, hidden), encoder.layer_norm_eps)

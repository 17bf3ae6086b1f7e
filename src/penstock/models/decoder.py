"""The decoder, whose parts an `Architecture` provides.

        ids -> embedding -> [ norm -> attention -> + -> norm -> feed-forward -> + ] x layers -> norm -> logits

A family may have norms in other places (`NormNames`), compute attention and feed-forward of one state, or have one of
the two in a layer (`SinglePartLayer`). The residual stream is one tensor, updated in place by the fused
add-and-normalise at the head of every sub-layer. A stage of a pipeline has a range of the layers, the first stage the
embedding and the last one the norm and the head. Shapes: T tokens of this step, H hidden size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from penstock.attention.forward_context import ForwardContext
from penstock.config.families import SILU, SQUARED_RELU
from penstock.config.model import ModelConfig
from penstock.kernels.soft_cap import soft_cap
from penstock.layers.attention import cache_name
from penstock.layers.embedding import Embedding
from penstock.layers.linear import GatheredLinear
from penstock.layers.norm import Norm, SumOnly
from penstock.layers.rotary import RotaryTables
from penstock.messages.kv_cache_spec import KVCacheSpec
from penstock.models.interface import ModelOutput
from penstock.models.norms import ReadNorm, rms_norm
from penstock.models.parts import Attention, FeedForward
from penstock.models.repeated import RepeatedLayers
from penstock.models.weights import Weights
from penstock.parallel.topology import Stage


@dataclass(frozen=True, slots=True)
class IntermediateTensors:
    """The tensors passed from one layer to the next, and from one stage to the next."""

    x: torch.Tensor  # [T, H]: the layer below's addition to the residual stream
    residual: torch.Tensor  # [T, H]
    aux_hidden: torch.Tensor  # [T, kept so far * H]: as in `ModelOutput`
    per_layer: torch.Tensor  # [T, layers * size]: as in `ForwardContext`, or [T, 0]


@dataclass(frozen=True, slots=True)
class NormNames:
    """A checkpoint's names for the norms before and after the parts of a layer; None: there is none in this place."""

    attention: str | None = "input_layernorm"
    after_attention: str | None = None
    feed_forward: str | None = "post_attention_layernorm"
    after_feed_forward: str | None = None


BEFORE = NormNames()


LayerEnd = Callable[[torch.Tensor, torch.Tensor, ForwardContext], torch.Tensor]
"""The feed-forward part's addition to the residual stream, and the stream, [T, H] each -> the layer's addition. It may
overwrite both.
"""

PerLayer = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Token ids [T] and their vectors [T, H] -> the inputs of all layers, as in `ForwardContext`."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """Builds the parts of a layer, each from the configuration, weights and the number of its layer.

    The attention's weights have its own prefix, and it also receives the rotary table; the feed-forward part's have the
    layer's prefix. With `has_single_parts` a layer is one of the two, and the norm before it is `norms.attention`.
    """

    attention: Callable[[ModelConfig, Weights, int, torch.Tensor], Attention]
    feed_forward: Callable[[ModelConfig, Weights, int], FeedForward]
    read_norm: ReadNorm = rms_norm
    norms: NormNames = BEFORE
    attention_name: str = "self_attn"  # the prefix of the attention's weights
    recurrent: Callable[[ModelConfig, Weights, int, torch.Tensor], Attention] | None = None
    recurrent_name: str = "linear_attn"  # the same for layers that have a recurrence in its place
    embedding_name: str = "embed_tokens"
    end_norm: str = "norm"  # the name of the norm after the last layer
    is_parallel: bool = False  # the feed-forward part reads what the attention reads
    has_single_parts: bool = False
    layer_end: Callable[[ModelConfig, Weights, int], LayerEnd] | None = None  # follows the feed-forward part
    per_layer: Callable[[ModelConfig, Weights], PerLayer] | None = None  # if the configuration has such inputs

    def make_attention(self, config: ModelConfig, weights: Weights, layer: int, rotary: torch.Tensor) -> Attention:
        """Returns the layer's attention or recurrence; `weights` has the layer's prefix."""
        if layer not in config.recurrent_layers:
            return self.attention(config, weights / self.attention_name, layer, rotary)
        assert self.recurrent is not None, f"layer {layer} of a {config.model_type} is recurrent"
        return self.recurrent(config, weights / self.recurrent_name, layer, rotary)


class DecoderLayer:
    def __init__(
        self, architecture: Architecture, config: ModelConfig, weights: Weights, layer: int, rotary: torch.Tensor
    ) -> None:
        def norm(name: str) -> Norm:
            return architecture.read_norm(weights, name, config.hidden_size, config.rms_norm_eps)

        def after(name: str | None) -> Callable[[torch.Tensor], torch.Tensor]:
            if name is not None:
                return norm(name)
            scale = config.multipliers.residual
            return _unchanged if scale == 1.0 else lambda x: x * scale

        names = architecture.norms
        self.input_norm = SumOnly() if names.attention is None else norm(names.attention)
        self.attention = architecture.make_attention(config, weights, layer, rotary)
        self.kv_cache_specs = self.attention.kv_cache_specs
        self._after_attention = after(names.after_attention)
        self._is_parallel = architecture.is_parallel
        self.post_norm = SumOnly() if names.feed_forward is None else norm(names.feed_forward)
        self.feed_forward = architecture.feed_forward(config, weights, layer)
        self._after_feed_forward = after(names.after_feed_forward)
        self._end = _no_end if architecture.layer_end is None else architecture.layer_end(config, weights, layer)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, positions: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """`x` [T, H] is the layer below's addition to the residual; returns this layer's."""
        normed = self.input_norm.add(x, residual)
        x = self._after_attention(self.attention(normed, positions, context))
        if self._is_parallel:
            residual += x
        else:
            normed = self.post_norm.add(x, residual)
        return self._end(self._after_feed_forward(self.feed_forward(normed)), residual, context)


class SinglePartLayer:
    """A norm, and an attention, a recurrence or a feed-forward (Nemotron-H)."""

    def __init__(
        self, architecture: Architecture, config: ModelConfig, weights: Weights, layer: int, rotary: torch.Tensor
    ) -> None:
        assert architecture.norms.attention is not None, config.model_type
        self._norm = architecture.read_norm(
            weights, architecture.norms.attention, config.hidden_size, config.rms_norm_eps
        )
        self.kv_cache_specs: dict[str, KVCacheSpec] = {}
        self.feed_forward: FeedForward | None = None
        self._part: Callable[[torch.Tensor, torch.Tensor, ForwardContext], torch.Tensor]
        if layer in config.feed_forward_layers:
            self.feed_forward = feed_forward = architecture.feed_forward(config, weights, layer)
            self._part = lambda x, positions, context: feed_forward(x)
        else:
            self._part = attention = architecture.make_attention(config, weights, layer, rotary)
            self.kv_cache_specs = attention.kv_cache_specs

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, positions: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """As `DecoderLayer`."""
        return self._part(self._norm.add(x, residual), positions, context)


def _no_end(x: torch.Tensor, residual: torch.Tensor, context: ForwardContext) -> torch.Tensor:
    return x


def _unchanged(x: torch.Tensor) -> torch.Tensor:
    return x


class Decoder:
    """A `Model`, or one stage of it."""

    def __init__(
        self,
        architecture: Architecture,
        config: ModelConfig,
        weights: Weights,
        aux_layers: tuple[int, ...] = (),
        stage: Stage | None = None,
        feeds_head: bool = False,
        has_logits: bool = True,
    ) -> None:
        """`aux_layers` are those at whose inputs the residual stream is kept, in `ModelOutput`'s order.

        `feeds_head`: a draft head after the last layer shares the embedding. Without `has_logits` there is no output
        head, and the checkpoint's tensors may lack the prefix that distinguishes them from it.
        """
        self.stage = stage or Stage(range(config.num_hidden_layers))
        self.architecture = architecture
        self.config = config
        self.aux_layers = aux_layers
        if config.activation not in ((SILU, SQUARED_RELU) if config.experts is None else (SILU,)):
            weights.check_on_cpu(f"the activation {config.activation}")
        weights, inner = find_decoder(weights, has_logits, f"{architecture.end_norm}.weight")
        self.rotary = RotaryTables(config.max_position_embeddings, weights.device)
        ropes = [config.layer_rope(layer) for layer in self.stage.layers]
        tables = [
            self.rotary.table(rope, config.layer_rotary_dim(layer))
            for layer, rope in zip(self.stage.layers, ropes, strict=True)
        ]
        make_layer = SinglePartLayer if architecture.has_single_parts else DecoderLayer
        self.layers = [
            make_layer(architecture, config, inner / "layers" / layer, layer, table)
            for layer, table in zip(self.stage.layers, tables, strict=True)
        ]
        specs = [layer.kv_cache_specs for layer in self.layers]
        self.kv_cache_specs = {name: spec for of_layer in specs for name, spec in of_layer.items()}
        # The layers from one at whose input the stream is kept to the next.
        numbers = self.stage.layers
        starts = sorted({numbers.start, *(number for number in aux_layers if number in numbers)})
        spans = [range(start, end) for start, end in itertools.pairwise((*starts, numbers.stop))]
        self._spans = [
            (
                span,
                RepeatedLayers(
                    ["".join(specs[number - numbers.start]) for number in span],
                    [cache_name(source) for number in span if (source := config.kv_source(number)) != number],
                ),
            )
            for span in spans
        ]
        self._embedding: Embedding | None = None
        # Rounded to the dtype, as Gemma's is; those of other models are numbers of the dtype.
        self._embedding_scale = float(torch.tensor(config.multipliers.embedding, dtype=weights.dtype))
        is_tied = has_logits and self.stage.is_last and has_tied_head(config, weights)
        if self.stage.is_first or feeds_head or is_tied:
            self._embedding = inner.embedding(architecture.embedding_name, config.vocab_size, config.hidden_size)
        self._per_layer: PerLayer | None = None
        if self.stage.is_first and config.per_layer_inputs is not None:
            assert architecture.per_layer is not None, f"a {config.model_type} has inputs of every layer"
            self._per_layer = architecture.per_layer(config, inner)
        self._end: DecoderEnd | None = None
        if self.stage.is_last:
            norm = architecture.read_norm(inner, architecture.end_norm, config.hidden_size, config.rms_norm_eps)
            self._end = DecoderEnd(norm, self._make_head(weights) if has_logits else None)

    def _make_head(self, weights: Weights) -> GatheredLinear:
        vocab = self.config.vocab_size
        # Adapters change no head.
        weights = replace(weights, load_quantization=weights.load_quantization.for_head(), lora=None)
        if not has_tied_head(self.config, weights):
            return weights.whole_linear("lm_head", vocab, self.config.hidden_size, is_wide=True)
        return weights.gathered(weights.linear_of("lm_head", weights.tied(self.embedding.weight), is_wide=True), vocab)

    @property
    def embedding(self) -> Embedding:
        """Exists on the first stage, and on a last one that needs it."""
        assert self._embedding is not None, f"{self.stage} has no embedding"
        return self._embedding

    @property
    def end(self) -> DecoderEnd:
        """Exists on the last stage."""
        assert self._end is not None, f"{self.stage} is not the last one"
        return self._end

    @property
    def head(self) -> GatheredLinear:
        """Exists on the last stage of a model with logits."""
        assert self.end.head is not None, "a model without logits"
        return self.end.head

    @property
    def logits_dtype(self) -> torch.dtype:
        return self.head.out_dtype

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> ModelOutput:
        """Runs a whole model."""
        return self.finish(self.run_layers(self.embed(input_ids), positions, context))

    def embed(self, input_ids: torch.Tensor) -> IntermediateTensors:
        """Returns the first layer's input."""
        residual = self.embedding(input_ids)
        if self._embedding_scale != 1.0:
            residual = residual * self._embedding_scale
        nothing = residual[:, :0]
        per_layer = nothing if self._per_layer is None else self._per_layer(input_ids, residual)
        return IntermediateTensors(torch.zeros_like(residual), residual, nothing, per_layer)

    def run_layers(
        self, tensors: IntermediateTensors, positions: torch.Tensor, context: ForwardContext
    ) -> IntermediateTensors:
        """Runs the stage's layers. The given residual stream is overwritten."""
        x, residual = tensors.x, tensors.residual
        kept = [tensors.aux_hidden]
        if self.config.per_layer_inputs is not None:
            context = replace(context, per_layer=tensors.per_layer)
        for span, run in self._spans:
            if span.start in self.aux_layers:
                kept.append(residual + x)
            first = span.start - self.stage.layers.start
            x = run(self.layers[first : first + len(span)], x, residual, positions, context)
        aux_hidden = torch.cat(kept, -1) if len(kept) > 1 else kept[0]
        return IntermediateTensors(x, residual, aux_hidden, tensors.per_layer)

    def finish(self, tensors: IntermediateTensors) -> ModelOutput:
        """Runs the part after the last layer."""
        hidden, aux_hidden = self.end.norm.add(tensors.x, tensors.residual), tensors.aux_hidden
        if self.stage.layers.stop in self.aux_layers:
            aux_hidden = torch.cat((aux_hidden, tensors.residual), -1)
        return ModelOutput(hidden, aux_hidden)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits, multipliers = self.head(hidden), self.config.multipliers
        if multipliers.logits != 1.0:
            logits = logits * multipliers.logits
        if multipliers.logits_cap:
            logits = soft_cap(logits if self.head.group_size == 1 else logits.clone(), multipliers.logits_cap)
        return logits


@dataclass(frozen=True, slots=True)
class DecoderEnd:
    """The part after the last layer; a model whose hidden states are the result has no output head."""

    norm: Norm
    head: GatheredLinear | None


def find_decoder(weights: Weights, has_logits: bool, known: str) -> tuple[Weights, Weights]:
    """Returns the views of the output head and of all other tensors, of which `known` is one.

    In a multimodal checkpoint they are below `language_model`, which transformers writes into `model` since version 5.
    """
    inner = weights / "model"
    for head, found in (
        (weights, inner),
        (weights, weights / "backbone"),
        (weights, inner / "language_model"),
        (weights / "language_model", weights / "language_model" / "model"),
    ):
        if found.has(known):
            return head, found
    return weights, inner if has_logits else weights


def has_tied_head(config: ModelConfig, weights: Weights) -> bool:
    """Whether the output head is the embedding. The two parts of a multimodal configuration may disagree about it, or
    one of them state a default of its class: then the checkpoint has a head of its own or not.
    """
    return config.tie_word_embeddings and not (config.wrapper and weights.has("lm_head.weight"))

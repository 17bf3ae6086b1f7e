"""`FusedDecoder` compared with the model that it is made from: equal numbers up to rounding, and equal tokens."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.attention.backend import AttentionMetadata
from penstock.attention.forward_context import ForwardContext
from penstock.config.engine import ExecutionConfig, SchedulerConfig
from penstock.config.families import MultipliersConfig
from penstock.config.kv_cache_groups import group_layers
from penstock.config.model import ModelConfig
from penstock.config.rope import RopeConfig
from penstock.kernels.triton.capabilities import Capabilities
from penstock.messages.kv_cache_spec import KVCacheConfig
from penstock.models.decoder import Architecture, Decoder
from penstock.models.fused_decode import FusedDecoder
from penstock.models.interface import Model, ModelOutput
from penstock.models.parts import GroupedQueryAttention, dense_mlp
from penstock.models.registry import build_model
from penstock.models.sources.source import ALL, Part
from penstock.models.weights import Weights
from penstock.runner.kv_cache import allocate_kv_cache
from penstock.worker.parts import make_parts

ON = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PARTS = make_parts(ON)
VOCAB, BLOCK, BLOCKS_EACH = 101, 16, 2
CONFIG = ModelConfig(
    path=Path("nowhere"),
    model_type="llama",
    architecture="",
    dtype="float32",
    vocab_size=VOCAB,
    hidden_size=72,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=24,
    rms_norm_eps=1e-5,
    rope=RopeConfig(1e4, "default", {}),
    max_position_embeddings=64,
    tie_word_embeddings=False,
    attention_bias=False,
    mlp_bias=False,
    layer_windows=(0, 0),
)
MODELS = {
    "llama": CONFIG,
    "mistral": replace(CONFIG, model_type="mistral", layer_windows=(7, 7)),
    "qwen2": replace(CONFIG, model_type="qwen2", tie_word_embeddings=True),
    "qwen3": replace(CONFIG, model_type="qwen3", head_dim=16),
    "sinks": replace(CONFIG, layer_windows=(7, 0), attn_logit_softcapping=0.5, has_attention_sinks=True),
}


class RandomSource:
    """Random values for every tensor, including biases and gains, so that an omitted one is noticed."""

    def read(self, name: str, shape: Sequence[int], part: Part = ALL) -> torch.Tensor:
        random = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        values = torch.randn(*shape, generator=random)
        values = values * shape[-1] ** -0.5 if len(shape) > 1 else values * 0.3 + (not name.endswith("bias"))
        return values[part]

    def has(self, name: str) -> bool:
        return True

    def close(self) -> None: ...


def make(config: ModelConfig, aux_layers: tuple[int, ...] = ()) -> Decoder:
    return build_model(config, Weights(RandomSource(), torch.float32, ON), aux_layers)


def caches_of(model: Model, num_requests: int) -> dict[str, torch.Tensor]:
    cache = KVCacheConfig(1 + BLOCKS_EACH * num_requests, BLOCK, group_layers(model.kv_cache_specs))
    return {name: tensor.fill_(torch.nan) for name, tensor in allocate_kv_cache(cache, PARTS.allocate).tensors.items()}


def context_of(caches: dict[str, torch.Tensor], lengths: Sequence[int], counts: Sequence[int]) -> ForwardContext:
    """Returns the context of a step that computes the last `counts` tokens of requests with `lengths` tokens in all."""
    table = 1 + torch.arange(BLOCKS_EACH * len(lengths), dtype=torch.int32).view(len(lengths), BLOCKS_EACH)
    places = [torch.arange(n - c, n) for n, c in zip(lengths, counts, strict=True)]
    slots = [table[r].long()[p // BLOCK] * BLOCK + p % BLOCK for r, p in enumerate(places)]
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, *torch.tensor(counts).cumsum(0)], dtype=torch.int32, device=ON),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=ON),
        block_table=table.to(ON),
        slot_mapping=torch.cat(slots).to(ON),
        max_query_len=max(counts),
        max_seq_len=max(lengths),
    )
    limits = SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=len(lengths), max_model_len=BLOCKS_EACH * BLOCK)
    attention = PARTS.make_attention(limits, ExecutionConfig())
    return ForwardContext(dict.fromkeys(caches, metadata), caches, attention)


def step(
    model: Model, caches: dict[str, torch.Tensor], ids: torch.Tensor, lengths: Sequence[int], counts: Sequence[int]
) -> ModelOutput:
    positions = torch.cat([torch.arange(n - c, n) for n, c in zip(lengths, counts, strict=True)]).to(ON)
    return model.forward(ids, positions, context_of(caches, lengths, counts))


def prefilled(model: Model, lengths: Sequence[int]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Returns caches that hold random prompts of these lengths, and the tokens that follow them."""
    caches = caches_of(model, len(lengths))
    ids = torch.randint(VOCAB, (sum(lengths),), generator=torch.Generator().manual_seed(1)).to(ON)
    hidden = step(model, caches, ids, lengths, lengths).hidden
    last = torch.tensor(lengths).cumsum(0).to(ON) - 1
    return caches, model.compute_logits(hidden[last]).argmax(-1)


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, atol=3e-5, rtol=3e-5)


@pytest.mark.spread(1)
@pytest.mark.parametrize("num_requests", [1, 2, 17])
@pytest.mark.parametrize("name", MODELS)
def test_a_few_steps_give_the_same_numbers_and_tokens(name: str, num_requests: int) -> None:
    model = make(MODELS[name])
    fused = FusedDecoder(model, Capabilities.of(ON) if ON.type == "cuda" else Capabilities(tma=num_requests == 2))
    assert fused.kv_cache_specs is model.kv_cache_specs
    lengths = [5 + i for i in range(num_requests)]
    caches, ids = prefilled(model, lengths)
    fused_caches = copy.deepcopy(caches)
    for _ in range(2):
        lengths = [length + 1 for length in lengths]
        expected = step(model, caches, ids, lengths, [1] * num_requests)
        got = step(fused, fused_caches, ids, lengths, [1] * num_requests)
        assert_close(got.hidden, expected.hidden)
        assert got.aux_hidden.shape == expected.aux_hidden.shape == (num_requests, 0)
        logits = model.compute_logits(expected.hidden)
        assert_close(fused.compute_logits(got.hidden), logits)
        ids = logits.argmax(-1)
        assert torch.equal(fused.compute_logits(got.hidden).argmax(-1), ids)
    for layer, cache in caches.items():
        torch.testing.assert_close(fused_caches[layer], cache, atol=3e-5, rtol=3e-5, equal_nan=True)


def test_rows_that_verify_drafts_and_return_their_streams() -> None:
    model = make(MODELS["qwen3"], aux_layers=(0, 1, 2))
    caches, ids = prefilled(model, [4, 9])
    fused_caches = copy.deepcopy(caches)
    ids = torch.cat((ids[:1], torch.tensor([7, 8], device=ON), ids[1:], torch.tensor([9], device=ON)))
    expected = step(model, caches, ids, [7, 11], [3, 2])
    got = step(FusedDecoder(model, Capabilities()), fused_caches, ids, [7, 11], [3, 2])
    assert_close(got.hidden, expected.hidden)
    assert_close(got.aux_hidden, expected.aux_hidden)
    assert got.aux_hidden.shape == (5, 3 * 72)


@pytest.mark.parametrize("config", [replace(CONFIG, attention_bias=True), replace(CONFIG, mlp_bias=True)])
def test_models_with_other_biases_are_not_supported(config: ModelConfig) -> None:
    assert "biases" in FusedDecoder.supports(make(config))


class Halving:
    """A feed-forward layer without weights."""

    def __init__(self, config: ModelConfig, weights: Weights, layer: int) -> None: ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x / 2


def test_supports_gives_the_reason_against_a_model() -> None:
    model = make(CONFIG)
    assert FusedDecoder.supports(model) == ""
    assert "FusedDecoder is not a decoder" in FusedDecoder.supports(FusedDecoder(model, Capabilities()))
    scaled = replace(CONFIG, multipliers=MultipliersConfig(residual=0.5))
    assert FusedDecoder.supports(make(scaled)) == "it has multipliers"
    weights = Weights(RandomSource(), torch.float32, ON)
    parallel = Decoder(Architecture(GroupedQueryAttention, dense_mlp, is_parallel=True), CONFIG, weights)
    assert FusedDecoder.supports(parallel) == "its layers have other norms, or other places of them"
    architecture = Architecture(attention=GroupedQueryAttention, feed_forward=Halving)
    other = Decoder(architecture, CONFIG, Weights(RandomSource(), torch.float32, ON))
    assert FusedDecoder.supports(other) == "layers are made of GroupedQueryAttention and Halving"
    caches = caches_of(other, 1)
    hidden = step(other, caches, torch.arange(5, device=ON), [5], [5]).hidden
    assert hidden.isfinite().all()
    assert not torch.equal(hidden, step(model, caches, torch.arange(5, device=ON), [5], [5]).hidden)

"""What single families' fields of `config.json` mean, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from penstock.config.engine import EngineArgs, resolve
from penstock.config.families import NO_MULTIPLIERS, text_part
from penstock.config.layer_heads import KVHeads, PerLayerInputs
from penstock.config.model import ModelConfig, load_model_config, parse_model_config, read_model_json
from penstock.config.recurrent import ConvSizes, MambaSizes
from penstock.models.norms import rms_norm, rms_norm_from_one, rms_norm_rounded_once
from penstock.models.registry import ENCODERS, MODELS, build_model
from penstock.models.sources.dummy import DummySource
from penstock.models.weights import Weights
from penstock.parallel.topology import stages
from penstock.utils.errors import ConfigError

SHAPE: dict[str, Any] = {
    "vocab_size": 301,
    "hidden_size": 96,
    "intermediate_size": 176,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "dtype": "bfloat16",
}

LATENT = {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "v_head_dim": 32}
GRANITE4 = {"num_local_experts": 0, "mamba_n_heads": 12, "shared_intermediate_size": 136}


def parse(model_type: str, **fields: Any) -> ModelConfig:
    return parse_model_config(Path("model"), {**SHAPE, "model_type": model_type, **fields}, "auto")


def test_fields_that_published_files_leave_out() -> None:
    """Google's Gemma 3 files have sizes and little else in their text part."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    text |= {"sliding_window": 1024, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    raw = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    config = parse_model_config(Path("model"), {**raw, "torch_dtype": "bfloat16"}, "auto")
    assert (config.model_type, config.wrapper, config.dtype) == ("gemma3_text", "gemma3", "bfloat16")
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (8, 4, 256)
    assert (config.vocab_size, config.max_position_embeddings) == (262208, 131072)
    assert config.tie_word_embeddings
    assert config.layer_windows[:7] == (1024,) * 5 + (0, 1024)
    assert (config.rope.theta, config.rope.rope_type) == (1e6, "linear")
    assert config.window_rope is not None
    assert (config.window_rope.theta, config.window_rope.rope_type) == (1e4, "default")
    assert config.multipliers.attention == 256**-0.5
    assert config.activation == "gelu_tanh"


@pytest.mark.parametrize(
    "name",
    ["glm4_moe_lite", "mistral", "mixtral", "olmo2", "phi3", "qwen2", "qwen3", "qwen2_vl_text", "qwen2_5_vl_text"],
)
def test_fields_that_are_missing_have_the_values_of_transformers(name: str) -> None:
    defaults: Any = CONFIG_MAPPING[name]()
    fields = {**SHAPE, "num_hidden_layers": 82, "max_position_embeddings": 8192, "model_type": name}
    if name == "glm4_moe_lite":
        fields |= {**LATENT, "qk_rope_head_dim": 32, "n_routed_experts": 8, "moe_intermediate_size": 64}
    fields |= {"num_experts_per_tok": 2, "num_local_experts": 8}
    if hasattr(defaults, "max_window_layers"):
        fields |= {"use_sliding_window": True, "sliding_window": 64}
        windows = (0,) * defaults.max_window_layers + (64,) * (82 - defaults.max_window_layers)
    else:
        windows = (getattr(defaults, "sliding_window", None) or 0,) * 82
    config = parse_model_config(Path("model"), fields, "auto")
    assert config.rms_norm_eps == defaults.rms_norm_eps
    assert config.layer_windows == windows


# A file without them has tensors of other shapes or names, or a shorter context.
SHOWN_BY_TENSORS = {"kv_lora_rank", "max_position_embeddings", "num_key_value_heads", "q_lora_rank"}


@pytest.mark.parametrize("name", MODELS)
def test_a_field_that_is_left_out_has_the_value_of_the_family_s_class(name: str) -> None:
    raw = json.loads(CONFIG_MAPPING[name]().to_json_string(use_diff=False)) | {"model_type": name, "dtype": "bfloat16"}
    if name == "deepseek_v2":
        raw["num_experts_per_tok"] = 6  # the class has none
    full = parse_model_config(Path("model"), raw, "auto")
    for field in sorted(raw.keys() - SHOWN_BY_TENSORS - {"model_type", "dtype"}):
        try:
            config = parse_model_config(Path("model"), {key: raw[key] for key in raw.keys() - {field}}, "auto")
        except ConfigError:
            continue  # which names the field
        if field == "rope_parameters":
            # The class's own ones may extend the context.
            assert name == "ministral3" or config.rope.theta == full.rope.theta
        else:
            assert config == full, field


def test_the_kinds_of_layers_of_a_gemma_4() -> None:
    """Fields as in Google's files of E2B: the last layer has no window whatever `layer_types` says."""
    text = {"model_type": "gemma4_text", "hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 10}
    text |= {"num_kv_shared_layers": 4, "num_key_value_heads": 1, "global_head_dim": 512, "use_double_wide_mlp": True}
    text |= {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 3 + ["sliding_attention"]}
    raw = {"model_type": "gemma4", "architectures": ["Gemma4ForConditionalGeneration"], "text_config": text}
    config = parse_model_config(Path("model"), {**raw, "dtype": "bfloat16"}, "auto")
    assert (config.model_type, config.wrapper, config.dtype) == ("gemma4_text", "gemma4", "bfloat16")
    assert config.layer_windows == (512, 512, 0) * 3 + (0,)
    assert [config.kv_source(layer) for layer in range(10)] == [0, 1, 2, 3, 4, 5, 4, 4, 5, 5]
    assert [config.layer_heads(layer) for layer in (4, 5)] == [KVHeads(1, 256), KVHeads(1, 512)]
    assert [config.layer_rotary_dim(layer) for layer in (4, 5)] == [256, 512]
    assert config.window_rope is not None
    assert (config.window_rope.theta, config.window_rope.rope_type) == (1e4, "default")
    assert (config.rope.theta, config.rope.rope_type) == (1e6, "proportional")
    assert config.per_layer_inputs == PerLayerInputs(size=256, vocab_size=262144)
    assert (config.multipliers.embedding, config.multipliers.attention) == (1536**0.5, 1.0)
    assert config.tie_word_embeddings
    assert config.experts is None
    assert parse("gemma4_text").layer_windows == (512,) * 5 + (0, 512, 0)


@pytest.mark.parametrize(
    ("fields", "full"),
    [
        ({}, KVHeads(2, 512)),
        ({"global_head_dim": 24}, None),
        # The number of heads is that of others unless keys are values, as in transformers.
        ({"num_global_key_value_heads": 1}, KVHeads(2, 512)),
        ({"num_global_key_value_heads": 1, "attention_k_eq_v": True}, KVHeads(1, 512)),
        ({"per_layer_config": {"5": {"head_dim": 48}, "7": {"head_dim": 48}}}, KVHeads(2, 48)),
        ({"per_layer_config": {str(layer): {"num_key_value_heads": 4} for layer in (5, 7)}}, KVHeads(4, 24)),
        # As transformers writes the numbers of layers if there are more than ten.
        ({"per_layer_config": {"05": {"head_dim": 48}, "07": {"head_dim": 48}}}, KVHeads(2, 48)),
        ({"per_layer_config": {}}, None),
    ],
)
def test_the_heads_of_layers_without_a_window(fields: dict[str, Any], full: KVHeads | None) -> None:
    assert parse("gemma4_text", head_dim=24, num_key_value_heads=2, **fields).full_heads == full


@pytest.mark.parametrize(
    ("model_type", "fields", "windows", "unrotated"),
    [
        ("smollm3", {}, (), (3, 7)),
        ("smollm3", {"no_rope_layer_interval": 3}, (), (2, 5)),
        ("smollm3", {"no_rope_layers": [0, 1, 1, 1, 1, 1, 1, 0]}, (), (0, 7)),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 64}, (3, 7), (3, 7)),
        ("cohere2", {}, (0, 1, 2, 4, 5, 6), (3, 7)),
        ("exaone4", {}, (0, 1, 2, 4, 5, 6), (3, 7)),
        ("exaone4", {"sliding_window": None}, (), ()),
        ("olmo3", {}, (0, 1, 2, 4, 5, 6), ()),
        ("gpt_oss", {"num_local_experts": 8}, (0, 2, 4, 6), ()),
        ("gemma2", {}, (0, 2, 4, 6), ()),
        ("gemma3_text", {}, (0, 1, 2, 3, 4, 6, 7), ()),
        ("gemma3_text", {"sliding_window_pattern": 2}, (0, 2, 4, 6), ()),
        ("phi3", {"sliding_window": 100}, tuple(range(8)), ()),
        ("qwen3_vl_text", {"sliding_window": 100}, (), ()),
    ],
)
def test_layers_with_a_window_and_without_rotation(
    model_type: str, fields: dict[str, Any], windows: tuple[int, ...], unrotated: tuple[int, ...]
) -> None:
    config = parse(model_type, **fields)
    assert tuple(layer for layer, window in enumerate(config.layer_windows) if window) == windows
    assert config.unrotated_layers == unrotated
    assert [layer for layer in range(8) if config.layer_rope(layer) is None] == list(unrotated)


def test_olmo3_extends_the_context_of_full_layers_alone() -> None:
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
    config = parse("olmo3", rope_scaling=yarn)
    assert config.window_rope is not None
    assert (config.rope.rope_type, config.window_rope.rope_type) == ("yarn", "default")
    assert config.rope.theta == config.window_rope.theta == 500000.0
    assert config.layer_rope(0) == config.window_rope
    assert config.layer_rope(3) == config.rope


def test_yarn_extends_a_context_whose_length_was_left_as_it_was() -> None:
    """As the cards of Qwen's models have it written into `config.json`."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    for stated, expected in ((64, 256), (80, 256), (1000, 1000)):
        config = parse("qwen3", rope_scaling=yarn, max_position_embeddings=stated)
        assert config.max_position_embeddings == expected


def test_a_context_that_was_extended_by_hand_keeps_the_base() -> None:
    """A checkpoint that names `rope_parameters`, to which the block of a card was added as `rope_scaling`."""
    stored = {"rope_type": "default", "rope_theta": 1e6}
    yarn = {"factor": 4.0, "original_max_position_embeddings": 64}
    for name in ("rope_type", "type"):
        config = parse("qwen3", rope_parameters=stored, rope_scaling={name: "yarn", **yarn})
        assert (config.rope.rope_type, config.rope.theta, config.rope.scaling["factor"]) == ("yarn", 1e6, 4.0)
    longrope = {"rope_type": "longrope", "short_factor": [1.0] * 12, "long_factor": [2.0] * 12, "rope_theta": 1e5}
    config = parse("phi3", rope_parameters=longrope, rope_scaling={"rope_type": "yarn", **yarn})
    assert (config.rope.rope_type, config.rope.theta) == ("yarn", 1e5)
    by_kind = {"full_attention": {**stored, "rope_theta": 1e7}, "sliding_attention": stored}
    config = parse("olmo3", rope_parameters=by_kind, rope_scaling={"rope_type": "yarn", **yarn})
    assert (config.rope.rope_type, config.rope.theta) == ("default", 1e7)


@pytest.mark.parametrize(("max_model_len", "is_long"), [(128, False), (129, True)])
def test_a_draft_model_has_the_factors_of_the_engine_s_longest_context(
    tmp_path: Path, max_model_len: int, is_long: bool
) -> None:
    scaling = {"type": "longrope", "short_factor": [1.0] * 12, "long_factor": [2.0] * 12}
    for name, original in (("target", 512), ("draft", 128)):
        (tmp_path / name).mkdir()
        fields = {"model_type": "phi3", "rope_scaling": scaling, "original_max_position_embeddings": original}
        (tmp_path / name / "config.json").write_text(json.dumps({**SHAPE, **fields}))
    drafts = {"method": "draft_model", "model": str(tmp_path / "draft"), "num_speculative_tokens": 2}
    args = EngineArgs(
        model=str(tmp_path / "target"),
        speculative_config=drafts,
        max_model_len=max_model_len,
        skip_tokenizer_init=True,
        device="cpu",
    )
    config = resolve(args)
    assert config.speculative is not None
    assert [shape.rope.has_long_factors for shape in (config.model, *config.speculative.shapes)] == [False, is_long]


@pytest.mark.parametrize("name", ["su", "longrope", "yarn"])
def test_longrope_chooses_its_factors_by_the_longest_context(name: str) -> None:
    factors = {"short_factor": [1.0] * 12, "long_factor": [2.0] * 12}
    config = parse("phi3", rope_scaling={"type": name, **factors}, original_max_position_embeddings=128)
    assert config.rope.rope_type == "longrope"
    assert config.rope.scaling["attention_factor"] == pytest.approx((1 + 2 / 7) ** 0.5)
    assert config.rope.has_long_factors
    assert not config.for_length(128).rope.has_long_factors
    assert config.for_length(129).rope.has_long_factors


def test_rotary_tables_have_the_positions_of_the_engine_and_no_more(tmp_path: Path) -> None:
    """With a context of a million tokens, tables for all of them would take seconds and hundreds of MiB. A draft model
    of a shorter context than the engine's has the engine's positions too.
    """
    for name, context in (("target", 1 << 20), ("draft", 64)):
        (tmp_path / name).mkdir()
        fields = {**SHAPE, "model_type": "llama", "num_hidden_layers": 1, "max_position_embeddings": context}
        (tmp_path / name / "config.json").write_text(json.dumps(fields))
    drafts = {"method": "draft_model", "model": str(tmp_path / "draft"), "num_speculative_tokens": 2}
    config = resolve(
        EngineArgs(
            model=str(tmp_path / "target"), max_model_len=128, skip_tokenizer_init=True, speculative_config=drafts
        )
    )
    assert config.speculative is not None
    cpu = torch.device("cpu")
    for shape in (config.model, *config.speculative.shapes):
        model = build_model(shape, Weights(DummySource(cpu), torch.bfloat16, cpu))
        assert len(model.rotary.table(shape.rope, shape.rotary_dim)) == 128


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl"])
def test_a_multimodal_model_without_a_text_part_of_its_own(model_type: str) -> None:
    config = parse(model_type, vision_config={}, rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]})
    assert (config.model_type, config.wrapper) == (f"{model_type}_text", model_type)
    assert config.rope.rope_type == "default"


@pytest.mark.parametrize(
    ("outer", "inner", "is_tied"),
    [
        ({}, {}, False),
        ({"tie": True}, {"tie": False}, True),
        ({"tie": False}, {"tie": True}, True),
        ({}, {"tie": True}, True),
    ],
)
def test_a_head_is_tied_if_either_part_says_so(outer: dict[str, bool], inner: dict[str, bool], is_tied: bool) -> None:
    head, text = ({f"{name}_word_embeddings": value for name, value in part.items()} for part in (outer, inner))
    raw = {"model_type": "mistral3", **head, "text_config": {**SHAPE, "model_type": "mistral", **text}}
    assert parse_model_config(Path("model"), raw, "auto").tie_word_embeddings == is_tied


@pytest.mark.parametrize("has_head", [False, True])
def test_a_multimodal_checkpoint_s_own_head_is_used(has_head: bool) -> None:
    """Transformers 5 writes that the head is tied, the default of the outer class, beside a text part that says no."""
    raw = {"model_type": "mistral3", "tie_word_embeddings": True, "text_config": {**SHAPE, "model_type": "mistral"}}
    config = parse_model_config(Path("model"), raw, "auto")

    class Source(DummySource):
        def has(self, name: str) -> bool:
            return name != "lm_head.weight" or has_head

    source = Source(torch.device("cpu"))
    model = build_model(config, Weights(source, torch.bfloat16, torch.device("cpu")))
    wanted = source.read("lm_head.weight" if has_head else "model.embed_tokens.weight", (301, 96))
    hidden = torch.eye(96, dtype=torch.bfloat16)
    assert torch.equal(model.compute_logits(hidden), wanted.T.float().to(torch.bfloat16).to(model.logits_dtype))


def test_a_head_that_is_tied_is_the_embedding_whatever_the_checkpoint_has() -> None:
    source = DummySource(torch.device("cpu"))
    weights = Weights(source, torch.bfloat16, torch.device("cpu"))
    model = build_model(parse("llama", tie_word_embeddings=True), weights)
    assert torch.equal(model.head.own.dense_weight(), model.embedding.weight)


def test_fields_outside_the_text_part() -> None:
    text = {**SHAPE, "model_type": "gemma3_text", "dtype": "float32"}
    raw = {"model_type": "gemma3", "torch_dtype": "float16", "eos_token_id": [1, 106], "text_config": text}
    assert parse_model_config(Path("model"), raw, "auto").dtype == "float16"
    assert text_part(raw)["eos_token_id"] == [1, 106]
    assert text_part({**raw, "text_config": {**text, "eos_token_id": 7}})["eos_token_id"] == 7


def test_a_window_that_hides_nothing() -> None:
    assert parse("phi3", sliding_window=512).layer_windows == (0,) * 8
    assert parse("phi3", sliding_window=511).layer_windows == (511,) * 8


def test_the_fields_of_published_files_of_lfm2() -> None:
    """Sizes before they are adjusted, under the names of their first release, and without `layer_types`."""
    fields = {"block_ff_dim": 12288, "hidden_size": 2048, "norm_eps": 1e-4, "tie_embedding": False}
    config = parse("lfm2", **fields, full_attn_idxs=[2, 5])
    assert (config.intermediate_size, config.rms_norm_eps, config.tie_word_embeddings) == (8192, 1e-4, False)
    assert config.recurrent_layers == (0, 1, 3, 4, 6, 7)
    assert config.conv == ConvSizes(heads=32, width=64, taps=3)
    assert config.rope.theta == 1e6
    assert parse("lfm2", intermediate_size=1000, block_auto_adjust_ff_dim=False).intermediate_size == 1000
    # 0.5 * 666 = 333, in whole hundreds.
    adjusted = {"intermediate_size": 1000, "block_ffn_dim_multiplier": 0.5, "block_multiple_of": 100}
    assert parse("lfm2", **adjusted).intermediate_size == 400
    assert parse("lfm2", intermediate_size=1000, block_ffn_dim_multiplier=None).intermediate_size == 666
    assert parse("lfm2", layer_types=["conv"] * 7 + ["full_attention"]).recurrent_layers == tuple(range(7))
    # Every layer has attention where nothing is said.
    assert parse("lfm2").recurrent_layers == ()


def test_the_fields_of_granite_4() -> None:
    kinds = ["mamba"] * 3 + ["attention"] + ["mamba"] * 4
    config = parse("granitemoehybrid", **GRANITE4, layer_types=kinds, position_embedding_type="nope")
    assert config.recurrent_layers == (0, 1, 2, 4, 5, 6, 7)
    assert config.unrotated_layers == tuple(range(8))
    assert config.intermediate_size == 136
    assert config.mamba == MambaSizes(heads=12, group=12, size=16, keys=256, taps=4)
    assert config.mamba is not None
    assert config.mamba.of(range(5, 9)) == MambaSizes(4, 12, 16, 256, 4, offset=5)
    rotated = parse("granitemoehybrid", **GRANITE4, position_embedding_type="rope", mamba_conv_bias=False)
    assert rotated.unrotated_layers == ()
    assert rotated.recurrent_layers == tuple(range(8))
    assert rotated.mamba is not None
    assert not rotated.mamba.has_bias
    assert parse("granitemoehybrid", **GRANITE4, logits_scaling=4.0).multipliers.logits == 0.25
    assert parse("granitemoehybrid", **GRANITE4).experts is None
    sparse = parse("granitemoehybrid", **{**GRANITE4, "num_local_experts": 64, "num_experts_per_tok": 6})
    assert sparse.experts is not None
    sizes = (sparse.experts.num_experts, sparse.experts.intermediate_size, sparse.experts.shared_intermediate_size)
    assert sizes == (64, 176, 136)


def test_the_fields_of_nemotron_h() -> None:
    fields = {"mamba_num_heads": 12, "mamba_head_dim": 80, "n_groups": 4, "num_hidden_layers": 9}
    config = parse("nemotron_h", **fields, hybrid_override_pattern="MEM*-M", attention_head_dim=96, conv_kernel=3)
    assert (config.num_hidden_layers, config.head_dim, config.rms_norm_eps) == (6, 96, 1e-5)
    assert config.recurrent_layers == (0, 2, 5)
    assert config.feed_forward_layers == (1, 4)
    assert config.unrotated_layers == tuple(range(6))
    assert config.mamba == MambaSizes(heads=12, group=3, size=80, keys=128, taps=3)
    assert config.experts is not None
    assert config.experts.sparse_layers == (False, True, False, False, False, False)
    kinds = ["mamba", "mlp", "attention", "mamba"]
    dense = parse("nemotron_h", **fields, layers_block_type=kinds, hybrid_override_pattern="M", layer_norm_epsilon=1e-3)
    assert dense.experts is None
    assert dense.rms_norm_eps == 1e-3
    assert (dense.recurrent_layers, dense.feed_forward_layers) == ((0, 3), (1,))
    assert parse("nemotron_h", **fields, layer_types=["full_attention", "moe"]).feed_forward_layers == (1,)


def test_an_encoder_s_epsilon() -> None:
    assert parse("modernbert", layer_norm_eps=1e-12, norm_eps=1e-6).rms_norm_eps == 1e-6
    assert parse("cohere2", layer_norm_eps=1e-4).rms_norm_eps == 1e-4


@pytest.mark.parametrize(
    ("model_type", "fields", "named"),
    [
        ("llama", {"hidden_act": "relu"}, "hidden_act must be one of silu, .*, got 'relu'"),
        # open_llama_3b has heads of 100.
        (
            "llama",
            {"head_dim": 100},
            "model has heads of 100 dimensions, 1 of them .* multiple of 8 up to 512",
        ),
        ("llama", {"head_dim": 520}, "has heads of 520 dimensions"),
        ("deepseek_v3", {**LATENT, "qk_rope_head_dim": 2**20}, "has heads of 1048576 dimensions"),
        ("gemma4_text", {"head_dim": 64, "global_head_dim": 100}, "has heads of 100 dimensions"),
        (
            "phi3",
            {"head_dim": 64, "partial_rotary_factor": 0.3},
            "64 dimensions, 0.3 of them .* an even number",
        ),
        ("phi3", {"head_dim": 64, "partial_rotary_factor": -0.5}, "64 dimensions, -0.5 of them rotated"),
        (
            "llama",
            {"intermediate_size": 2**64},
            "intermediate_size must be an integer of at most 2147483647",
        ),
        # There are lists of layers before a tensor is missing.
        ("llama", {"num_hidden_layers": 2**31 - 1}, "num_hidden_layers must be an integer of at most 65536, got 2147"),
        ("gemma2", {"hidden_activation": "tanh"}, "hidden_activation must be one of silu, .*, got 'tanh'"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1.0 for a llama, got 0.5"),
        (
            "olmo3",
            {"layer_types": ["linear_attention"] * 8},
            "layer_types of a olmo3 may name .*, got 'linear_attention'",
        ),
        (
            "lfm2",
            {"layer_types": ["linear_attention"] * 8},
            "layer_types of a lfm2 may name full_attention and conv, got 'lin",
        ),
        ("lfm2", {"conv_bias": True}, "conv_bias of a lfm2 must be False, got True"),
        ("lfm2", {"conv_L_cache": 1}, "conv_L_cache must be an integer of at least 2, got 1"),
        ("granitemoehybrid", {**GRANITE4, "position_embedding_type": "x"}, "position_embedding_type of a .* got 'x'"),
        (
            "gemma4_text",
            {"hidden_activation": "gelu"},
            "hidden_activation of a .* must be gelu_pytorch_tanh, got 'gelu'",
        ),
        ("gemma4_unified_text", {"hidden_activation": "silu"}, "hidden_activation of a .* must be gelu_pytorch_tanh"),
        ("granitemoehybrid", {**GRANITE4, "hidden_act": "gelu"}, "hidden_act of a .* must be silu, got 'gelu'"),
        ("granitemoehybrid", {**GRANITE4, "mamba_proj_bias": True}, "mamba_proj_bias of a .* must be False, got True"),
        ("granitemoehybrid", {**GRANITE4, "time_step_limit": [0.1, 1.0]}, "time_step_limit of a .* got .0.1, 1.0"),
        ("granitemoehybrid", {**GRANITE4, "mamba_n_heads": 7}, "mamba_n_heads .7. times mamba_d_head .27. is not"),
        ("granitemoehybrid", {**GRANITE4, "mamba_n_groups": 5}, "mamba_n_heads .12. is not a multiple of .* .5."),
        ("nemotron_h", {"hybrid_override_pattern": "MX"}, "hybrid_override_pattern of a .* may name M, .*, got 'X'"),
        ("nemotron_h", {"layers_block_type": ["mamba", ["mlp"]]}, "layers_block_type of a .* got .'mlp'."),
        ("nemotron_h", {"layers_block_type": []}, "layers_block_type must name the kinds of all layers, got .."),
        (
            "nemotron_h",
            {"hybrid_override_pattern": 5},
            "hybrid_override_pattern must name the kinds of all layers, got 5",
        ),
        ("nemotron_h", {}, "lacks the field 'hybrid_override_pattern'"),
        ("nemotron_h", {"hybrid_override_pattern": "M", "n_groups": 5}, "mamba_num_heads .128. is not a multiple"),
        ("nemotron_h", {"moe_latent_size": 64}, "moe_latent_size of a nemotron_h must be None, got 64"),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act of a nemotron_h must be relu2, got 'silu'"),
        ("lfm2_moe", {"conv_bias": True}, "conv_bias of a lfm2_moe must be False, got True"),
        ("olmo3", {"layer_types": ["full_attention"]}, "layer_types names 1 layers of 8"),
        ("exaone4", {"sliding_window_pattern": "LLLG"}, "sliding_window_pattern must be .* 'LLLG'"),
        ("mistral", {"sliding_window": -1}, "sliding_window must be an integer of at least 0, got -1"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention of a gemma3_text must be"),
        ("mistral", {"is_causal": False}, "is_causal of a mistral must be true: only encoders"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping of a gemma3_text must be None"),
        (
            "gemma4_text",
            {"use_bidirectional_attention": "all"},
            "use_bidirectional_attention of a .* must be None",
        ),
        ("gemma4_text", {"num_kv_shared_layers": 3}, "leaves no layer of the kind full_attention"),
        ("gemma4_text", {"num_kv_shared_layers": 8}, "num_kv_shared_layers=8 of 8 layers leaves no layer of the kind"),
        ("gemma4_text", {"per_layer_config": {"5": {"head_dim": 48}}}, "layers of the kind full_attention different"),
        (
            "gemma4_text",
            {"per_layer_config": {"0": {"head_dim": 48}}},
            "layers of the kind sliding_attention diff",
        ),
        ("gemma4_text", {"per_layer_config": {"5": {"sliding_window": 8}}}, "layer 5 has sliding_window, which Pens"),
        ("gemma4_text", {"global_head_dim": 0}, "head_dim must be an integer of at least 1, got 0"),
        ("gemma4_text", {"num_global_key_value_heads": 5, "attention_k_eq_v": True}, "not a multiple of the 5 heads"),
        (
            "gemma4_text",
            {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 5, "moe_intermediate_size": 8},
            "is more than the 4 experts of a layer",
        ),
        ("cohere2", {"use_qk_norm": True}, "use_qk_norm of a cohere2 must be False, got True"),
        ("olmo2", {"clip_qkv": 8.0}, "clip_qkv of a olmo2 must be None, got 8.0"),
        ("gemma2", {"final_logit_softcapping": -30}, "final_logit_softcapping must be a positive number, got -30"),
        ("llama", {"rms_norm_eps": -1e-6}, "rms_norm_eps must be a positive number, got -1e-06"),
        ("llama", {"rms_norm_eps": float("inf")}, "rms_norm_eps must be a positive number, got inf"),
        ("lfm2", {"norm_eps": True}, "norm_eps must be a positive number, got True"),
        ("bert", {"layer_norm_eps": -1}, "layer_norm_eps must be a positive number, got -1"),
        ("llama", {"rope_theta": -1e4}, "rope_theta must be a positive number, got -10000.0"),
        ("llama", {"rope_parameters": {"rope_theta": True}}, "rope_theta must be a positive number, got True"),
        ("granite", {"attention_multiplier": 1e400}, "attention_multiplier must be a positive number, got inf"),
        ("gemma2", {"query_pre_attn_scalar": -256}, "query_pre_attn_scalar must be a positive number, got -256"),
        ("mistral", {"sliding_window": True}, "sliding_window must be an integer of at least 0, got True"),
        ("mistral", {"sliding_window": 64.5}, "sliding_window must be an integer of at least 0, got 64.5"),
        ("llama", {"architectures": [5]}, r"architectures must be a list of names, got \[5\]"),
        ("llama", {"architectures": "LlamaForCausalLM"}, "architectures must be a list of names, got 'LlamaForCaus"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers has 2 layers of 8"),
        ("modernbert", {"hidden_size": 100, "num_attention_heads": 10}, "give a head size of 10"),
        # Divisions by zero.
        ("granite", {"logits_scaling": 0}, "logits_scaling must be a positive number, got 0"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be a positive number, got 0"),
        ("smollm3", {"no_rope_layer_interval": 0}, "config.json cannot be used"),
        ("paligemma", {"text_config": SHAPE}, "'paligemma' has a text_config; those whose text part is served are"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(model_type: str, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse(model_type, **fields)


@pytest.mark.parametrize(
    "value", ["NaN", "[" * 100_000, "1" * 5000, '"\ud800', "{"], ids=["NaN", "depth", "digits", "text", "object"]
)
def test_what_is_not_json_is_refused_by_file(value: str, tmp_path: Path) -> None:
    """Infinities are accepted, as published files have them."""
    file = tmp_path / "config.json"
    file.write_text(f'{{"rms_norm_eps": {value}}}', encoding="utf-8", errors="surrogatepass")
    with pytest.raises(ConfigError, match=r"config\.json is not valid JSON"):
        load_model_config(tmp_path)
    file.write_text('{"time_step_limit": [0.0, Infinity]}')
    assert read_model_json(tmp_path) == {"time_step_limit": [0.0, float("inf")]}


def test_every_family_is_in_the_table_of_the_documentation() -> None:
    text = (Path(__file__).parents[2] / "docs" / "GENERATION.md").read_text(encoding="utf-8")
    table = text.split("## Models\n")[1].strip().split("\n\n")[0]
    named = [name for row in table.splitlines()[2:] for name in re.findall(r"`(.+?)`", row.split("|")[1])]
    assert sorted(named) == sorted((*MODELS, *ENCODERS))


def test_norms_that_are_rounded_once_have_a_float_weight() -> None:
    usual, once, from_one = (
        read(Weights(DummySource(torch.device("cpu")), torch.bfloat16, torch.device("cpu")), "norm", 8, 1e-6).weight
        for read in (rms_norm, rms_norm_rounded_once, rms_norm_from_one)
    )
    assert [each.dtype for each in (usual, once, from_one)] == [torch.bfloat16, torch.float32, torch.float32]
    assert torch.equal(from_one, 1 + once)


def test_queries_are_scaled_by_the_context_that_they_have_left_behind() -> None:
    rope = {"rope_type": "default", "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16}
    multipliers = parse("ministral3", rope_parameters=rope).multipliers
    assert (multipliers.query_beta, multipliers.query_context) == (0.1, 16)
    assert parse("mistral", rope_parameters=rope).multipliers == NO_MULTIPLIERS


def test_a_stage_without_the_layer_whose_keys_it_reads_is_refused_before_weights_are_read() -> None:
    config = parse("gemma4_text", num_kv_shared_layers=2, hidden_size_per_layer_input=0, head_dim=24)
    weights = Weights(DummySource(torch.device("cpu")), torch.float32, torch.device("cpu"))
    first, last = stages(8, 2, (5, 3))
    with pytest.raises(ConfigError, match=r"layer 6 of model reads .* of layer 4.*begin with layer 4 .*=4,4 of two"):
        build_model(config, weights, stage=last)
    assert not weights.digest.rows()
    assert len(build_model(config, weights, stage=first).kv_cache_specs) == 5
    assert list(build_model(config, weights, stage=stages(8, 2)[1]).kv_cache_specs) == [
        "model.layers.4.self_attn",
        "model.layers.5.self_attn",
    ]


@pytest.mark.parametrize(
    ("model_type", "fields", "what"),
    [
        ("gemma3_text", {}, "the activation gelu_tanh"),
        ("gemma4_text", {}, "the activation gelu_tanh"),
        ("nemotron_h", {"layers_block_type": ["moe", "full_attention"] * 4}, "the activation squared_relu"),
        ("cohere2", {}, "layer norms"),
    ],
)
def test_what_has_no_kernel_on_a_gpu_is_refused_before_weights_are_read(
    model_type: str, fields: dict[str, Any], what: str
) -> None:
    source = DummySource(torch.device("cpu"))
    weights = Weights(source, torch.bfloat16, torch.device("meta"))
    with pytest.raises(ConfigError, match=f"the model has {what}, which is computed on a CPU only"):
        build_model(parse(model_type, **fields), weights)
    assert not weights.digest.rows()

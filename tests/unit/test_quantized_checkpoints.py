"""Formats of quantized checkpoints: every part of a tensor has the values that its format defines."""

from __future__ import annotations

import json
import shutil
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from penstock.config.model import load_model_config
from penstock.config.model_path import resolve_model_path
from penstock.config.quantization import read_quantization
from penstock.kernels.quantized import QuantizedWeight, dense
from penstock.models.sources.opening import loaded_bytes, open_weights
from penstock.models.sources.source import ALL, Part
from penstock.utils.errors import ConfigError
from tests.quantized_formats import FORMATS, Tensors, auto_round, grouped_formats, micro_floats, pack_words

sys.path.insert(0, str(Path(__file__).parents[2] / "bench" / "peers"))

from quantized_checkpoint import KINDS, rounded

ROWS, INPUTS = 48, 96
WEIGHT = "layer.0.proj.weight"
ROWS_ONLY: tuple[Part, ...] = (ALL, (slice(5, 19),), (slice(16, 40),))
PARTS: tuple[Part, ...] = (
    ALL,
    (slice(5, 19),),
    (slice(16, 40),),
    (slice(None), slice(32, 96)),
    (slice(1, 2), slice(32, 64)),
)


def read(folder: Path, tensors: Tensors, config: Any, *parts: Part, shape: tuple[int, ...] = (ROWS, INPUTS)):
    save_file(tensors, folder / "model.safetensors")
    quantization = read_quantization(folder, json.loads(json.dumps(config)))
    with closing(open_weights(folder, "auto", quantization=quantization)) as source:
        assert source.has(WEIGHT)
        assert not source.has("layer.0.other.weight")
        return [source.read(WEIGHT, shape, part) for part in parts]


@pytest.mark.parametrize("name", FORMATS)
def test_every_part_has_the_values_of_the_format(name: str, tmp_path: Path) -> None:
    config, write = FORMATS[name]
    tensors, values = write(WEIGHT.removesuffix(".weight"), torch.randn(ROWS, INPUTS) * 0.1)
    parts = ROWS_ONLY if name == "int8 with int8 inputs" else PARTS
    found = read(tmp_path, tensors, config, *parts)
    for part, weight in zip(parts, found, strict=True):
        assert torch.equal(dense(weight), values[part]), part
        assert isinstance(weight, QuantizedWeight) == ("act-order" not in name)
        if isinstance(weight, QuantizedWeight):
            assert (weight.quantizes_inputs is not None) == ("int8 inputs" in name)
            assert weight.bits == (8 if "8" in name or name == "modelopt" else 4)


@pytest.mark.parametrize("group", [64, 128])
@pytest.mark.parametrize("name", grouped_formats(64))
def test_groups_of_other_sizes(name: str, group: int, tmp_path: Path) -> None:
    """The last group is shorter than the others."""
    config, write = grouped_formats(group)[name]
    shape = ROWS, 2 * group + 32
    tensors, values = write(WEIGHT.removesuffix(".weight"), torch.randn(shape) * 0.1)
    parts = (*ROWS_ONLY, (slice(None), slice(group, shape[1])), (slice(1, 2), slice(group, 2 * group)))
    for part, weight in zip(parts, read(tmp_path, tensors, config, *parts, shape=shape), strict=True):
        assert torch.equal(dense(weight), values[part]), part
        if "act-order" not in name:
            assert isinstance(weight, QuantizedWeight)
            assert weight.group == group


@pytest.mark.parametrize(
    ("changes", "offset"),
    [
        ({}, 1),  # the packing is not named
        ({"quant_method": "intel/auto-round", "backend": "auto_round:gptq:exllamav2"}, 1),  # as up to AutoRound 0.4
        ({"packing_format": "auto_round:gptq"}, 1),
        ({"packing_format": "auto_round"}, 0),
    ],
)
def test_names_of_auto_rounds_packing(changes: dict[str, Any], offset: int, tmp_path: Path) -> None:
    config = {key: value for key, value in FORMATS["auto-round"][0].items() if key != "packing_format"}
    tensors, values = auto_round(WEIGHT.removesuffix(".weight"), torch.randn(ROWS, INPUTS), 32, False, offset)
    (found,) = read(tmp_path, tensors, {**config, **changes}, ALL)
    assert torch.equal(dense(found), values)


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_of_the_comparison_with_peers(kind: str, tmp_path: Path) -> None:
    """Its rows and inputs fill several blocks and groups, and their numbers differ."""
    model, norm = tmp_path / "model", torch.rand(8).bfloat16()
    weight = torch.randn(256, 384).mul_(0.1).bfloat16()
    layer = "model.layers.0.mlp.down_proj"
    tensors = {f"{layer}.weight": weight, "model.norm.weight": norm, "mtp.fc.weight": weight.clone()}
    model.mkdir()
    save_file(tensors, model / "model.safetensors")
    (model / "config.json").write_text(json.dumps({"hidden_size": 8, "num_nextn_predict_layers": 1}))
    made = rounded(model, tmp_path / "made" / kind, kind)
    config = json.loads((made / "config.json").read_text())
    assert config == {"hidden_size": 8, "quantization_config": KINDS[kind][0]}
    quantization = read_quantization(made, config["quantization_config"])
    with closing(open_weights(made, "auto", quantization=quantization)) as source:
        found = source.read(f"{layer}.weight", weight.shape)
        kept = source.read("model.norm.weight", norm.shape)
        assert not source.has("mtp.fc.weight")
    assert isinstance(kept, torch.Tensor)
    assert torch.equal(kept, norm)
    assert isinstance(found, QuantizedWeight)
    assert found.bits == (8 if "8" in kind else 4)
    assert (found.quantizes_inputs is not None) == (kind == "w8a8")
    assert torch.equal(dense(found), KINDS[kind][1](layer, weight)[1])
    # Half a step of the coarsest grid, of values up to about 0.45.
    assert (dense(found) - weight).abs().max() < 0.05


@pytest.mark.parametrize("bits", [4, 8])
def test_a_zero_point_of_0_borrows_from_its_neighbours(bits: int, tmp_path: Path) -> None:
    """GPTQModel and AutoRound subtract one from the numbers of a word together."""
    layer, groups = WEIGHT.removesuffix(".weight"), INPUTS // 32
    codes, zeros = (torch.randint(0, 2**bits, (ROWS, count)) for count in (INPUTS, groups))
    zeros[torch.rand(ROWS, groups) < 0.5] = 0
    scales = torch.rand(ROWS, groups).half()
    tensors = {
        f"{layer}.qweight": pack_words(codes, bits).T.contiguous(),
        f"{layer}.scales": scales.T.contiguous(),
        f"{layer}.qzeros": pack_words(zeros.T, bits) - (0x11111111 if bits == 4 else 0x01010101),
    }
    (found,) = read(tmp_path, tensors, {"quant_method": "gptq", "bits": bits, "group_size": 32}, ALL)
    groups_of = torch.arange(INPUTS) // 32
    expected = ((codes - zeros[:, groups_of]).float() * scales.float()[:, groups_of]).bfloat16()
    assert torch.equal(dense(found), expected)


def test_what_is_not_quantized_passes_unchanged(tmp_path: Path) -> None:
    weight = torch.randn(ROWS, INPUTS).bfloat16()
    (found,) = read(tmp_path, {WEIGHT: weight}, FORMATS["gptq"][0], (slice(3, 7),))
    assert torch.equal(dense(found), weight[3:7])
    assert not isinstance(found, QuantizedWeight)


@pytest.mark.parametrize("name", ["float8", "modelopt", "int8"])
def test_numbers_of_8_bits_are_refused_where_nothing_says_how_the_weights_are_quantized(
    name: str, tmp_path: Path
) -> None:
    """Without their scales they would be other weights, as of a folder that lacks ModelOpt's own file."""
    tensors, _ = FORMATS[name][1](WEIGHT.removesuffix(".weight"), torch.randn(ROWS, INPUTS))
    with pytest.raises(ConfigError, match="which needs a quantization_config"):
        read(tmp_path, tensors, None, (slice(3, 7),))


def test_experts_of_four_bit_floats(tmp_path: Path) -> None:
    name, shape = "layer.experts.gate_up_proj", (3, 16, 64)
    tensors, values = micro_floats(name, torch.randn(3, 64, 16))
    save_file(tensors, tmp_path / "model.safetensors")
    with closing(
        open_weights(tmp_path, "auto", quantization=read_quantization(tmp_path, {"quant_method": "mxfp4"}))
    ) as source:
        found = source.read(name, shape, (slice(1, 2), slice(4, 12)))
    assert isinstance(found, QuantizedWeight)
    assert torch.equal(found.dequantize(), values[1].T[4:12])


@pytest.mark.parametrize("part", ["blocks", "scales"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.int32])
def test_four_bit_floats_are_stored_in_bytes(part: str, dtype: torch.dtype, tmp_path: Path) -> None:
    name = "layer.experts.gate_up_proj"
    tensors, _ = micro_floats(name, torch.randn(3, 64, 16))
    tensors[f"{name}_{part}"] = tensors[f"{name}_{part}"].to(dtype)
    save_file(tensors, tmp_path / "model.safetensors")
    quantization = read_quantization(tmp_path, {"quant_method": "mxfp4"})
    with (
        closing(open_weights(tmp_path, "auto", quantization=quantization)) as source,
        pytest.raises(ConfigError, match=rf"{tmp_path}: .*'{name}' cannot be used: .*{dtype}.* not bytes"),
    ):
        source.read(name, (3, 16, 64), (slice(1, 2), slice(4, 12)))


def edited(name: str, tensor: str, change: Any) -> tuple[Tensors, dict[str, Any]]:
    config, write = FORMATS[name]
    tensors, _ = write(WEIGHT.removesuffix(".weight"), torch.randn(ROWS, INPUTS))
    key = WEIGHT.removesuffix("weight") + tensor
    changed = change(tensors[key])
    if changed is None:
        del tensors[key]
    else:
        tensors[key] = changed.contiguous()
    return tensors, config


@pytest.mark.parametrize(
    ("name", "tensor", "middle", "axis"),
    [
        ("packed with zero points", "weight_zero_point", -0x77777778, 0),
        ("gptq", "qzeros", 0x77777777, 1),  # stored less one
        ("awq, symmetric", "qzeros", -0x77777778, 1),
    ],
)
def test_all_rows_decide_whether_zero_points_are_the_middle_integers(
    name: str, tensor: str, middle: int, axis: int, tmp_path: Path
) -> None:
    """Sums of rounded inputs with zero points have other bits than without."""

    def change(words: torch.Tensor) -> torch.Tensor:
        words = torch.full_like(words, middle)
        words.select(axis, -1)[...] += other
        return words

    for other in (0, 1):
        tensors, config = edited(name, tensor, change)
        for weight in read(tmp_path, tensors, config, ALL, (slice(0, 4),), (slice(0, 0),)):
            assert isinstance(weight, QuantizedWeight)
            assert (weight.zeros is not None) == bool(other)


@pytest.mark.parametrize(
    ("name", "tensor", "change", "message"),
    [
        ("packed", "weight_packed", lambda words: words[:, :7], "7 words for 96 inputs"),
        ("packed", "weight_scale", lambda scales: scales[:, [0, 1, 2, 0, 1]], "it has 5 scales per row"),
        ("packed", "weight_scale", lambda scales: scales[:40], r"weight_scale' has shape \[40, 3\]"),
        ("packed", "weight_scale", lambda scales: scales * torch.inf, "finite"),
        (
            "packed with zero points",
            "weight_zero_point",
            lambda words: words[:5],
            r"weight_zero_point' has shape \[5, 3\]",
        ),
        ("packed", "weight_packed", lambda words: words.flatten(), "1 words for 96 inputs"),
        (
            "packed",
            "weight_scale",
            lambda scales: scales.flatten()[0],
            r"weight_scale' has shape \[\]",
        ),
        ("gptq", "scales", lambda scales: scales.flatten()[0], r"scales' has shape \[\], config.json asks"),
        ("gptq in act-order", "scales", lambda scales: scales * torch.nan, "its scales must be finite floats"),
        ("gptq in act-order", "scales", lambda scales: scales.int(), "finite floats, and are torch.int32"),
        ("float8", "weight_scale", lambda scales: scales.byte(), "finite floats, and are torch.uint8"),
        ("gptq", "scales", lambda _: None, "no tensor 'layer.0.proj.scales'"),
        ("gptq", "qzeros", lambda words: words[:2], r"qzeros' has shape \[2, 6\]"),
        ("gptq", "g_idx", lambda order: order - 1, "names groups that are none of its 3"),
        ("gptq", "g_idx", lambda order: order[:90], r"g_idx' has shape \[90\]"),
        ("awq", "qweight", lambda words: words[:, :5], r"qweight' has shape \[96, 5\]"),
        ("packed", "weight_packed", lambda words: words.long(), "its words are torch.int64, not int32"),
        (
            "float8",
            "weight",
            lambda weight: weight.float().to(torch.float8_e5m2),
            "float8_e5m2, which is not supported",
        ),
        ("float8", "weight_scale", lambda _: None, "it has no scales"),
        ("float8", "weight_scale", lambda scales: scales[:40], "neither one per row nor one for all"),
        ("float8", "weight_scale", lambda scales: scales * torch.nan, "finite"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    name: str, tensor: str, change: Any, message: str, tmp_path: Path
) -> None:
    tensors, config = edited(name, tensor, change)
    with pytest.raises(ConfigError, match=message) as caught:
        read(tmp_path, tensors, config, ALL)
    assert str(tmp_path) in str(caught.value)


def compressed(**changes: Any) -> dict[str, Any]:
    weights = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 128, "symmetric": True}
    group = {"targets": ["Linear"], "weights": {**weights, **changes.pop("weights", {})}, **changes.pop("group", {})}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, **changes}


def auto_rounded(**changes: Any) -> dict[str, Any]:
    return {"quant_method": "auto-round", "bits": 4, "group_size": 128, **changes}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"bits": 4}, "quant_method None, which is not supported"),
        (
            {"quant_method": "bitsandbytes"},
            "'bitsandbytes', which is not supported: use a checkpoint in fp8",
        ),
        ([1], "must be a JSON object"),
        (
            {"quant_method": "gptq", "bits": 3, "group_size": 128},
            "config.bits is 3, and Penstock reads 4, 8",
        ),
        ({"quant_method": "gptq", "bits": True, "group_size": 128}, "bits is True"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 100}, "group_size is 100"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "marlin"}, "'marlin'"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"}, "version is 'gemv'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt is 'e5m2'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "must be two positive integers"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo is 'NVFP4', and Penstock reads 'FP8'"),
        ({"quant_method": "modelopt"}, "quant_algo is '', and Penstock reads 'FP8'"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "quant_algo is 'MIXED_PRECISION'"),
        (auto_rounded(packing_format="auto_round:fp8"), "packing_format is 'auto_round:fp8'"),
        (auto_rounded(backend="auto_round:exllamav2"), "backend is 'auto_round:exllamav2'"),
        (auto_rounded(data_type="mx_fp"), "data_type is 'mx_fp'"),
        (auto_rounded(act_bits=8), "act_bits is 8"),
        (auto_rounded(rotation_config={"algorithm": "hadamard"}), "rotation_config is {'algorithm': 'hadamard'}"),
        (auto_rounded(spinquant_config={"r1": True}), "spinquant_config is {'r1': True}"),
        (compressed(weights={"num_bits": 3}), "config_groups.group_0.weights.num_bits is 3"),
        (compressed(weights={"strategy": "tensor_group"}), "weights.strategy is 'tensor_group'"),
        (compressed(weights={"type": "float"}), "weights.num_bits is 4, and Penstock reads 8"),
        (compressed(group={"weights": None}), "group_0.weights is missing"),
        (compressed(group={"targets": "Linear"}), "targets must be a list"),
        (
            compressed(group={"input_activations": {"num_bits": 8}}),
            "group_0.input_activations beside 4-bit weights: inputs are rounded for weights of 8 bits only",
        ),
        (compressed(transform_config={"config_groups": {"u": {}}}), "transform_config is not supported"),
        (compressed(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config is not supported"),
    ],
)
def test_what_is_not_served_is_refused_before_weights_are_read(config: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read_quantization(tmp_path, config)


@pytest.mark.parametrize("algorithm", ["FP8", "FP8_PER_CHANNEL_PER_TOKEN"])
def test_a_file_of_modelopt_names_the_format_where_config_json_does_not(algorithm: str, tmp_path: Path) -> None:
    shutil.copy(Path(resolve_model_path("demo")) / "config.json", tmp_path)
    assert load_model_config(tmp_path).quantization is None
    file = tmp_path / "hf_quant_config.json"
    file.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": algorithm}}))
    quantization = load_model_config(tmp_path).quantization
    assert quantization is not None
    assert quantization.name == "modelopt"
    for wrong, message in (({"quant_algo": "NVFP4"}, "quant_algo is 'NVFP4'"), ([], "must be a JSON object")):
        file.write_text(json.dumps({"quantization": wrong}))
        with pytest.raises(ConfigError, match=message):
            load_model_config(tmp_path)


@pytest.mark.parametrize(
    ("name", "fields", "method"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 32, "desc_act": True, "sym": True}, "gptq"),
        ("quant_config.json", {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}, "awq"),
    ],
)
def test_files_of_the_first_versions_of_autogptq_and_autoawq(
    name: str, fields: dict[str, Any], method: str, tmp_path: Path
) -> None:
    config = json.loads((Path(resolve_model_path("demo")) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / name).write_text(json.dumps(fields))
    found = load_model_config(tmp_path).quantization
    assert found is not None
    assert (found.name, found.bits, found.group, found.is_reordered) == (method, 4, 32, method == "gptq")
    (tmp_path / name).write_text(json.dumps({**fields, "bits": 3, "w_bit": 3}))
    with pytest.raises(ConfigError, match=r"bits? is 3"):
        load_model_config(tmp_path)
    # What config.json says comes first.
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": compressed()}))
    found = load_model_config(tmp_path).quantization
    assert found is not None
    assert found.name == "compressed-tensors"


def test_the_first_name_of_compressed_tensors_field(tmp_path: Path) -> None:
    config = json.loads((Path(resolve_model_path("demo")) / "config.json").read_text())
    for name in ("quantization_config", "compression_config"):
        (tmp_path / "config.json").write_text(json.dumps({**config, name: compressed()}))
        quantization = load_model_config(tmp_path).quantization
        assert quantization is not None
        assert (quantization.name, quantization.group) == ("compressed-tensors", 128)


def test_weights_without_an_algorithm_of_modelopt_are_not_quantized(tmp_path: Path) -> None:
    """It may have quantized the KV cache alone, or nothing."""
    fields = {"quant_algo": None, "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    assert read_quantization(tmp_path, {"quant_method": "modelopt", **fields}) is None
    shutil.copy(Path(resolve_model_path("demo")) / "config.json", tmp_path)
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": fields}))
    assert load_model_config(tmp_path).quantization is None


def test_static_inputs_and_bad_patterns_are_refused(tmp_path: Path) -> None:
    config, _ = FORMATS["int8 with int8 inputs"]
    text = json.dumps(config)
    with pytest.raises(ConfigError, match=r"input_activations\.dynamic is False"):
        read_quantization(tmp_path, json.loads(text.replace('"dynamic": true', '"dynamic": false')))
    with pytest.raises(ConfigError, match="cannot be matched"):
        read_quantization(tmp_path, json.loads(text.replace('["Linear"]', '["re:("]')))


def test_patterns_that_could_take_long_are_refused(tmp_path: Path) -> None:
    text = json.dumps(FORMATS["int8 with int8 inputs"][0])
    with pytest.raises(ConfigError, match="a repeated group can take exponentially long"):
        read_quantization(tmp_path, json.loads(text.replace('["Linear"]', '["re:(a+)+$"]')))
    # Optional groups and groups that look ahead are common, and bounded.
    for pattern in (
        "re:.*mlp.(experts.[0-9]+.)?(gate|up)_proj",
        "re:^(?!.*lm_head).*$",
        "re:.*layers.*mlp.*(gate|up|down).*",
    ):
        config = read_quantization(tmp_path, json.loads(text.replace('"Linear"', json.dumps(pattern))))
        assert config is not None
        assert config.quantizes_inputs("model.layers.0.mlp.up_proj")
        assert not config.quantizes_inputs("lm_head")


@pytest.mark.parametrize("group", [2**70, 2**31, 65536, 20, True, 64.0])
def test_groups_that_no_layer_has_are_refused(group: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be a multiple of 16 below 65536, or -1"):
        read_quantization(tmp_path, {"quant_method": "gptq", "bits": 4, "group_size": group})


def test_an_order_that_was_not_set_is_none(tmp_path: Path) -> None:
    """compressed-tensors leaves -1 in a layer that was never calibrated."""
    config, write = FORMATS["packed"]
    layer = WEIGHT.removesuffix(".weight")
    tensors, values = write(layer, torch.randn(ROWS, INPUTS) * 0.1)
    tensors[f"{layer}.weight_g_idx"] = torch.full((INPUTS,), -1, dtype=torch.int32)
    (found,) = read(tmp_path, tensors, config, ALL)
    assert isinstance(found, QuantizedWeight)
    assert torch.equal(dense(found), values)


@pytest.mark.parametrize("method", ["mxfp4", "fp8", "gptq"])
@pytest.mark.parametrize("stored", [{}, {"torch_dtype": "float32"}, {"dtype": "float16"}])
def test_quantized_weights_are_bfloat16_whatever_dtype_is_named(
    method: str, stored: dict[str, str], tmp_path: Path
) -> None:
    """The official gpt-oss names none."""
    config = json.loads((Path(resolve_model_path("demo")) / "config.json").read_text())
    config = {key: value for key, value in config.items() if "dtype" not in key}
    quantization = {"quant_method": method, "bits": 4, "group_size": 32}
    (tmp_path / "config.json").write_text(json.dumps({**config, **stored, "quantization_config": quantization}))
    assert load_model_config(tmp_path).dtype == "bfloat16"


def test_the_memory_of_a_checkpoint(tmp_path: Path) -> None:
    """What its weights take once they are loaded, not in its files."""
    shape = {"model_type": "llama", "hidden_size": 64, "vocab_size": 100, "intermediate_size": 128}
    shape |= {"num_hidden_layers": 1, "num_attention_heads": 4, "tie_word_embeddings": True}
    save_file({"embed": torch.zeros(100, 64), "layer": torch.zeros(256, 64)}, tmp_path / "model.safetensors")

    def taken(dtype: torch.dtype, quantization: Any = None, bits: int = 0, keeps_quantized: bool = True) -> int:
        config = {**shape, "quantization_config": quantization} if quantization else shape
        (tmp_path / "config.json").write_text(json.dumps(config))
        return loaded_bytes(load_model_config(tmp_path), dtype, keeps_quantized, bits)

    embed, layer = 6400, 256 * 64
    assert taken(torch.float32) == 4 * (embed + layer)
    assert taken(torch.bfloat16) == 2 * (embed + layer)
    assert taken(torch.bfloat16, bits=4) == 2 * embed + layer * 9 // 16
    assert taken(torch.bfloat16, bits=8) == 2 * embed + layer * 17 // 16
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    assert taken(torch.bfloat16, gptq) == 2 * (embed + layer)
    assert taken(torch.bfloat16, gptq, keeps_quantized=False) == 8 * (embed + layer)
    assert taken(torch.float32, gptq, keeps_quantized=False) == 32 * (embed + layer)
    assert taken(torch.bfloat16, gptq | {"desc_act": True}) == 8 * (embed + layer)
    assert taken(torch.bfloat16, gptq | {"desc_act": True, "static_groups": True}) == 2 * (embed + layer)


def test_targets_name_the_layers_whose_inputs_are_quantized(tmp_path: Path) -> None:
    text = json.dumps(FORMATS["int8 with int8 inputs"][0])
    quantization = read_quantization(tmp_path, json.loads(text.replace('["Linear"]', '["re:.*attn.*", "model.last"]')))
    assert quantization is not None
    layers = ("model.0.attn.q_proj", "model.last", "model.0.mlp.up_proj", "other.model.last")
    assert [quantization.quantizes_inputs(layer) for layer in layers] == [True, True, False, False]


@pytest.mark.parametrize(
    ("with_inputs", "without", "expected"),
    [
        ("Linear", "re:.*down_proj$", [True, False, True]),
        ("re:.*down_proj$", "Linear", [False, True, False]),
        ("Linear", "model.0.mlp.up_proj", [False, True, True]),
        ("model.0.mlp.up_proj", "re:.*mlp.*", [True, False, False]),
        ("re:.*mlp.*", "model.0.mlp.up_proj", [False, True, False]),
    ],
)
@pytest.mark.parametrize("is_first", [True, False])
def test_of_groups_with_the_same_layer_the_one_that_names_it_counts(
    with_inputs: str, without: str, expected: list[bool], is_first: bool, tmp_path: Path
) -> None:
    """As compressed-tensors matches targets: a name before a pattern, and this before the class, in any order."""
    config = json.loads(json.dumps(FORMATS["int8 with int8 inputs"][0]))
    group = config["config_groups"]["group_0"]
    groups = [{**group, "targets": [with_inputs]}, {**group, "targets": [without], "input_activations": None}]
    config["config_groups"] = dict(zip("ab", groups if is_first else groups[::-1], strict=True))
    quantization = read_quantization(tmp_path, config)
    assert quantization is not None
    layers = ("model.0.mlp.up_proj", "model.0.mlp.down_proj", "model.0.attn.q_proj")
    assert [quantization.quantizes_inputs(layer) for layer in layers] == expected

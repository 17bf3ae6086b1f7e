"""Writes weights in the formats of quantized checkpoints, and the values that they stand for."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
# The order of the outputs in a word of AWQ.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, slots=True)
class Grid:
    """A weight [rows, inputs] rounded to integers: value = (codes - zeros) * scales of a group."""

    codes: torch.Tensor  # [rows, inputs], from 0
    zeros: torch.Tensor  # [rows, groups]
    scales: torch.Tensor  # [rows, groups]
    groups: torch.Tensor  # [inputs], the group of every input

    def values(self) -> torch.Tensor:
        zeros, scales = (each.float()[:, self.groups] for each in (self.zeros, self.scales))
        return ((self.codes - zeros) * scales).bfloat16()


def round_to_grid(
    weight: torch.Tensor,
    bits: int,
    group: int,
    is_symmetric: bool,
    dtype: torch.dtype,
    order: torch.Tensor | None = None,
) -> Grid:
    """`order` permutes the inputs before they are divided into groups."""
    rows, inputs = weight.shape
    groups = torch.arange(inputs) // group
    if order is not None:
        groups = groups[order]
    count, most = int(groups.max()) + 1, 2**bits - 1
    scales, zeros = torch.empty(rows, count), torch.empty(rows, count)
    for number in range(count):
        part = weight.float()[:, groups == number]
        if is_symmetric:
            scales[:, number] = part.abs().amax(1) / (most // 2)
            zeros[:, number] = 2 ** (bits - 1)
        else:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scales[:, number] = (high - low) / most
            zeros[:, number] = (-low / scales[:, number]).round()
    scales = scales.clamp(min=1e-4).to(dtype)
    zeros = zeros.clamp(1, most)
    codes = (weight.float() / scales.float()[:, groups] + zeros[:, groups]).round().clamp(0, most)
    return Grid(codes.int(), zeros.int(), scales, groups)


def pack_words(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """[n, count] -> [n, words] int32, the first number of a word in its lowest bits, padded with zeros."""
    per_word = 32 // bits
    padded = torch.nn.functional.pad(numbers.long(), (0, -numbers.shape[1] % per_word))
    places = torch.arange(per_word) * bits
    return (padded.unflatten(1, (-1, per_word)) << places).sum(-1).to(torch.int64).to(torch.uint32).view(torch.int32)


def in_awq_order(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.unflatten(1, (-1, 8))[:, :, list(AWQ_ORDER)].flatten(1)


def packed(layer: str, weight: torch.Tensor, bits: int, group: int, is_symmetric: bool) -> tuple[Tensors, torch.Tensor]:
    grid = round_to_grid(weight, bits, group, is_symmetric, torch.bfloat16)
    tensors = {
        f"{layer}.weight_packed": pack_words(grid.codes, bits),
        f"{layer}.weight_scale": grid.scales,
        f"{layer}.weight_shape": torch.tensor(weight.shape),
    }
    if not is_symmetric:
        tensors[f"{layer}.weight_zero_point"] = pack_words(grid.zeros.T, bits).T.contiguous()
    return tensors, grid.values()


def gptq(
    layer: str,
    weight: torch.Tensor,
    bits: int,
    group: int,
    is_symmetric: bool,
    has_order: bool = False,
    offset: int = 1,
) -> tuple[Tensors, torch.Tensor]:
    order = torch.randperm(weight.shape[1]) if has_order else None
    grid = round_to_grid(weight, bits, group, is_symmetric, torch.float16, order)
    tensors = {
        f"{layer}.qweight": pack_words(grid.codes, bits).T.contiguous(),
        f"{layer}.scales": grid.scales.T.contiguous(),
        f"{layer}.qzeros": pack_words(grid.zeros.T - offset, bits),
        f"{layer}.g_idx": grid.groups.int(),
    }
    return tensors, grid.values()


def auto_round(
    layer: str, weight: torch.Tensor, group: int, is_symmetric: bool, offset: int = 1
) -> tuple[Tensors, torch.Tensor]:
    """As AutoRound's `QuantLinear` packs (`auto_round_extension/torch`): GPTQ's tensors, but for groups of inputs."""
    tensors, values = gptq(layer, weight, 4, group, is_symmetric, offset=offset)
    del tensors[f"{layer}.g_idx"]
    return tensors, values


def awq(layer: str, weight: torch.Tensor, group: int, is_symmetric: bool = False) -> tuple[Tensors, torch.Tensor]:
    grid = round_to_grid(weight, 4, group, is_symmetric, torch.float16)
    tensors = {
        f"{layer}.qweight": pack_words(in_awq_order(grid.codes.T), 4),
        f"{layer}.scales": grid.scales.T.contiguous(),
        f"{layer}.qzeros": pack_words(in_awq_order(grid.zeros.T), 4),
    }
    return tensors, grid.values()


def float8(layer: str, weight: torch.Tensor, scales: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """`scales` are [rows, 1], or [] for one for all."""
    stored = (weight.float() / scales).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {f"{layer}.weight": stored, f"{layer}.weight_scale": scales}, (stored.float() * scales).bfloat16()


def modelopt(layer: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """With the scale of inputs that a calibration has left, which is not applied."""
    tensors, values = float8(layer, weight, weight.float().abs().amax() / 448 + 1e-5)
    return {**tensors, f"{layer}.input_scale": torch.tensor(0.02)}, values


def modelopt_by_rows(layer: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """The scales have one dimension."""
    tensors, values = float8(layer, weight, weight.float().abs().amax(1, keepdim=True) / 448 + 1e-5)
    return {**tensors, f"{layer}.weight_scale": tensors[f"{layer}.weight_scale"].flatten()}, values


def int8(layer: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scales = (weight.float().abs().amax(1, keepdim=True) / 127).clamp(min=1e-5)
    stored = (weight.float() / scales).round().to(torch.int8)
    return {f"{layer}.weight": stored, f"{layer}.weight_scale": scales}, (stored.float() * scales).bfloat16()


def micro_floats(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """`weight` is [experts, inputs, outputs] as in bfloat16; blocks are of [experts, outputs, inputs]."""
    groups = weight.transpose(1, 2).float().unflatten(2, (-1, 32))
    exponents = groups.abs().amax(-1).clamp(min=1e-6).log2().floor() - 2
    scaled = groups / torch.exp2(exponents)[..., None]
    book = torch.tensor(E2M1)
    codes = (scaled.abs()[..., None] - book).abs().argmin(-1)
    values = book[codes] * scaled.sign() * torch.exp2(exponents)[..., None]
    codes = codes + 8 * (scaled < 0)
    tensors = {
        f"{name}_blocks": (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8),
        f"{name}_scales": (exponents + 127).to(torch.uint8),
    }
    return tensors, values.flatten(2).transpose(1, 2).bfloat16().contiguous()


def _integers(bits: int, is_symmetric: bool, group: int = 0, **more: Any) -> dict[str, Any]:
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    return {"type": "int", "num_bits": bits, "symmetric": is_symmetric, **strategy, **more}


def _compressed(weights: Mapping[str, Any], inputs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}}
    return {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["lm_head"]}


def _auto_round(packing: str, group: int, is_symmetric: bool) -> dict[str, Any]:
    """The fields that its export writes; where a layer differs from the others, it is in `extra_config`."""
    return {
        "quant_method": "auto-round",
        "packing_format": f"auto_round:{packing}",
        "bits": 4,
        "group_size": group,
        "sym": is_symmetric,
        "data_type": "int",
        "iters": 200,
        "autoround_version": "0.9.7",
        "block_name_to_quantize": "model.layers",
        "extra_config": {"model.layers.0.mlp.gate": {"bits": 16, "data_type": "float"}},
    }


_DYNAMIC = {"type": "int", "num_bits": 8, "strategy": "token", "symmetric": True, "dynamic": True}
_FLOAT8 = {"type": "float", "num_bits": 8, "strategy": "channel"}

Write = Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]]
Format = tuple[dict[str, Any], Write]


def grouped_formats(group: int) -> dict[str, Format]:
    """Integers of 4 bits, and of 8, with a scale for so many inputs."""
    gptq_config: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": group}
    awq_config = {**gptq_config, "quant_method": "awq", "version": "gemm", "zero_point": True}
    return {
        "packed": (
            _compressed(_integers(4, True, group)),
            lambda layer, weight: packed(layer, weight, 4, group, True),
        ),
        "packed with zero points": (
            _compressed(_integers(4, False, group)),
            lambda layer, weight: packed(layer, weight, 4, group, False),
        ),
        "gptq": (gptq_config, lambda layer, weight: gptq(layer, weight, 4, group, True)),
        "gptq with zero points": (gptq_config, lambda layer, weight: gptq(layer, weight, 4, group, False)),
        "gptq in act-order": (
            gptq_config,
            lambda layer, weight: gptq(layer, weight, 4, group, False, has_order=True),
        ),
        "gptq in 8 bits": (
            {**gptq_config, "bits": 8, "checkpoint_format": "gptq_v2"},
            lambda layer, weight: gptq(layer, weight, 8, group, False, offset=0),
        ),
        "awq": (awq_config, lambda layer, weight: awq(layer, weight, group)),
        "awq, symmetric": (awq_config, lambda layer, weight: awq(layer, weight, group, True)),
        "auto-round": (
            _auto_round("auto_gptq", group, True),
            lambda layer, weight: auto_round(layer, weight, group, True),
        ),
        "auto-round with zero points": (
            _auto_round("auto_gptq", group, False),
            lambda layer, weight: auto_round(layer, weight, group, False),
        ),
        "auto-round in GPTQModel's packing": (
            _auto_round("gptqmodel", group, False),
            lambda layer, weight: auto_round(layer, weight, group, False, offset=0),
        ),
        "auto-round in AWQ's packing": (
            _auto_round("auto_awq", group, False),
            lambda layer, weight: awq(layer, weight, group),
        ),
    }


FORMATS: dict[str, Format] = {
    **grouped_formats(32),
    "packed in 8 bits": (
        _compressed(_integers(8, True)),
        lambda layer, weight: packed(layer, weight, 8, weight.shape[1], True),
    ),
    "float8": (
        _compressed(_FLOAT8, {"type": "float", "num_bits": 8}),
        lambda layer, weight: float8(layer, weight, weight.float().abs().amax(1, keepdim=True) / 448 + 1e-5),
    ),
    "float8 with one scale": (
        {"quant_method": "fp8", "activation_scheme": "dynamic"},
        lambda layer, weight: float8(layer, weight, weight.float().abs().amax() / 448 + 1e-5),
    ),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}, modelopt),
    "modelopt, FP8_PER_CHANNEL_PER_TOKEN": (
        {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN", "ignore": ["lm_head"]},
        modelopt_by_rows,
    ),
    "int8": (_compressed(_integers(8, True)), int8),
    "int8 with int8 inputs": (_compressed(_integers(8, True), _DYNAMIC), int8),
}
"""Format -> its `quantization_config`, and what writes a layer's weight."""


def quantize_checkpoint(path: Path, folder: Path, name: str, group: int = 32) -> tuple[Path, Path]:
    """Writes a checkpoint's projections in a format, and a twin with the values that they stand for."""
    config, write = {**FORMATS, **grouped_formats(group)}[name]
    stored = load_file(path / "model.safetensors")
    values = dict(stored)
    for tensor, weight in list(stored.items()):
        # Rows that fill no word stay as they are, as published checkpoints leave small layers.
        if weight.ndim == 2 and "proj" in tensor.split(".")[-2] and len(weight) % 8 == 0:
            layer = tensor.removesuffix(".weight")
            del stored[tensor]
            tensors, values[tensor] = write(layer, weight)
            values[tensor] = values[tensor].to(weight.dtype)
            stored.update(tensors)
    return save_twins(path, folder, config, stored, values)


def quantize_in_kinds(path: Path, folder: Path, has_int8_inputs: bool) -> tuple[Path, Path]:
    """Writes a checkpoint's experts in 4-bit integers with zero points, beside dense MLPs and attention in 8-bit ones
    of two layouts, and what the list of exceptions names as it was: routers, and one of the projections that a layer
    reads together.

    With `has_int8_inputs` attention rounds its inputs, and the twin's is the same: no values give the same tokens.
    """
    kinds: tuple[tuple[str, dict[str, Any], Write], ...] = (
        (r".*\.mlp\.experts\..*_proj$", _integers(4, False, 32), FORMATS["packed with zero points"][1]),
        (r".*\.mlp\.(gate|up|down)_proj$", _integers(8, True), FORMATS["packed in 8 bits"][1]),
        (r".*\.self_attn\..*_proj$", _integers(8, True), int8),
    )
    ignored = r".*\.(mlp\.gate|2\.self_attn\.v_proj)$"
    groups = {
        f"group_{number}": {"targets": [f"re:{pattern}"], "weights": weights, "input_activations": None}
        for number, (pattern, weights, _) in enumerate(kinds)
    }
    if has_int8_inputs:
        groups["group_2"]["input_activations"] = _DYNAMIC
    config = {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "config_groups": groups,
        "ignore": ["lm_head", f"re:{ignored}"],
    }
    stored = load_file(path / "model.safetensors")
    values = dict(stored)
    for tensor in list(stored):
        layer = tensor.removesuffix(".weight")
        write = next((write for pattern, _, write in kinds if re.match(pattern, layer)), None)
        if write is None or re.match(ignored, layer):
            continue
        tensors, values[tensor] = write(layer, stored.pop(tensor))
        stored.update(tensors)
        if write is int8 and has_int8_inputs:
            values.update(tensors)
    return save_twins(path, folder, config, stored, values, twin_config=config if has_int8_inputs else None)


def mix_experts(path: Path, folder: Path, *names: str | None) -> tuple[Path, Path]:
    """Writes expert e of every layer in the format `names[e % len(names)]` of FORMATS, or as it was for None."""
    stored = load_file(path / "model.safetensors")
    values = dict(stored)
    for tensor in list(stored):
        expert = re.match(r".*\.experts\.(\d+)\..*_proj\.weight$", tensor)
        name = expert and names[int(expert[1]) % len(names)]
        if name:
            tensors, values[tensor] = FORMATS[name][1](tensor.removesuffix(".weight"), stored.pop(tensor))
            stored.update(tensors)
    return save_twins(path, folder, FORMATS["packed"][0], stored, values)


def quantize_experts(path: Path, folder: Path) -> tuple[Path, Path]:
    """Does the same for gpt-oss' experts in 4-bit floats."""
    stored = load_file(path / "model.safetensors")
    values = dict(stored)
    for tensor, weight in list(stored.items()):
        if tensor.endswith(("experts.gate_up_proj", "experts.down_proj")):
            del stored[tensor]
            tensors, twin = micro_floats(tensor, weight)
            values[tensor] = twin.to(weight.dtype)
            stored.update(tensors)
    return save_twins(path, folder, {"quant_method": "mxfp4"}, stored, values)


def save_twins(
    path: Path,
    folder: Path,
    config: Mapping[str, Any],
    stored: Tensors,
    values: Tensors,
    twin_config: Mapping[str, Any] | None = None,
) -> tuple[Path, Path]:
    quantized, twin = folder / "quantized", folder / "twin"
    for other, tensors, own in ((quantized, stored, config), (twin, values, twin_config)):
        shutil.copytree(path, other)
        save_file(tensors, other / "model.safetensors", {"format": "pt"})
        if own is not None:
            raw = json.loads((other / "config.json").read_text())
            (other / "config.json").write_text(json.dumps({**raw, "quantization_config": own}))
    return quantized, twin

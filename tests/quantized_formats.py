"""Writes weights in the formats of quantized checkpoints, and the values that they stand for."""

from __future__ import annotations

import json
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


def awq(layer: str, weight: torch.Tensor, group: int) -> tuple[Tensors, torch.Tensor]:
    grid = round_to_grid(weight, 4, group, False, torch.float16)
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


def _integers(bits: int, is_symmetric: bool, **more: Any) -> dict[str, Any]:
    strategy = {"strategy": "group", "group_size": 32} if bits == 4 else {"strategy": "channel"}
    return {"type": "int", "num_bits": bits, "symmetric": is_symmetric, **strategy, **more}


def _compressed(weights: Mapping[str, Any], inputs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}}
    return {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["lm_head"]}


_DYNAMIC = {"type": "int", "num_bits": 8, "strategy": "token", "symmetric": True, "dynamic": True}
_FLOAT8 = {"type": "float", "num_bits": 8, "strategy": "channel"}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}

Format = tuple[dict[str, Any], Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]]]
FORMATS: dict[str, Format] = {
    "packed": (_compressed(_integers(4, True)), lambda layer, weight: packed(layer, weight, 4, 32, True)),
    "packed with zero points": (
        _compressed(_integers(4, False)),
        lambda layer, weight: packed(layer, weight, 4, 32, False),
    ),
    "packed in 8 bits": (
        _compressed(_integers(8, True)),
        lambda layer, weight: packed(layer, weight, 8, weight.shape[1], True),
    ),
    "gptq": (_GPTQ, lambda layer, weight: gptq(layer, weight, 4, 32, True)),
    "gptq with zero points": (_GPTQ, lambda layer, weight: gptq(layer, weight, 4, 32, False)),
    "gptq in act-order": (_GPTQ, lambda layer, weight: gptq(layer, weight, 4, 32, False, has_order=True)),
    "gptq in 8 bits": (
        {**_GPTQ, "bits": 8, "checkpoint_format": "gptq_v2"},
        lambda layer, weight: gptq(layer, weight, 8, 32, False, offset=0),
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
        lambda layer, weight: awq(layer, weight, 32),
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


def quantize_checkpoint(path: Path, folder: Path, name: str) -> tuple[Path, Path]:
    """Writes a checkpoint's projections in a format, and a twin with the values that they stand for."""
    config, write = FORMATS[name]
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
    path: Path, folder: Path, config: Mapping[str, Any], stored: Tensors, values: Tensors
) -> tuple[Path, Path]:
    quantized, twin = folder / "quantized", folder / "twin"
    for other, tensors in ((quantized, stored), (twin, values)):
        shutil.copytree(path, other)
        save_file(tensors, other / "model.safetensors", {"format": "pt"})
    raw = json.loads((quantized / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps({**raw, "quantization_config": config}))
    return quantized, twin

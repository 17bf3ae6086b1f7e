"""How a checkpoint's weights are quantized, from `quantization_config` in `config.json`.

Formats store different tensors, so the tensors tell which layers are quantized, with how many bits and in what groups:
that several kinds and unquantized layers are mixed is the normal case. Here is what the tensors do not tell, and the
refusal of what Penstock does not compute, before any weight is read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.config.name_patterns import ends_with_match
from penstock.utils.errors import ConfigError

FP8, COMPRESSED, GPTQ, AWQ, MXFP4 = "fp8", "compressed-tensors", "gptq", "awq", "mxfp4"
MODELOPT = "modelopt"
GGUF = "gguf"
_AUTO_ROUND = ("auto-round", "auto_round", "intel/auto-round")
# Its packings. A checkpoint that names none has GPTQ's, as in AutoRound and vLLM. GPTQ's stores zero points less one,
# GPTQModel's as they are.
_AUTO_ROUND_GPTQ = (None, "auto_round:auto_gptq", "auto_round:gptq", "auto_round:gptq:exllamav2")
_AUTO_ROUND_GPTQMODEL = ("auto_round", "auto_round:gptqmodel")
_SERVED = (FP8, COMPRESSED, GPTQ, AWQ, MXFP4, MODELOPT, _AUTO_ROUND[0])
_BITS = (4, 8)


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """`method` names the format. `group` is the number of inputs that share a scale, where all layers have the same;
    else 0. With `counts_zeros_from_one` the stored zero points are one less than they mean (GPTQ's first version).
    """

    method: str
    bits: int = 8  # the fewest of a layer; of a GGUF file unknown
    group: int = 0
    counts_zeros_from_one: bool = False
    block: tuple[int, int] | None = None  # rows and columns that share a scale, if weights are 8-bit floats in blocks
    is_reordered: bool = False  # act-order: such layers are dequantised when they are loaded
    targets: tuple[tuple[str, bool], ...] = ()  # with whether inputs are 8-bit integers too, most specific first
    formats: tuple[str, ...] = ()  # of a GGUF file's matrices, that of most bytes first

    @property
    def has_integers(self) -> bool:
        """Whether weights may be integers, or floats of 4 bits, not of 8 bits alone."""
        return self.method not in (FP8, MODELOPT)

    @property
    def name(self) -> str:
        """The formats in words."""
        return ", ".join(self.formats) or self.method

    @property
    def expansion(self) -> int:
        """How many times larger the weights are in 16 bits, at most."""
        return 16 // self.bits

    def quantizes_inputs(self, layer: str) -> bool:
        """Whether the inputs of a linear layer with weights in 8-bit integers are quantized as well.

        A target is a layer's name, a pattern after "re:", or a class, of which only "Linear" has weights here. If
        several match the layer, the most specific decides: its name before a pattern, a pattern before the class.
        """
        for target, rounds in self.targets:
            if re.match(target[3:], layer) if target.startswith("re:") else target in (layer, "Linear"):
                return rounds
        return False


def read_quantization(path: Path, raw: Any) -> QuantizationConfig | None:
    """Returns None if the weights are not quantized. Raises ConfigError if they are in a way that is not served."""
    if not raw:
        return None
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{path}: quantization_config must be a JSON object, got {raw!r}")
    reader = _Reader(path, raw)  # pyright: ignore[reportUnknownArgumentType]
    method = reader.fields.get("quant_method")
    read = _read_auto_round if method in _AUTO_ROUND else _READERS.get(str(method))
    if read is not None:
        return read(reader)
    if method == MODELOPT:
        # Scales of whole tensors or by rows, of which the tensors tell. With null at most the KV cache is quantized.
        algorithm = reader.check("quant_algo", ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", None), default="")
        return None if algorithm is None else QuantizationConfig(MODELOPT)
    if method == GGUF:
        return QuantizationConfig(GGUF, formats=tuple(map(str, reader.fields.get("formats") or ())))
    if method == MXFP4:
        return QuantizationConfig(MXFP4, bits=4, group=32)
    raise ConfigError(
        f"{path} is quantized with quant_method {method!r}, which is not supported: use a checkpoint in "
        f"{', '.join(_SERVED)}, or one that is not quantized"
    )


@dataclass(frozen=True, slots=True)
class _Reader:
    path: Path
    fields: Mapping[str, Any]
    prefix: str = "quantization_config"

    def __truediv__(self, name: str) -> _Reader:
        """Returns the reader of an object in a field, without fields if it is absent or null."""
        fields: Any = self.fields.get(name) or {}
        if not isinstance(fields, Mapping):
            raise ConfigError(f"{self.path}: {self.prefix}.{name} must be a JSON object, got {fields!r}")
        return _Reader(self.path, fields, f"{self.prefix}.{name}")  # pyright: ignore[reportUnknownArgumentType]

    def check(self, name: str, served: Sequence[object], default: object = None) -> Any:
        """Returns a field, which must be among the served values."""
        value = self.fields.get(name, default)
        # True equals 1, so the types are compared too.
        if not any(type(value) is type(each) and value == each for each in served):
            values = ", ".join(f"{each!r}" for each in served)
            raise ConfigError(
                f"{self.path}: {self.prefix}.{name} is {value!r}, and Penstock reads {values}: use another checkpoint"
            )
        return value

    def group(self, name: str = "group_size") -> int:
        """Returns a number of inputs, 0 for all (-1)."""
        value = self.fields.get(name)
        if type(value) is not int or (value != -1 and value not in range(16, 1 << 16, 16)):
            needed = "a multiple of 16 below 65536, or -1 for one scale per row"
            raise ConfigError(f"{self.path}: {self.prefix}.{name} is {value!r}: it must be {needed}")
        return max(0, value)


def _read_fp8(reader: _Reader) -> QuantizationConfig:
    reader.check("fmt", (None, "e4m3"))
    return QuantizationConfig(FP8, block=_read_block(reader, "weight_block_size"))


def _read_block(reader: _Reader, name: str) -> tuple[int, int] | None:
    block: Any = reader.fields.get(name)
    if block is None:
        return None
    if not isinstance(block, list) or len(block) != 2 or any(type(size) is not int or size < 1 for size in block):  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        raise ConfigError(f"{reader.path}: {reader.prefix}.{name} must be two positive integers, got {block!r}")
    return block[0], block[1]  # pyright: ignore[reportUnknownVariableType]


def _read_gptq(reader: _Reader) -> QuantizationConfig:
    bits = reader.check("bits", _BITS)
    reader.check("pack_dtype", (None, "int32"))
    # Marlin and others rearrange what is stored.
    stored = reader.check("checkpoint_format", (None, "gptq", "gptq_v2"))
    found = QuantizationConfig(GPTQ, bits, reader.group(), counts_zeros_from_one=stored != "gptq_v2")
    is_reordered = bool(reader.fields.get("desc_act")) and not reader.fields.get("static_groups") and found.group > 0
    return replace(found, is_reordered=is_reordered)


def _read_awq(reader: _Reader) -> QuantizationConfig:
    # AutoAWQ's own file has other names.
    reader.check("w_bit" if "w_bit" in reader.fields else "bits", (4,))
    if str(reader.fields.get("version")).lower() not in ("gemm", "none"):
        reader.check("version", ("gemm",))
    return QuantizationConfig(AWQ, 4, reader.group("q_group_size" if "q_group_size" in reader.fields else "group_size"))


def _read_auto_round(reader: _Reader) -> QuantizationConfig:
    # Up to AutoRound 0.4 the name is in `backend`.
    name = "packing_format" if "packing_format" in reader.fields else "backend"
    packing = reader.check(name, (*_AUTO_ROUND_GPTQ, *_AUTO_ROUND_GPTQMODEL, "auto_round:auto_awq", "auto_round:awq"))
    reader.check("data_type", (None, "int"))
    reader.check("act_bits", (None, 16, 32))
    for rotation in ("rotation_config", "spinquant_config"):
        reader.check(rotation, (None,))
    if str(packing).endswith("awq"):
        return _read_awq(reader)
    return replace(_read_gptq(reader), counts_zeros_from_one=packing not in _AUTO_ROUND_GPTQMODEL)


def _read_compressed(reader: _Reader) -> QuantizationConfig:
    for name in ("sparsity_config", "transform_config"):
        options = reader / name
        if any(options.fields.get(key) not in (None, "dense", {}, []) for key in ("format", "config_groups")):
            raise ConfigError(f"{reader.path}: {options.prefix} is not supported: use another checkpoint")
    groups, all_targets = reader / "config_groups", list[tuple[str, bool]]()
    sizes, blocks, all_bits, orders = set[int](), set[tuple[int, int] | None](), {8}, list[object]()
    for name in groups.fields:
        group = groups / name
        weights, inputs = group / "weights", group / "input_activations"
        targets: Any = group.fields.get("targets")
        if not isinstance(targets, list) or not all(isinstance(each, str) for each in targets):  # pyright: ignore[reportUnknownVariableType]
            raise ConfigError(f"{reader.path}: {group.prefix}.targets must be a list of names, got {targets!r}")
        if not weights.fields:
            raise ConfigError(f"{reader.path}: {group.prefix}.weights is missing: its weights are not quantized")
        kind = weights.check("type", ("int", "float"), "int")
        all_bits.add(weights.check("num_bits", _BITS if kind == "int" else (8,), 8))
        strategy = weights.check("strategy", ("group", "channel", "tensor", *(("block",) if kind == "float" else ())))
        orders.append(weights.fields.get("actorder"))
        if strategy == "group":
            sizes.add(weights.group())
        blocks.add(_read_block(weights, "block_structure") if strategy == "block" else None)
        rounds = kind == "int" and bool(inputs.fields)
        all_targets += [(target, rounds) for target in targets]  # pyright: ignore[reportUnknownVariableType]
        if rounds:
            if weights.fields.get("num_bits", 8) != 8:
                reason = "inputs are rounded for weights of 8 bits only: use another checkpoint"
                raise ConfigError(f"{reader.path}: {inputs.prefix} beside {min(all_bits)}-bit weights: {reason}")
            weights.check("strategy", ("channel", "tensor"))
            defaults = {"type": "int", "num_bits": 8, "symmetric": True}
            for field, served in {**defaults, "strategy": "token", "dynamic": True}.items():
                inputs.check(field, (served,), defaults.get(field))
    if len(blocks - {None}) > 1:
        raise ConfigError(f"{reader.path}: {groups.prefix} have blocks of several sizes: use another checkpoint")
    return QuantizationConfig(
        COMPRESSED,
        bits=min(all_bits),
        group=sizes.pop() if len(sizes) == 1 else 0,
        block=next(iter(blocks - {None}), None),
        is_reordered="group" in orders,
        targets=_in_order(reader, all_targets) if any(rounds for _, rounds in all_targets) else (),
    )


def _in_order(reader: _Reader, targets: Sequence[tuple[str, bool]]) -> tuple[tuple[str, bool], ...]:
    """Returns names before patterns, and these before the class. Raises ConfigError for an unusable pattern."""
    for target, _ in targets:
        try:
            ends_with_match(target.removeprefix("re:"), "model.layers.10.mlp.experts.127.gate_proj")
        except ValueError as error:
            raise ConfigError(f"{reader.path}: the target {target!r} cannot be matched: {error}") from None
    return tuple(sorted(targets, key=lambda each: (each[0] == "Linear", each[0].startswith("re:"))))


_READERS = {FP8: _read_fp8, COMPRESSED: _read_compressed, GPTQ: _read_gptq, AWQ: _read_awq}

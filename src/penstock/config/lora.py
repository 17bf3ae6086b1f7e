"""LoRA adapters: how many the engine holds, and the files of one, as PEFT writes them.

An adapter's folder has `adapter_config.json` and `adapter_model.safetensors`. Of these only the header is read here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from penstock.config.fields import read_count
from penstock.config.model import read_json
from penstock.config.name_patterns import ends_with_match
from penstock.utils.errors import ConfigError

if TYPE_CHECKING:
    from penstock.messages.adapters import LoraTarget

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_RANK = 512
MAX_ADAPTERS = 4096
_MAX_CONFIG_BYTES = 16 << 20
_MOST_SCALE = 1e30
_TYPES = ("F32", "F16", "BF16")
_PREFIX = "base_model.model."
_TENSOR = re.compile(rf"{re.escape(_PREFIX)}(.+)\.(lora_[AB])(?:\.default)?\.weight")
# Fields that change what an adapter computes, and the values that change nothing.
_INERT: Mapping[str, Sequence[Any]] = {
    "use_dora": (False,),
    "use_qalora": (False,),
    "lora_bias": (False,),
    "fan_in_fan_out": (False,),
    "bias": ("none",),
    "modules_to_save": ([],),
    "layer_replication": ([],),
    "trainable_token_indices": ([], {}),
    "alora_invocation_tokens": ([],),
    "target_parameters": ([],),
}
# Initialisations that also change the model's own weights.
_CHANGES_MODEL = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """The engine holds `num_slots` adapters of rank `max_rank` or less, and `max_running` of them run at once."""

    num_slots: int
    max_running: int
    max_rank: int


@dataclass(frozen=True, slots=True)
class LoraTensors:
    """An adapter's addition to one projection: `scale * up @ down`, by the names of the tensors."""

    down: str
    up: str
    rank: int
    num_inputs: int
    num_outputs: int
    scale: float


@dataclass(frozen=True, slots=True)
class LoraFiles:
    """`tensors` are by the projection's name in the model."""

    folder: Path
    tensors: dict[str, LoraTensors]


def parse_lora(max_loras: int, max_lora_rank: int, max_cpu_loras: int | None, backend: str, pools: bool) -> LoraConfig:
    """`backend` runs the ranks; `pools`: the engine generates no tokens. Raises ConfigError naming the argument and its
    limit.
    """
    if pools:
        raise ConfigError("enable_lora needs an engine that generates: this one pools (runner=pooling)")
    if backend == "ray":
        raise ConfigError("enable_lora needs ranks on one host, which share the adapters' files: use mp or uniproc")
    if not 1 <= max_lora_rank <= MAX_RANK:
        raise ConfigError(f"max_lora_rank must be from 1 to {MAX_RANK}, got {max_lora_rank}")
    if not 1 <= max_loras <= MAX_ADAPTERS:
        raise ConfigError(f"max_loras must be from 1 to {MAX_ADAPTERS}, got {max_loras}")
    most = max_loras if max_cpu_loras is None else max_cpu_loras
    if not max_loras <= most <= MAX_ADAPTERS:
        raise ConfigError(f"max_cpu_loras must be from max_loras={max_loras} to {MAX_ADAPTERS}, got {most}")
    return LoraConfig(num_slots=most, max_running=max_loras, max_rank=max_lora_rank)


def read_adapter(folder: Path) -> LoraFiles:
    """Reads what an adapter changes. Raises ConfigError naming the file and what is wrong with it."""
    config_file, weights_file = folder / CONFIG, folder / WEIGHTS
    try:
        if config_file.is_file() and config_file.stat().st_size > _MAX_CONFIG_BYTES:
            raise ConfigError(f"{config_file} has more than {_MAX_CONFIG_BYTES} bytes")
        raw = read_json(config_file)
        if raw is None:
            raise ConfigError(f"{folder} has no {CONFIG}: it must be a folder that PEFT has written")
        _check_config(config_file, raw)
        if not weights_file.is_file():
            raise ConfigError(f"{folder} has no {WEIGHTS}; other formats, such as adapter_model.bin, are not read")
        shapes = _read_header(weights_file)
    except (OSError, ValueError) as error:
        raise error if isinstance(error, ConfigError) else ConfigError(f"{folder} cannot be read: {error}") from None
    return LoraFiles(folder, _find_tensors(weights_file, shapes, config_file, raw))


def check_targets(files: LoraFiles, targets: Mapping[str, LoraTarget], max_rank: int) -> None:
    """Raises ConfigError if an adapter changes other layers, or has another rank or other shapes."""
    for name, found in files.tensors.items():
        target = targets.get(name)
        if target is None:
            raise ConfigError(
                f"{files.folder}: the adapter changes {name!r}, which adapters cannot change here: they can change "
                "the projections of attention and of dense feed-forward layers, and not embeddings, output heads, "
                "routers or experts"
            )
        if found.rank > max_rank:
            raise ConfigError(f"{files.folder}: the rank of {name} is {found.rank}: set max_lora_rank to at least that")
        if (found.num_inputs, found.num_outputs) != (target.num_inputs, target.num_outputs):
            raise ConfigError(
                f"{files.folder}: {name} has {found.num_inputs} inputs and {found.num_outputs} outputs in the adapter, "
                f"and {target.num_inputs} and {target.num_outputs} in the model: it was made for another model"
            )


def plain_name(name: str) -> str:
    """Returns a projection's name without the part that only multimodal checkpoints have."""
    return name.replace("language_model.", "")


def _check_config(file: Path, raw: Mapping[str, Any]) -> None:
    if raw.get("peft_type") != "LORA":
        raise ConfigError(f"{file}: peft_type is {raw.get('peft_type')!r}, and only LORA is supported")
    for name, inert in _INERT.items():
        value = raw.get(name)
        if value is not None and value not in inert:
            raise ConfigError(f"{file}: {name}={value!r} is not supported: adapters add low-rank products alone")
    start = raw.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_MODEL):
        raise ConfigError(
            f"{file}: init_lora_weights={start!r} also changes the model's own weights: convert the adapter to a plain "
            "one with PEFT (path_initial_model_for_weight_conversion)"
        )


def _read_header(file: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Returns the types and shapes of a safetensors file's tensors by name. Raises ConfigError."""
    # Imported here: the help text needs no tensors.
    from safetensors import SafetensorError, safe_open

    try:
        with cast("Any", safe_open)(file, framework="numpy") as stored:
            slices: dict[str, Any] = {name: stored.get_slice(name) for name in stored.keys()}  # noqa: SIM118
            return {name: (each.get_dtype(), tuple(each.get_shape())) for name, each in slices.items()}
    except SafetensorError as error:
        raise ConfigError(f"{file} is truncated or not a safetensors file: {error}") from None


def _find_tensors(
    file: Path, shapes: Mapping[str, tuple[str, tuple[int, ...]]], config_file: Path, raw: Mapping[str, Any]
) -> dict[str, LoraTensors]:
    halves: dict[str, dict[str, str]] = {}
    for tensor, (dtype, shape) in shapes.items():
        match = _TENSOR.fullmatch(tensor)
        if match is None or len(shape) != 2:
            raise ConfigError(
                f"{file}: the tensor {tensor!r} of shape {list(shape)} is not supported: an adapter has lora_A and "
                "lora_B of linear layers alone, and nothing for embeddings or magnitudes (DoRA)"
            )
        if dtype not in _TYPES:
            raise ConfigError(f"{file}: {tensor!r} has numbers of type {dtype}; {', '.join(_TYPES)} are supported")
        of_name = halves.setdefault(plain_name(match[1]), {})
        if match[2] in of_name:
            raise ConfigError(f"{file}: {tensor!r} and {of_name[match[2]]!r} are for the same projection")
        of_name[match[2]] = tensor
    if not halves:
        raise ConfigError(f"{file} has no tensors")
    found: dict[str, LoraTensors] = {}
    for name, of_name in halves.items():
        if len(of_name) != 2:
            raise ConfigError(f"{file}: {name} has {', '.join(of_name)} alone, and needs lora_A and lora_B")
        (rank, num_inputs), (num_outputs, other) = (shapes[of_name[half]][1] for half in ("lora_A", "lora_B"))
        if rank != other or not rank:
            raise ConfigError(f"{file}: lora_A and lora_B of {name} have ranks {rank} and {other}")
        # PEFT's patterns match the module's own name.
        scale = _scale(config_file, raw, of_name["lora_A"].removeprefix(_PREFIX).rpartition(".lora_A")[0], rank)
        tensors = of_name["lora_A"], of_name["lora_B"]
        found[name] = LoraTensors(*tensors, rank, num_inputs, num_outputs, scale)
    return found


def _scale(file: Path, raw: Mapping[str, Any], name: str, rank: int) -> float:
    """Returns alpha / r, or alpha / sqrt(r) of a rank-stabilised adapter (Kalajdzievski 2023, arXiv:2312.03732)."""
    wanted = _of_pattern(file, raw, "rank_pattern", name)
    wanted = read_count(raw, "r", 8) if wanted is None else wanted
    if wanted != rank:
        raise ConfigError(f"{file} gives {name} the rank {wanted!r}, and its tensors have {rank}")
    alpha = _of_pattern(file, raw, "alpha_pattern", name)
    alpha = raw.get("lora_alpha", 8) if alpha is None else alpha
    try:
        scale = float(alpha) / (math.sqrt(rank) if raw.get("use_rslora") else rank)
    except (TypeError, ValueError, OverflowError):
        scale = math.nan
    if isinstance(alpha, str | bool) or not abs(scale) <= _MOST_SCALE:
        raise ConfigError(f"{file}: lora_alpha of {name} must be a number of moderate size, got {str(alpha)[:40]}")
    return scale


def _of_pattern(file: Path, raw: Mapping[str, Any], field: str, name: str) -> Any:
    """Returns the value of the first pattern that a name, or its end, matches, as PEFT does; None if there is none."""
    patterns: Any = raw.get(field) or {}
    if not isinstance(patterns, Mapping):
        raise ConfigError(f"{file}: {field} must be an object, got {patterns!r}")
    for pattern, value in cast("Mapping[str, Any]", patterns).items():
        try:
            if ends_with_match(pattern, name):
                return value
        except ValueError as error:
            raise ConfigError(f"{file}: {field} has an invalid pattern {pattern[:80]!r}: {error}") from None
    return None

"""The model's shape, read from `config.json` of a Hugging Face checkpoint folder.

Only facts are read here, in the field names of the model files; the registry (`models/registry.py`) decides whether
Penstock supports the architecture. Both spellings of transformers are accepted: `rope_theta` with `rope_scaling`, and
`rope_parameters`; `torch_dtype` and `dtype`. `families` and `rope` know the fields of single families.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.config.encoder import EncoderConfig, read_encoder
from penstock.config.experts import ExpertsConfig, read_experts
from penstock.config.families import (
    NO_MULTIPLIERS,
    SILU,
    MultipliersConfig,
    read_activation,
    read_layer_types,
    read_multipliers,
    read_soft_cap,
    read_window,
    text_part,
    with_defaults,
)
from penstock.config.fields import read_count, read_number
from penstock.config.latent import LatentConfig, read_latent
from penstock.config.layer_heads import KVHeads, PerLayerInputs, read_full_heads, read_kv_sources, read_per_layer_inputs
from penstock.config.nemotron import FEED_FORWARD
from penstock.config.quantization import AWQ, GGUF, GPTQ, MODELOPT, QuantizationConfig, read_quantization
from penstock.config.recurrent import LINEAR, ConvSizes, DeltaSizes, MambaSizes, read_conv, read_delta, read_mamba
from penstock.config.rope import FULL, SLIDING, RopeConfig, read_ropes
from penstock.utils.errors import ConfigError

DTYPES = ("float32", "bfloat16", "float16")
KV_CACHE_DTYPES = ("auto", "int8")
_HEAD_STEP, _LARGEST_HEAD = 8, 512
_INFINITIES = {"Infinity": math.inf, "-Infinity": -math.inf}
_DTYPE_ALIASES = {"half": "float16", "float": "float32", "fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A transformer: a decoder, or with `encoder` an encoder, which has no rotary embedding and no RMS norms.

    `intermediate_size` is that of the layers without experts. `max_position_embeddings` is the longest context in
    tokens; `layer_windows[i]` is layer i's sliding window in tokens, 0 for full attention. `rms_norm_eps` is that
    of all norms of a decoder, whatever their kind. With `latent`, the one KV head of size `head_dim` is what the
    cache stores of a token. `attn_logit_softcapping` limits attention scores, unless it is 0; sinks are one learned
    number per query head (`Softmax` in `kernels/paged_attention.py` has the formulas). `wrapper` is the model type
    of the multimodal model of which this is the text part.
    """

    path: Path
    model_type: str
    architecture: str
    dtype: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    layer_windows: tuple[int, ...]
    encoder: EncoderConfig | None = None
    latent: LatentConfig | None = None
    experts: ExpertsConfig | None = None
    delta: DeltaSizes | None = None  # of the recurrent layers, if they are gated delta nets
    conv: ConvSizes | None = None  # the same for gated short convolutions
    mamba: MambaSizes | None = None  # the same for Mamba2
    recurrent_layers: tuple[int, ...] = ()
    feed_forward_layers: tuple[int, ...] = ()  # a feed-forward part alone, if every layer is one part
    quantization: QuantizationConfig | None = None
    attn_logit_softcapping: float = 0.0
    has_attention_sinks: bool = False
    window_rope: RopeConfig | None = None  # of the layers with a window, if it is not `rope`
    unrotated_layers: tuple[int, ...] = ()
    rotary_factor: float = 1.0
    activation: str = SILU  # of MLPs, which are gated unless it is a squared ReLU
    multipliers: MultipliersConfig = NO_MULTIPLIERS
    wrapper: str = ""
    full_heads: KVHeads | None = None  # of the layers without a window, if they have others
    kv_sources: tuple[int, ...] = ()  # the layer whose keys and values each layer reads, if some read another's
    has_keys_as_values: bool = False  # in layers without a window keys, before their norm and rotation, are the values
    has_wide_readers: bool = False  # layers that read another's keys and values have MLPs of twice the size
    per_layer_inputs: PerLayerInputs | None = None
    kv_cache_dtype: str = "auto"  # of `KV_CACHE_DTYPES`; auto is `dtype`

    @property
    def kv_dtype(self) -> str:
        return self.dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype

    @property
    def rotary_dim(self) -> int:
        """How many dimensions of a head are rotated, the first ones."""
        return int(self.head_dim * self.rotary_factor) if self.latent is None else self.latent.rotary_size

    def layer_rotary_dim(self, layer: int) -> int:
        """Returns the same for a layer whose heads may be others."""
        return self.rotary_dim if self.full_heads is None else self.layer_heads(layer).size

    def layer_heads(self, layer: int) -> KVHeads:
        if self.full_heads is not None and not self.layer_windows[layer]:
            return self.full_heads
        return KVHeads(self.num_key_value_heads, self.head_dim)

    def kv_source(self, layer: int) -> int:
        """Returns the layer whose keys and values the layer reads, in most models its own."""
        return self.kv_sources[layer] if self.kv_sources else layer

    def layer_rope(self, layer: int) -> RopeConfig | None:
        """Returns the layer's rotation, None if it has none."""
        if layer in self.unrotated_layers:
            return None
        return self.window_rope if self.window_rope is not None and self.layer_windows[layer] else self.rope

    @property
    def first_source(self) -> int | None:
        """Returns the first layer whose keys and values others read: it and all after it must be in one stage."""
        return min((source for layer, source in enumerate(self.kv_sources) if source != layer), default=None)

    def for_length(self, max_model_len: int) -> ModelConfig:
        """Returns the model as an engine with this longest context computes it (`RopeConfig.for_length`), with
        rotary tables of that many positions.
        """
        return replace(self, rope=self.rope.for_length(max_model_len), max_position_embeddings=max_model_len)

    def with_kv_cache(self, dtype: str) -> ModelConfig:
        """Returns the model with this `kv_cache_dtype`. Raises ConfigError if its KV cannot be stored in this way."""
        if dtype != "auto" and (self.encoder is not None or self.latent is not None):
            why = "an encoder stores no KV" if self.encoder is not None else "its latent attention is served as it is"
            raise ConfigError(f"kv_cache_dtype={dtype} cannot be used with {self.path}: {why}. Leave it at auto")
        return replace(self, kv_cache_dtype=dtype)


def load_model_config(path: Path, dtype: str = "auto") -> ModelConfig:
    """Reads `path/config.json`.

    `dtype` "auto" keeps the checkpoint's. Raises ConfigError if the file is missing, is not JSON, lacks a field or
    contains inconsistent numbers.
    """
    return parse_model_config(path, read_model_json(path), dtype)


def read_model_json(path: Path) -> dict[str, Any]:
    """Returns the contents of `path/config.json`. Raises ConfigError if there is no such file or it is not JSON."""
    raw = read_json(path / "config.json")
    if raw is None:
        ways = "one of its *.gguf files" if any(path.glob("*.gguf")) else "a folder with a Hugging Face checkpoint"
        raise ConfigError(f"{path} holds no config.json: pass {ways} as `model`")
    return raw


def parse_model_config(path: Path, raw: dict[str, Any], dtype: str) -> ModelConfig:
    """Returns the shape in `raw`, read from `path/config.json`. Raises ConfigError as `load_model_config` does."""
    file = path / "config.json"
    text = text_part(raw)
    names: Any = text.get("architectures") or [""]
    if not isinstance(text.get("model_type"), str):
        raise ConfigError(f"{file} names no model_type")
    if not isinstance(names, list) or not isinstance(names[0], str):
        raise ConfigError(f"{file}: architectures must be a list of names, got {names!r}")
    try:
        config = _parse(path, with_defaults(text), dtype)
        return config if text.get("model_type") == raw.get("model_type") else replace(config, wrapper=raw["model_type"])
    except KeyError as error:
        raise ConfigError(f"{file} lacks the field {error.args[0]!r} (model_type {text['model_type']!r})") from None
    except (TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise ConfigError(f"{file} cannot be used: {error}") from None


def read_json(file: Path) -> dict[str, Any] | None:
    """Returns a JSON object from a file; None if there is no file. Raises ConfigError if it is not a JSON object."""
    if not file.is_file():
        return None
    try:
        # Published files have infinities; no number of a model is NaN.
        value = json.loads(file.read_text(encoding="utf-8"), parse_constant=_INFINITIES.__getitem__)
    except (ValueError, KeyError, RecursionError) as error:
        raise ConfigError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{file} must contain a JSON object")
    return value  # pyright: ignore[reportUnknownVariableType]


def _find_quantization(path: Path, raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns what `config.json` or another file says of the weights, as `quantization_config` does."""
    # The first versions of compressed-tensors wrote the second name.
    stated: Any = raw.get("quantization_config") or raw.get("compression_config")
    # AutoGPTQ's and AutoAWQ's first versions wrote files of their own.
    for name, method in () if stated else (("quantize_config.json", GPTQ), ("quant_config.json", AWQ)):
        if (found := read_json(path / name)) is not None:
            return {"quant_method": method, **found}
    file = path / "hf_quant_config.json"
    other = None if stated else read_json(file)
    if other is None:
        return stated
    fields: Any = other.get("quantization")
    if not isinstance(fields, dict):
        raise ConfigError(f"{file}: quantization must be a JSON object, got {fields!r}")
    return {**fields, "quant_method": MODELOPT}


def _parse(path: Path, raw: dict[str, Any], dtype: str) -> ModelConfig:
    quantization = read_quantization(path, _find_quantization(path, raw))
    encoder = read_encoder(raw)
    num_heads = read_count(raw, "num_attention_heads")
    num_layers = read_count(raw, "num_hidden_layers")
    layer_types = read_layer_types(raw, num_layers)
    ropes = read_ropes(raw, layer_types)
    latent = read_latent(raw, ropes.rope.scaling)
    num_kv_heads = read_count(raw, "num_key_value_heads", num_heads) if latent is None else 1
    hidden_size = read_count(raw, "hidden_size")
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"{path}: num_attention_heads ({num_heads}) is not a multiple of num_key_value_heads ({num_kv_heads})"
        )
    head_dim = read_count(raw, "head_dim", hidden_size // num_heads) if latent is None else latent.stored_size
    full_heads = read_full_heads(raw, layer_types, KVHeads(num_kv_heads, head_dim))
    if encoder is None:
        size = head_dim if latent is None else latent.rotary_size
        _check_heads(path, (size, size if full_heads is None else full_heads.size), ropes.rotary_factor)
    window = read_window(raw)
    if FULL not in layer_types and window >= raw.get("max_position_embeddings", math.inf):
        window = 0  # it hides nothing (Phi-4-mini)
    windows = tuple(window if kind == SLIDING else 0 for kind in layer_types)
    if latent is not None and any(windows):
        raise ConfigError(f"{path} has sliding_window={max(windows)} and latent attention, which has no window here")
    return ModelConfig(
        path=path,
        model_type=raw["model_type"],
        architecture=(raw.get("architectures") or [""])[0],
        dtype=_resolve_dtype(dtype, _stored_dtype(raw, quantization)),
        vocab_size=read_count(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=read_count(raw, "intermediate_size"),
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=_read_epsilon(raw, encoder),
        rope=ropes.rope,
        max_position_embeddings=(
            max(read_count(raw, "max_position_embeddings", 2048), ropes.rope.num_positions)
            if encoder is None
            else encoder.num_positions - encoder.first_position
        ),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        attention_bias=bool(raw.get("attention_bias", False)),
        mlp_bias=bool(raw.get("mlp_bias", False)),
        layer_windows=windows,
        encoder=encoder,
        latent=latent,
        experts=read_experts(raw),
        delta=read_delta(raw),
        conv=read_conv(raw),
        mamba=read_mamba(raw),
        recurrent_layers=tuple(layer for layer, kind in enumerate(layer_types) if kind == LINEAR),
        feed_forward_layers=tuple(layer for layer, kind in enumerate(layer_types) if kind in FEED_FORWARD),
        quantization=quantization,
        attn_logit_softcapping=read_soft_cap(raw, "attn_logit_softcapping"),
        has_attention_sinks=raw["model_type"] == "gpt_oss",
        window_rope=ropes.window_rope,
        unrotated_layers=ropes.unrotated_layers,
        rotary_factor=ropes.rotary_factor,
        activation=read_activation(raw) if encoder is None or encoder.has_gated_layers else SILU,
        multipliers=read_multipliers(raw, ropes.rope.scaling),
        full_heads=full_heads,
        kv_sources=read_kv_sources(raw, layer_types),
        has_keys_as_values=bool(raw.get("attention_k_eq_v", False)),
        has_wide_readers=bool(raw.get("use_double_wide_mlp", False)),
        per_layer_inputs=read_per_layer_inputs(raw),
    )


def _check_heads(path: Path, sizes: Sequence[int], rotary_factor: float) -> None:
    """Raises ConfigError for heads that no kernel computes."""
    for size in sizes:
        if size % _HEAD_STEP or size > _LARGEST_HEAD or int(size * rotary_factor) not in range(2, size + 1, 2):
            raise ConfigError(
                f"{path} has heads of {size} dimensions, {rotary_factor:g} of them rotated (the rotary factor): the "
                f"size must be a multiple of {_HEAD_STEP} up to {_LARGEST_HEAD}, and the rotated part an even number"
            )


def _stored_dtype(raw: Mapping[str, Any], quantization: QuantizationConfig | None) -> str:
    """Returns the checkpoint's dtype; that of quantized weights is bfloat16, though GPTQ and AWQ name float16 and
    gpt-oss names none.

    A GGUF file has been asked what its numbers are.
    """
    stored = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    is_rounded = quantization is not None and quantization.method != GGUF
    return "bfloat16" if is_rounded else stored


def _resolve_dtype(asked: str, stored: str) -> str:
    name = stored if asked == "auto" else asked
    name = name.removeprefix("torch.")
    name = _DTYPE_ALIASES.get(name, name)
    if name not in DTYPES:
        raise ConfigError(f"dtype must be auto, {', '.join(DTYPES)}, got {name!r}")
    return name


def _read_epsilon(raw: Mapping[str, Any], encoder: EncoderConfig | None) -> float:
    """Returns the epsilon of the norms, which families spell differently."""
    if encoder is not None:
        return encoder.layer_norm_eps
    names = (name for name in ("layer_norm_eps", "norm_eps") if raw.get("rms_norm_eps") is None)
    return read_number(raw, next((name for name in names if raw.get(name) is not None), "rms_norm_eps"), 1e-6)

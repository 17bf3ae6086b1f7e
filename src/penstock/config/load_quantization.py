"""How weights, and inputs of layers, are rounded when they are not stored so: the arguments of ROUNDINGS."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from penstock.config.model import ModelConfig
from penstock.utils.errors import ConfigError

INT4, INT8 = "int4", "int8"
ROUNDINGS = {"quantization": (INT8, INT4), "quantize_head": (INT8,), "quantize_activations": (INT8,)}
"""The arguments that round weights and activations, and their values."""
_BITS_OF = {None: 0, INT4: 4, INT8: 8}
LOADED_GROUP = 32
"""Inputs that share a scale in weights that are quantized when they are read."""


@dataclass(frozen=True, slots=True)
class LoadQuantization:
    """The bits of weights that are quantized when they are read, if the checkpoint's are not; 0 for as they are. With
    `activations` the inputs of layers with quantized weights are rounded to 8 bits, where these are integers.
    """

    layers: int = 0
    head: int = 0
    activations: bool = False

    @classmethod
    def of(cls, arguments: Mapping[str, str | None], model: ModelConfig, device: str) -> LoadQuantization:
        """Reads the arguments ROUNDINGS. Raises ConfigError if one is not for this model or device."""
        for name, value in arguments.items():
            if value is not None and (model.dtype != "bfloat16" or device == "cuda"):
                raise ConfigError(f"{name}={value} needs a CPU and bfloat16: set device cpu and dtype bfloat16")
        layers, head, activations = (_BITS_OF[arguments[name]] for name in ROUNDINGS)
        stored = model.quantization
        if activations and not (layers or head or (stored is not None and stored.has_integers)):
            weights = "not quantized: set quantization" if stored is None else "8-bit floats: use another checkpoint"
            raise ConfigError(
                f"quantize_activations={INT8} needs weights in integers, and those of {model.path} are {weights}, or "
                "leave it out"
            )
        return cls(layers, head, activations > 0)

    def for_head(self) -> LoadQuantization:
        """Returns what the output head gets in the place of the other layers."""
        return replace(self, layers=self.head)


AS_STORED = LoadQuantization()

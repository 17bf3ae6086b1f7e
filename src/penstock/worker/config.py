"""From the arguments to the configuration of this machine's device."""

from __future__ import annotations

import torch

from penstock.config.engine import EngineArgs, EngineConfig, resolve
from penstock.config.model_path import localise
from penstock.utils.errors import ConfigError


def make_config(args: EngineArgs) -> EngineConfig:
    """Finds the model files, chooses the device and resolves the arguments. Raises ConfigError."""
    device = args.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda, but torch sees no CUDA device: use device=cpu or auto")
    return resolve(localise(args), device)

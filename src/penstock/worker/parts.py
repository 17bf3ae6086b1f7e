"""Chooses a worker's device; the only module that does."""

from __future__ import annotations

import torch

from penstock.config.engine import EngineArgs, EngineConfig, resolve
from penstock.config.model_path import localise
from penstock.kernels.dispatch import has_gpu_kernels
from penstock.runner.cpu.parts import cpu_parts
from penstock.runner.parts import DeviceParts
from penstock.utils.errors import ConfigError


def make_config(args: EngineArgs) -> EngineConfig:
    """Finds the model files, chooses the device and resolves the arguments. Raises ConfigError."""
    return resolve(localise(args), choose_device(args.device))


def choose_device(asked: str) -> str:
    """Returns "cpu" or "cuda" for the argument `device`. Raises ConfigError if there is no such device."""
    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if asked == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda, but torch sees no CUDA device: use device=cpu or auto")
    return asked


def make_parts(device: torch.device) -> DeviceParts:
    """Returns the factories of the device's parts. A CPU with interpreted kernels is treated as a GPU."""
    if not has_gpu_kernels(device):
        return cpu_parts()
    # Imported here: a CPU needs no Triton.
    from penstock.runner.gpu.parts import gpu_parts

    return gpu_parts(device)

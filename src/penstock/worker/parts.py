"""Chooses a worker's device; the only module that does."""

from __future__ import annotations

import torch

from penstock.config.engine import EngineConfig
from penstock.kernels.dispatch import has_gpu_kernels
from penstock.runner.cpu.parts import cpu_parts
from penstock.runner.parts import DeviceParts
from penstock.utils.errors import ConfigError


def choose_device(config: EngineConfig) -> EngineConfig:
    """Returns the configuration for the device that it asks for. Raises ConfigError if there is no such device."""
    has_cuda = config.device != "cpu" and torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise ConfigError("device=cuda, but torch sees no CUDA device: use device=cpu or auto")
    return config.on_device("cuda" if has_cuda else "cpu")


def make_parts(device: torch.device) -> DeviceParts:
    """Returns the factories of the device's parts. A CPU with interpreted kernels is treated as a GPU."""
    if not has_gpu_kernels(device):
        return cpu_parts()
    # Imported here: a CPU needs no Triton.
    from penstock.runner.gpu.parts import gpu_parts

    return gpu_parts(device)

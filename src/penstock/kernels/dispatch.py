"""Chooses the implementation for the wrappers of this folder by a tensor's device: native on a CPU, Triton on a GPU.

With `PENSTOCK_CPU_ISA=triton` a CPU runs the Triton kernels in Triton's interpreter: slow, but it allows testing the
GPU's code path without a GPU.
"""

from __future__ import annotations

import functools
import importlib.util
from types import ModuleType

import torch

from penstock.config import env
from penstock.utils.errors import ConfigError

INTERPRETED = "triton"


def uses_triton(tensor: torch.Tensor) -> bool:
    """Like `has_gpu_kernels`, for the tensor's device."""
    return not tensor.is_cpu or is_interpreted()


def has_gpu_kernels(device: torch.device) -> bool:
    """Whether the device uses the Triton kernels."""
    return device.type != "cpu" or is_interpreted()


@functools.cache
def triton_module(name: str) -> ModuleType:
    """Imports the module `name` of `penstock.kernels.triton`, which a CPU does not need."""
    return importlib.import_module(f"penstock.kernels.triton.{name}")


@functools.cache
def is_interpreted() -> bool:
    """Whether this process treats a CPU as a GPU. Raises ConfigError if that is configured but impossible."""
    if env.cpu_isa() != INTERPRETED:
        return False
    if importlib.util.find_spec("triton") is None or not importlib.import_module("triton").knobs.runtime.interpret:
        raise ConfigError("PENSTOCK_CPU_ISA=triton needs Triton (pip install triton) and TRITON_INTERPRET=1 beside it")
    return True

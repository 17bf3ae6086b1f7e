"""Which implementation the wrappers of this folder take: by a tensor's device, native on a CPU and Triton on a GPU.

`PENSTOCK_CPU_ISA=triton` takes Triton's kernels on a CPU too, where they run in Triton's interpreter: slow, and the way
to try the path of a GPU without one.
"""

from __future__ import annotations

import functools
import importlib.util

import torch

from penstock.config import env
from penstock.utils.errors import ConfigError

INTERPRETED = "triton"


def uses_triton(tensor: torch.Tensor) -> bool:
    """As `has_gpu_kernels`, of the tensor's device."""
    return not tensor.is_cpu or is_interpreted()


def has_gpu_kernels(device: torch.device) -> bool:
    """Whether what runs on the device runs by Triton's kernels."""
    return device.type != "cpu" or is_interpreted()


@functools.cache
def is_interpreted() -> bool:
    """Whether a CPU stands in for a GPU in this process. Raises ConfigError where it is asked to and cannot."""
    if env.cpu_isa() != INTERPRETED:
        return False
    if importlib.util.find_spec("triton") is None or not importlib.import_module("triton").knobs.runtime.interpret:
        raise ConfigError("PENSTOCK_CPU_ISA=triton needs Triton (pip install triton) and TRITON_INTERPRET=1 beside it")
    return True

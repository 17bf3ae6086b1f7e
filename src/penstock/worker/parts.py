"""Which device a worker has: the one place that asks."""

from __future__ import annotations

import torch

from penstock.kernels.dispatch import has_gpu_kernels
from penstock.runner.cpu.parts import cpu_parts
from penstock.runner.parts import DeviceParts


def make_parts(device: torch.device) -> DeviceParts:
    """The makers of the device's parts. A CPU whose kernels are interpreted stands in for a GPU and gets a GPU's."""
    if not has_gpu_kernels(device):
        return cpu_parts()
    # Only now: a CPU needs no Triton.
    from penstock.runner.gpu.parts import gpu_parts

    return gpu_parts(device)

"""Optional features of GPUs that kernels may use."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

_HOPPER = 90  # compute capability 9.0


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Both came with compute capability 9.0."""

    tma: bool = False  # descriptors of tensors, read by the tensor memory accelerator
    pdl: bool = False  # programmatic dependent launch

    @classmethod
    def of(cls, device: torch.device) -> Capabilities:
        # Triton's target, because a kernel may be compiled without its device.
        is_new = device.type != "cpu" and triton.runtime.driver.active.get_current_target().arch >= _HOPPER
        return cls(is_new, is_new)

    @property
    def options(self) -> dict[str, bool]:
        """Launch options of kernels that wait for their inputs themselves."""
        return {"launch_pdl": True} if self.pdl else {}

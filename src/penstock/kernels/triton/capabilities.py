"""What kernels may use of a GPU beyond what all have."""

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
        # Triton's word for it, because a kernel may be compiled where its device is not.
        is_new = device.type != "cpu" and triton.runtime.driver.active.get_current_target().arch >= _HOPPER
        return cls(is_new, is_new)

    @property
    def options(self) -> dict[str, bool]:
        """Of every launch of a kernel that waits for its inputs itself."""
        return {"launch_pdl": True} if self.pdl else {}

"""What kernels may use of a GPU beyond what all have."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Both came with compute capability 9.0."""

    tma: bool = False  # descriptors of tensors, read by the tensor memory accelerator
    pdl: bool = False  # programmatic dependent launch

    @classmethod
    def of(cls, device: torch.device) -> Capabilities:
        is_new = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
        return cls(is_new, is_new)

    @property
    def options(self) -> dict[str, bool]:
        """Of every launch of a kernel that waits for its inputs itself."""
        return {"launch_pdl": True} if self.pdl else {}

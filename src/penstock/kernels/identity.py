"""Names the kernels of this process: KV is only shared between processes whose kernels have the same name.

A name has to differ whenever the last bits of a result may. Native kernels are identified by the digest of their
library, which its sources, the compiler and its options determine, and not the folder or the time of the build: hosts
that build the same release with the same compiler have the same name, as do hosts with the same wheel. Torch's results
depend on more than its version: on the instruction set that it selects, and on the settings and the processor by which
its libraries select theirs (`MKL_CBWR`, for example). So its name contains the digest of the results of a few
operations, as they are computed here.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import torch
import torch.nn.functional as F

from penstock.kernels import native
from penstock.utils.digest import digest

_DIGEST_BYTES = 6
_TRITON_SOURCES = Path(__file__).with_name("triton")


def cpu_kernels() -> str:
    """Names the native kernels, or torch's if this process computes with the references."""
    library = native.library()
    if library is not None:
        return f"{library.isa} {_name(library.path.read_bytes())}"
    return f"torch {torch.__version__} {torch.backends.cpu.get_cpu_capability()} {_name(*_sample())}"


def triton_kernels() -> str:
    """Names Penstock's kernels in Triton, and the release of Triton that compiles them."""
    files = sorted(_TRITON_SOURCES.rglob("*.py"))
    sources = _name(*(part for file in files for part in (file.name.encode(), file.read_bytes())))
    return f"triton {importlib.import_module('triton').__version__} {sources}"


def _name(*parts: bytes) -> str:
    return digest(*parts)[:_DIGEST_BYTES].hex()


def _sample() -> list[bytes]:
    """Returns the bytes that torch's operations compute, on sizes that are no multiple of a vector's."""
    results: list[torch.Tensor] = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        rows, weight = _numbers(16, 1031).to(dtype), _numbers(67, 1031).to(dtype)
        results += [F.linear(rows, weight), F.linear(rows[:1], weight), F.silu(rows), torch.softmax(rows.float(), -1)]
    return [result.view(torch.uint8).numpy().tobytes() for result in results]


def _numbers(num_rows: int, num_columns: int) -> torch.Tensor:
    """Returns numbers between -2 and 2 without a pattern, by integer arithmetic, which is the same everywhere."""
    numbers = torch.arange(num_rows * num_columns) * 2654435761 % (1 << 32)
    return (numbers / (1 << 30) - 2).view(num_rows, num_columns)

"""Names the kernels of this process: KV is only shared between processes whose kernels have the same name.

A name has to differ whenever the last bits of a result may. Native kernels are identified by their arithmetic and the
digest of their sources, not by the instruction set: sets of one arithmetic compute the same bits, whichever compiler
and processor they are for (`native.ARITHMETIC`). Beside them, models compute only the angles of rotary embeddings by
torch, so the name contains the digest of a sample of these. Torch's results depend on more than its version: on the
instruction set that it selects, and on the settings and the processor by which its libraries select theirs
(`MKL_CBWR`, for example). So the name of its kernels contains the digest of the results of a few operations, as they
are computed here.
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
        return f"{library.arithmetic} {_name(library.sources, *_bytes(_angles()))}"
    return f"torch {torch.__version__} {torch.backends.cpu.get_cpu_capability()} {_name(*_bytes(_sample()))}"


def triton_kernels() -> str:
    """Names Penstock's kernels in Triton, and the release of Triton that compiles them."""
    files = sorted(_TRITON_SOURCES.rglob("*.py"))
    sources = _name(*(part for file in files for part in (file.name.encode(), file.read_bytes())))
    return f"triton {importlib.import_module('triton').__version__} {sources}"


def _name(*parts: bytes) -> str:
    return digest(*parts)[:_DIGEST_BYTES].hex()


def _bytes(results: list[torch.Tensor]) -> list[bytes]:
    return [result.view(torch.uint8).numpy().tobytes() for result in results]


def _angles() -> list[torch.Tensor]:
    """Returns what torch computes of rotary embeddings (`layers/rotary.py`), on calls as short as there."""
    angles = _numbers(16, 2048)
    bases = [base ** (torch.arange(64, dtype=torch.float32) / 64) for base in (1e4, 1e6)]
    # Large angles are reduced in another way than small ones.
    scaled = [angles * 1000, angles * 60_000]
    return [*bases, *(row.cos() for each in scaled for row in each), *(row.sin() for each in scaled for row in each)]


def _sample() -> list[torch.Tensor]:
    """Returns what torch's operations compute, on sizes that are no multiple of a vector's."""
    results: list[torch.Tensor] = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        rows, weight = _numbers(16, 1031).to(dtype), _numbers(67, 1031).to(dtype)
        results += [F.linear(rows, weight), F.linear(rows[:1], weight), F.silu(rows), torch.softmax(rows.float(), -1)]
    return results


def _numbers(num_rows: int, num_columns: int) -> torch.Tensor:
    """Returns numbers between -2 and 2 without a pattern, by integer arithmetic, which is the same everywhere."""
    numbers = torch.arange(num_rows * num_columns) * 2654435761 % (1 << 32)
    return (numbers / (1 << 30) - 2).view(num_rows, num_columns)

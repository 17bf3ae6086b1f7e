"""Every environment variable that Penstock reads: this is the only file that touches `os.environ`.

PENSTOCK_CPU_ISA     force a CPU instruction set: amx, avx512_bf16, avx512, avx2, neon_bf16, neon, generic, torch for
                     the reference kernels, or triton for the GPU kernels in Triton's interpreter
PENSTOCK_LOG_LEVEL   DEBUG, INFO, WARNING (default) or ERROR
PENSTOCK_API_KEY     keys that `penstock serve` requires of its clients, separated by commas; `penstock chat --url`
                     and `penstock audit` send the first
PENSTOCK_ADMIN_API_KEY
                     keys for the administration port, separated by commas
PENSTOCK_DEBUG       1 poisons KV blocks, checks the integrity of all derived state after every step, and encodes and
                     decodes every message between the engine core and a worker in the same process
RAY_ADDRESS          the Ray cluster for distributed_executor_backend=ray; Ray reads it itself
CUDA_VISIBLE_DEVICES the GPUs that engines and ranks divide among them; CUDA reads it itself
XDG_CACHE_HOME       where the metadata of GGUF files is unpacked, in penstock/gguf; by default ~/.cache
GOMP_SPINCOUNT       how long torch's OpenMP threads spin before they sleep; Penstock sets it unless it is set
THP_MEM_ALLOC_ENABLE 1 has torch ask for huge pages for large tensors; Penstock sets it unless it is set
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

NAMES = (
    "PENSTOCK_CPU_ISA", "PENSTOCK_LOG_LEVEL", "PENSTOCK_DEBUG", "PENSTOCK_API_KEY", "PENSTOCK_ADMIN_API_KEY",
    "GOMP_SPINCOUNT", "THP_MEM_ALLOC_ENABLE", "RAY_ADDRESS", "CUDA_VISIBLE_DEVICES", "XDG_CACHE_HOME",
)  # fmt: skip

# Short enough that a thread waiting for a descheduled one sleeps and frees its core; long enough to stay awake from one
# kernel to the next. On two busy cores a step of the 0.6B shape took 130 ms instead of 380 to 900, and on idle ones the
# same (bench/kernels/linear.py).
_SPIN_COUNT = "10000"


def cpu_isa() -> str | None:
    return os.environ.get("PENSTOCK_CPU_ISA") or None


def log_level() -> str:
    return os.environ.get("PENSTOCK_LOG_LEVEL", "WARNING").upper()


def debug() -> bool:
    return os.environ.get("PENSTOCK_DEBUG", "0") not in ("", "0")


def api_keys() -> tuple[str, ...]:
    return _keys("PENSTOCK_API_KEY")


def admin_api_keys() -> tuple[str, ...]:
    return _keys("PENSTOCK_ADMIN_API_KEY")


def ray_address() -> str | None:
    return os.environ.get("RAY_ADDRESS") or None


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"


def visible_gpus() -> str | None:
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def for_child(own: Mapping[str, str] | None = None, defaults: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns a child process's environment: this one's, overridden by `own`, and `defaults` for unset variables."""
    return {**(defaults or {}), **os.environ, **(own or {})}


def for_ranks() -> dict[str, str]:
    """Returns the variables that ranks on other hosts need, too."""
    names = ("PENSTOCK_CPU_ISA", "PENSTOCK_LOG_LEVEL", "PENSTOCK_DEBUG")
    return {name: os.environ[name] for name in names if name in os.environ}


def _keys(name: str) -> tuple[str, ...]:
    keys = os.environ.get(name, "").split(",")
    return tuple(key.strip() for key in keys if key.strip())


def set_torch_defaults() -> None:
    """Takes effect only before torch is loaded, so it is called when the package is imported."""
    os.environ.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

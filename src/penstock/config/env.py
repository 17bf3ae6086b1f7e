"""Every environment variable that Penstock reads: this is the only file that touches `os.environ`.

PENSTOCK_CPU_ISA     force a CPU instruction set: amx, avx512, avx2, generic, or torch for the reference kernels
PENSTOCK_LOG_LEVEL   DEBUG, INFO, WARNING (default) or ERROR
PENSTOCK_DEBUG       1 poisons KV blocks and checks the integrity of all derived state after every step
"""

from __future__ import annotations

import os

NAMES = ("PENSTOCK_CPU_ISA", "PENSTOCK_LOG_LEVEL", "PENSTOCK_DEBUG")


def cpu_isa() -> str | None:
    return os.environ.get("PENSTOCK_CPU_ISA") or None


def log_level() -> str:
    return os.environ.get("PENSTOCK_LOG_LEVEL", "WARNING").upper()


def debug() -> bool:
    return os.environ.get("PENSTOCK_DEBUG", "0") not in ("", "0")

"""Finds out what Triton would compile for a series of launches, without a GPU, a launch or a compilation.

    variants = variants_of("tests.kernels.test_triton_specialization", "steps")

A generator of that module launches kernels between its yields. The result has, for each yield, the names of the kernels
of which the launches before it requested a variant for the first time.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from typing import Any


def variants_of(module: str, generator: str) -> list[list[str]]:
    """Runs in a separate process: where TRITON_INTERPRET is set, launches run in the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", __spec__.name, module, generator]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


class _NoDriver:
    """The part of a GPU driver that Triton needs to choose a variant."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def _record(module: str, generator: str) -> list[list[str]]:
    import triton
    from triton.runtime import driver

    known: set[str] = set()
    fresh: list[str] = []

    def hook(*, key: str, fn: Any, **_: Any) -> bool:
        variant = f"{fn.name} {key}"
        if variant not in known:
            known.add(variant)
            fresh.append(fn.name.rpartition(".")[2])
        return True  # neither compile nor launch

    driver.set_active(_NoDriver())
    triton.knobs.runtime.jit_cache_hook = hook
    found: list[list[str]] = []
    for _ in getattr(importlib.import_module(module), generator)():
        found.append(list(fresh))
        fresh.clear()
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_record(*sys.argv[1:])))

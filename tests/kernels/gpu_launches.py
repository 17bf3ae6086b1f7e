"""Runs launchers for a GPU that is not present, on CPU tensors: every launch is bound and compiled, none is run.

    launches = launches_of("tests.kernels.test_something", "function")

This shows what the compiler alone cannot: whether a launcher's arguments fit its kernel's parameters, and how often a
launch compiles. It runs in a separate process, like `gpu_compiler`.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Any

_ARCHITECTURE = 90


@dataclass(frozen=True)
class Launch:
    kernel: str
    grid: tuple[int, ...]
    is_early: bool  # launched while the kernel before it runs
    is_new: bool  # no earlier launch used the same compiled kernel


def launches_of(module: str, function: str) -> list[Launch]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", __spec__.name, module, function]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    return [Launch(**{**launch, "grid": tuple(launch["grid"])}) for launch in found]


class _Driver:
    """The driver interface that Triton needs before it launches a kernel."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", _ARCHITECTURE, 32)


def _record(module: str, function: str) -> list[Launch]:
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    driver.set_active(_Driver())
    found: list[Launch] = []
    seen: set[int] = set()
    bind_and_compile = JITFunction.run

    def run(self: Any, *args: Any, grid: tuple[int, ...], warmup: bool, **kwargs: Any) -> Any:
        compiled = bind_and_compile(self, *args, grid=grid, warmup=True, **kwargs)
        is_new = id(compiled) not in seen
        seen.add(id(compiled))
        found.append(Launch(self.fn.__name__, tuple(grid), bool(compiled.metadata.launch_pdl), is_new))
        return compiled

    JITFunction.run = run
    getattr(importlib.import_module(module), function)()
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps([asdict(launch) for launch in _record(*sys.argv[1:])]))

"""Compiles the kernels of a program before it launches them, in other processes and without a GPU.

Triton compiles a kernel at its first launch, which takes about a second, and keeps the result on disk, under a name
derived from the source, the arguments' types and the target. A process that executes the program inside a `dry_run`, on
tensors of torch's meta device, requests the same variants, so no list of them is needed: launchers run unchanged,
launches do not happen, and tensors have no memory.

Several processes may do the same in parallel: each variant is compiled by the process that claims it first.
"""

from __future__ import annotations

import contextlib
import hashlib
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver
from triton.runtime.jit import JITFunction

_WARP_SIZE = 32
_DEVICE = 0
_ELSEWHERE = object()  # a kernel that another process compiles
_ATEN = torch.ops.aten

Wants = Callable[[str], bool]
"""Whether this process compiles a variant, asked once for each; the name identifies the variant."""


def claim_in(folder: Path) -> Wants:
    """For processes that share an empty folder: returns True in exactly one of them."""

    def claim(variant: str) -> bool:
        try:
            (folder / hashlib.sha256(variant.encode()).hexdigest()).mkdir()
        except FileExistsError:
            return False
        return True

    return claim


@contextlib.contextmanager
def dry_run(capability: int, wants: Wants) -> Iterator[None]:
    """For a process that uses Triton for nothing else. `capability` is the target's, 90 for 9.0."""
    assert not knobs.runtime.interpret, "kernels that are interpreted have nothing to compile"
    done: set[Any] = {None, _ELSEWHERE}

    def skips(*, key: str, fn: Any, **_: Any) -> bool:
        if wants(f"{fn.name} {key}"):
            return False
        # Recorded as compiled, so that it is requested once.
        kernels, *_rest = fn.jit_function.device_caches[_DEVICE]
        kernels[key] = _ELSEWHERE
        return True

    bind_and_compile = JITFunction.run

    def run(self: JITFunction, *args: Any, grid: object, warmup: bool, **kwargs: Any) -> Any:
        kernel = bind_and_compile(self, *args, grid=grid, warmup=True, **kwargs)
        if kernel not in done:
            done.add(kernel)
            _build_launcher(kernel)
        return kernel

    driver.set_active(cast(DriverBase, _TargetAlone(capability)))
    knobs.runtime.jit_cache_hook = skips
    JITFunction.run = run
    try:
        with _NoData():
            yield
    finally:
        JITFunction.run = bind_and_compile
        knobs.runtime.jit_cache_hook = None


def _build_launcher(kernel: Any) -> None:
    """Builds the C module that launches kernels with such arguments, which a first launch would build too.

    Triton 3.7 has one module for all kernels, which is part of its driver.
    """
    from triton.backends.nvidia import driver as nvidia

    if not hasattr(nvidia, "make_launcher"):
        return
    # It links to the driver's library, which may be missing. A failed module is built at the first launch.
    with contextlib.suppress(AssertionError, RuntimeError, OSError, ImportError, subprocess.SubprocessError):
        nvidia.CudaLauncher(kernel.src, kernel.metadata)


class _TargetAlone:
    """The part of a GPU's driver that is needed to choose a variant and compile it."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, _WARP_SIZE)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return _DEVICE

    def get_current_stream(self, device: int) -> int:
        return 0


class _NoData(TorchDispatchMode):
    """Reads of a tensor without memory return ones: valid tokens, and no count of 0."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        answer = _ANSWERS.get(func.overloadpacket)
        found = answer(*args, **kwargs) if answer is not None else None
        return func(*args, **kwargs) if found is None else found

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch's compiler need not skip this mode."""
        return False


def _moved(source: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor | None:
    given = [*args, *kwargs.values()]
    device = next((each for each in given if isinstance(each, torch.device)), source.device)
    if not source.is_meta or device.type == "meta":
        return None
    dtype = next((each for each in given if isinstance(each, torch.dtype)), source.dtype)
    return torch.ones(source.shape, dtype=dtype, device=device)


def _copied(out: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor | None:
    return out.fill_(1) if source.is_meta and not out.is_meta else None


def _scalar(source: torch.Tensor) -> bool | int | float | None:
    return torch.ones((), dtype=source.dtype).item() if source.is_meta else None


def _nonzero(source: torch.Tensor) -> torch.Tensor | None:
    return source.new_empty((0, source.dim()), dtype=torch.int64) if source.is_meta else None


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool | None:
    return True if one.is_meta or other.is_meta else None


def _unique(source: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...] | None:
    """Treats all elements as different."""
    return (torch.arange(source.numel()),) * 3 if source.is_meta else None


# Some appear as one operation in inference mode, and as several otherwise.
_ANSWERS: dict[Any, Callable[..., Any]] = {
    _ATEN.to: _moved,
    _ATEN._to_copy: _moved,
    _ATEN.copy_: _copied,
    _ATEN._local_scalar_dense: _scalar,
    _ATEN.item: _scalar,
    _ATEN.is_nonzero: _scalar,
    _ATEN.nonzero: _nonzero,
    _ATEN.equal: _equal,
    _ATEN._unique2: _unique,
}

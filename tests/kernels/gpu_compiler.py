"""Compiles Triton kernels for a GPU that is not present, which shows what the interpreter cannot.

    cost = compile_for_gpu("penstock.kernels.triton.rms_norm", "_rms_norm", {"x": "*bf16", "rows": "i32"}, {"H": 1024})

It runs in a separate process: where TRITON_INTERPRET is set, kernels are functions without anything to compile. One
process serves all calls, as importing torch and Triton takes longer than compiling most kernels.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_ARCHITECTURE = 90


@dataclass(frozen=True)
class KernelCost:
    registers: int  # per thread
    spilled_bytes: int  # per thread
    shared_bytes: int  # per program
    ptx: str


def compile_for_gpu(
    module: str, kernel: str, signature: Mapping[str, str], constexprs: Mapping[str, Any], **options: Any
) -> KernelCost:
    """Compiles for an NVIDIA H100 or H200. `signature` has Triton's type names of all parameters but `constexprs`;
    pointers and integers count as divisible by 16 where their type ends in ":16". `options`: num_warps, ..."""
    job = json.dumps([module, kernel, dict(signature), dict(constexprs), options])
    process = _start_compiler()
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(job + "\n")
    process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        _start_compiler.cache_clear()
    assert line, f"the compiler ended with code {process.wait()}"
    answer = json.loads(line)
    assert "error" not in answer, answer["error"][-4000:]
    return KernelCost(**answer)


@functools.cache
def _start_compiler() -> subprocess.Popen[str]:
    """Returns the process of `_serve`, which ends with this one."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", __spec__.name]
    process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(process.communicate)  # closes its input and waits for it
    return process


def _serve() -> None:
    """Compiles a job for each line of the standard input, and writes a line for each."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed is no answer
    for job in sys.stdin:
        try:
            answer = asdict(_compile(*json.loads(job)))
        except Exception:  # noqa: BLE001 - the test that asked for it reports it
            answer = {"error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _compile(
    module: str, kernel: str, signature: dict[str, str], constexprs: dict[str, Any], options: dict[str, Any]
) -> KernelCost:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(importlib.import_module(module), kernel)
    names = list(function.arg_names)
    is_aligned = {(names.index(name),): [["tt.divisibility", 16]] for name, kind in signature.items() if ":16" in kind}
    types = {name: signature[name].removesuffix(":16") if name in signature else "constexpr" for name in names}
    source = ASTSource(fn=function, signature=types, constexprs=constexprs, attrs=is_aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", _ARCHITECTURE, 32), options=options)
    assembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(compiled.asm["ptx"])
        file.flush()
        command = [assembler, "-v", f"--gpu-name=sm_{_ARCHITECTURE}a", file.name, "-o", os.devnull]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spilled = re.search(r"(\d+) bytes spill stores", report)
    registers = re.search(r"Used (\d+) registers", report)
    assert spilled is not None, report
    assert registers is not None, report
    return KernelCost(int(registers[1]), int(spilled[1]), compiled.metadata.shared, compiled.asm["ptx"])


if __name__ == "__main__":
    _serve()

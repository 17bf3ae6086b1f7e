"""Runs a command on a GPU that computes nothing: shows the host's cost per step, and checks its CUDA calls.

    python bench/null_gpu.py --report -- python bench/gpu.py --output host.jsonl --only decode
    python bench/null_gpu.py --kernel-us 3 --node-us 2 -- python my_script.py

torch must be a CUDA build, and the machine must have no GPU. bench/null_gpu/*.c is compiled once and preloaded in place
of CUDA's runtime, driver and cuBLAS: memory is the host's, kernels do nothing, a stream has a clock that work advances
by the times given here, and illegal operations (above all while a stream is captured) are refused with CUDA's error and
reported on stderr. Torch, Triton and its compiler are the real ones. `python` as the command's first word is the one
that runs this file.

The command's results are the present content of memory: usually zeros. CUDA's own calls cost next to nothing here and a
few microseconds each on a machine with a GPU.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent / "null_gpu"
LIBRARY = "libcuda.so.1"  # the name under which Triton opens the driver
WARNINGS = ("-Wall", "-Wextra", "-Wno-unused-parameter")
FLAGS = ("-std=gnu11", "-O2", "-shared", "-fPIC", *WARNINGS, f"-Wl,-soname,{LIBRARY}")
LIBRARIES = ("-ldl", "-lpthread")

PROBE = """
import json, torch
print(json.dumps([torch.__version__, torch.version.cuda, torch.cuda.device_count()]))
"""


class CannotRunError(Exception):
    """A missing or conflicting requirement, described for the user of the command."""


@dataclass(frozen=True)
class Headers:
    folders: tuple[Path, ...]  # in the compiler's search order
    version: str  # of CUDA: 13.0


def main() -> None:
    args = parse_arguments()
    try:
        torch_version, cuda_version = look_at_torch()
        headers = find_headers(int(cuda_version.split(".")[0]))
        library = build(headers, cache_folder())
    except CannotRunError as error:
        sys.exit(f"null_gpu.py: {error}")
    times = f"kernels take {args.kernel_us:g} us, nodes of graphs {args.node_us:g} us"
    print(f"null GPU for torch {torch_version}, built with CUDA {headers.version}'s headers: {times}", file=sys.stderr)
    command = list(args.command)
    if command[0] in ("python", "python3"):
        command[0] = sys.executable
    try:
        os.execvpe(command[0], command, environment(args, library))
    except OSError as error:
        sys.exit(f"null_gpu.py: {command[0]} cannot be run: {error.strerror}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel-us", type=float, default=0.0, help="time of a kernel, copy or fill in a stream")
    parser.add_argument("--node-us", type=float, default=0.0, help="time of a node of a graph")
    parser.add_argument("--copy-gb-s", type=float, default=0.0, help="between host and device (default: no time)")
    parser.add_argument("--memory-gib", type=float, default=139.0, help="of the device (default: 139, an H200's)")
    parser.add_argument("--name", default="null GPU", help="name of the device")
    parser.add_argument(
        "--strict",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="report each refused call once on stderr; it is refused in any case",
    )
    parser.add_argument("--report", action="store_true", help="report launches and waits when a process ends")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command, after --")
    args = parser.parse_args()
    args.command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not args.command:
        parser.error("no command is given: put it after --")
    if min(args.kernel_us, args.node_us, args.copy_gb_s) < 0 or args.memory_gib <= 0:
        parser.error("times and bandwidth must not be negative, memory must be positive")
    return args


def look_at_torch() -> tuple[str, str]:
    """Returns the versions of torch and of its CUDA, read in another process, because the command replaces this one."""
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"it ended with {done.returncode}"]
        raise CannotRunError(f"{sys.executable} cannot import torch: {last[0]}")
    version, cuda, num_gpus = json.loads(done.stdout.splitlines()[-1])
    if not cuda:
        raise CannotRunError(
            f"torch {version} is not a CUDA build, and only those call CUDA: "
            "install one in a separate virtual environment, which needs no GPU"
        )
    if num_gpus or list(Path("/dev").glob("nvidia[0-9]*")):
        raise CannotRunError("a GPU is visible here: measure that one; the null GPU is for machines without one")
    return version, cuda


def find_headers(major: int) -> Headers:
    """Returns headers of torch's CUDA: those of its own packages, a toolkit or Triton.

    The runtime's structures and names differ between CUDA's major versions, so only the major version must be torch's.
    Triton's are always searched last: some packages lack `crt/`, which is the same in all of them.
    """
    triton = _package_folder("triton", "backends/nvidia/include")
    candidates = [
        _package_folder("nvidia", f"cu{major}/include"),
        _package_folder("nvidia", "cuda_runtime/include"),
        Path(os.environ["CUDA_HOME"]) / "include" if "CUDA_HOME" in os.environ else None,
        triton,
    ]
    found = {folder: version for folder in candidates if folder and (version := _header_version(folder))}
    for folder, version in found.items():
        if version.split(".")[0] == str(major):
            last = (triton,) if triton and triton != folder else ()
            return Headers((folder, *last), version)
    if not found:
        raise CannotRunError("there are no CUDA headers: install triton, which includes them")
    others = ", ".join(f"CUDA {version} in {folder}" for folder, version in found.items())
    raise CannotRunError(
        f"torch is built with CUDA {major}, and the headers here are of another major version: {others}. "
        f"install those of CUDA {major} with `pip install nvidia-cuda-runtime`, or set CUDA_HOME to its toolkit"
    )


def _package_folder(package: str, inside: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    places = spec.submodule_search_locations if spec else None
    folders = [Path(place) / inside for place in places or ()]
    return next((folder for folder in folders if folder.is_dir()), None)


def _header_version(folder: Path) -> str:
    """Returns `12.8`, or an empty string if the required headers are not there."""
    header = folder / "cuda_runtime_api.h"
    if not header.is_file() or not (folder / "cuda.h").is_file():
        return ""
    found = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", header.read_text(encoding="utf-8", errors="replace"))
    return f"{int(found[1]) // 1000}.{int(found[1]) % 1000 // 10}" if found else ""


def cache_folder() -> Path:
    place = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock-null-gpu"
    if re.search(r"[\s:]", str(place)):
        raise CannotRunError(f"{place}: a preloaded library's path must have no spaces or colons; set XDG_CACHE_HOME")
    return place


def build(headers: Headers, cache: Path) -> Path:
    """Returns the compiled library, in a folder that is named after all its inputs."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        raise CannotRunError("there is no C compiler (cc, gcc or clang); Triton needs one too")
    command = [compiler, *FLAGS]
    for folder in headers.folders:
        command += ["-isystem", str(folder)]
    digest = hashlib.sha256(f"{command} {LIBRARIES} {headers.version}".encode())
    sources = sorted(SOURCES.glob("*.c"))
    for source in [*sources, *sorted(SOURCES.glob("*.h"))]:
        digest.update(source.read_bytes())
    target = cache / digest.hexdigest()[:16]
    if (target / LIBRARY).exists():
        return target / LIBRARY
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as work:
            made = Path(work) / "made"
            made.mkdir()
            command += [*map(str, sources), "-o", str(made / LIBRARY), *LIBRARIES]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise CannotRunError(f"{compiler} does not compile {SOURCES}:\n{done.stderr.strip()}")
            # The name under which Triton's linker searches for it.
            (made / "libcuda.so").symlink_to(LIBRARY)
            _move_unless_there(made, target)
    except OSError as error:
        raise CannotRunError(f"{error.filename} cannot be written: {error.strerror}") from error
    return target / LIBRARY


def _move_unless_there(made: Path, target: Path) -> None:
    try:
        made.rename(target)
    except OSError:
        # Another process built the same library first.
        if not (target / LIBRARY).exists():
            raise


def environment(args: argparse.Namespace, library: Path) -> dict[str, str]:
    """Returns this process's environment, with the library before all others, and its settings."""
    preloaded = [str(library), *filter(None, [os.environ.get("LD_PRELOAD")])]
    return {
        **os.environ,
        "LD_PRELOAD": ":".join(preloaded),
        "TRITON_LIBCUDA_PATH": str(library.parent),
        "NULL_GPU_KERNEL_NS": str(round(1e3 * args.kernel_us)),
        "NULL_GPU_NODE_NS": str(round(1e3 * args.node_us)),
        "NULL_GPU_COPY_GB_S": str(args.copy_gb_s),
        "NULL_GPU_MEMORY_GIB": str(args.memory_gib),
        "NULL_GPU_NAME": args.name,
        "NULL_GPU_STRICT": str(int(args.strict)),
        "NULL_GPU_REPORT": str(int(args.report)),
    }


if __name__ == "__main__":
    main()

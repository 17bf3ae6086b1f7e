"""Measures one GPU: speed compared with goals and vLLM, start, a step's time by kernel, tokens, memory.

    python bench/gpu.py --output results.jsonl                          # everything; half an hour on an H200
    python bench/gpu.py --output results.jsonl --only decode,prefill --shapes bench/shapes/qwen3-0.6b
    python bench/gpu.py --output results.jsonl --within 9 --resume      # nine minutes, continuing from there
    python bench/gpu.py --device cpu --quick                            # the script itself, with a tiny model

Every group runs in a separate process on each shape, within a time limit, and adds its figures to --output as soon as
they are known. The table at the end shows the whole file, so that several calls make one table.

    decode          ms per step at batch 1, 8, 64       profile        microseconds by kernel, gaps, memory's floor
    prefill         16 x 2048 tokens                    tokens         the built-in model's, compared with the CPU's
    mix             256 requests of 100-1024 tokens     speculation    the built-in model with MTP, K = 3
    start           exec to first token, real files     soak           --minutes of mixed load: growth of memory
    deterministic   decode with deterministic=True      eager          decode without graphs
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SHORTEST_S = 20.0  # minimum for a group
SHAPES = Path(__file__).parent / "shapes"

# (shape, figure): the goal on an H200, and vLLM 0.26.0's best of its three runners there (docs/PERFORMANCE.md, GPU).
# vLLM's start is from the first line until its engine is ready, with random weights instead of files.
GOALS: dict[tuple[str, str], tuple[float, float]] = {
    ("qwen3-0.6b", "decode_b1"): (0.75, 1.55),
    ("qwen3-0.6b", "decode_b8"): (1.05, 1.54),
    ("qwen3-0.6b", "decode_b64"): (1.5, 2.28),
    ("qwen3-0.6b", "prefill"): (420_000, 408_000),
    ("qwen3-0.6b", "mix"): (25_500, 23_500),
    ("qwen3-8b", "decode_b1"): (4.1, 5.16),
    ("qwen3-8b", "decode_b8"): (4.6, 5.32),
    ("qwen3-8b", "decode_b64"): (5.4, 6.30),
    ("qwen3-8b", "prefill"): (42_200, 42_200),
    ("qwen3-8b", "mix"): (9_600, 9_400),
    ("qwen3-8b", "start_warm_first_token"): (15, 54),
}


@dataclass(frozen=True)
class Group:
    module: str
    limit_s: float
    has_shape: bool = True  # else it runs once, with the built-in model


# In the order of importance, because a run may end early. The limits include time for cold kernels of 8B.
GROUPS = {
    "decode": Group("speed", 240),
    "prefill": Group("speed", 240),
    "mix": Group("speed", 300),
    "profile": Group("profile", 400),
    "start": Group("start", 420),
    "tokens": Group("tokens", 400, has_shape=False),
    "deterministic": Group("speed", 300),
    "eager": Group("speed", 240),
    "speculation": Group("tokens", 240, has_shape=False),
    "soak": Group("soak", 240),  # and its minutes
}
# Figures that are shown as a multiple of another one.
BESIDE = {"deterministic_b": "decode_b", "eager_b": "decode_b"}


def main() -> int:
    args = parse_arguments()
    if args.job:
        run_job(json.loads(args.job))
        return 0
    print(f"figures go to {args.output}", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    ended = ended_groups(args.output) if args.resume else set()
    until = time.monotonic() + 60 * args.within
    failures, left_out = 0, []
    for name in args.only:
        # One shape is enough to see memory grow.
        shapes = args.shapes[:1] if name == "soak" else args.shapes
        for shape in map(str, shapes) if GROUPS[name].has_shape else [""]:
            left = until - time.monotonic()
            if (shape_name(shape), name) in ended:
                continue
            if left < _SHORTEST_S:
                left_out.append(f"{name} {shape_name(shape)}")
                continue
            error = run_group(name, shape, left, args)
            failures += bool(error)
            if error and time.monotonic() >= until:
                left_out.append(f"{name} {shape_name(shape)}")
    print(table(args.output))
    if left_out:
        print(f"{args.within:g} minutes are over; --resume continues with {', '.join(left_out)}")
    return 1 if failures else 0


def shape_name(shape: str) -> str:
    return Path(shape).name or "built-in"


def run_group(name: str, shape: str, left: float, args: argparse.Namespace) -> str:
    """Runs a group in a separate process, and records how it ends. Returns the error, if any."""
    job = {"group": name, "shape": shape, "minutes": args.minutes, "device": args.device, "quick": args.quick}
    job = {**job, "output": str(args.output), "work": str(args.work)}
    limit = args.limit or GROUPS[name].limit_s + (60 * args.minutes if name == "soak" else 0)
    limit = min(limit, left)
    label = f"{name} {shape_name(shape)}"
    started = time.monotonic()
    print(f"== {label}", flush=True)
    # With a tiny model, the threads would spend most of the time waiting for one another.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"} if args.quick else None
    command = [sys.executable, __file__, "--job", json.dumps(job)]
    process = subprocess.Popen(command, start_new_session=True, env=environment)
    try:
        code = process.wait(limit)
        error = f"ended with {code}" if code else ""
    except subprocess.TimeoutExpired:
        error = f"took longer than {limit:.0f} s"
    finally:
        # Includes the processes that it started.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    seconds = time.monotonic() - started
    print(f"== {label}: {error or 'done'} after {seconds:.0f} s", flush=True)
    line = {"shape": shape_name(shape), "group": name, "key": f"{name}_end", "error": error, "seconds": seconds}
    line["is_cut"] = bool(error) and limit == left
    with args.output.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    return error


def run_job(options: dict[str, Any]) -> None:
    # Imported here: the parent needs no torch.
    from gpu_parts.common import Job

    job = Job(**options)
    module = importlib.import_module(f"gpu_parts.{GROUPS[job.group].module}")
    getattr(module, job.group)(job)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]


def ended_groups(path: Path) -> set[tuple[str, str]]:
    """Returns (shape, group) of groups that have ended, successfully or not, unless because --within was over."""
    return {(line["shape"], line["group"]) for line in lines(path) if "error" in line and not line["is_cut"]}


def table(path: Path) -> str:
    """Returns the latest figure of each kind in the file, with its goal and vLLM's."""
    latest: dict[tuple[str, str], dict[str, Any]] = {}
    for line in lines(path):
        latest[line["shape"], line["key"]] = line
    rows = ["| shape | figure | measured | goal | vLLM | relative to vLLM | |", "|---|---|---|---|---|---|---|"]
    for (shape, key), line in latest.items():
        if "error" in line:
            if not line["error"]:
                continue
            rows.append(f"| {shape} | {line['group']} | | | | | {line['error']} |")
            continue
        value, unit = line["value"], line["unit"]
        goal, vllm, ratio = "", "", ""
        if (shape, key) in GOALS:
            goal_value, vllm_value = GOALS[shape, key]
            is_rate = unit.endswith("/s")
            is_met = value >= goal_value if is_rate else value <= goal_value
            goal, vllm = f"{goal_value:g} {'met' if is_met else 'MISSED'}", f"{vllm_value:g}"
            ratio = f"{value / vllm_value if is_rate else vllm_value / value:.2f}x"
        rows.append(f"| {shape} | {key} | {value:.5g} {unit} | {goal} | {vllm} | {ratio} | {remark(line, latest)} |")
    return "\n".join(rows)


def remark(line: dict[str, Any], latest: dict[tuple[str, str], dict[str, Any]]) -> str:
    """Returns the details of a figure that the table shows."""
    found = [line["text"]] if "text" in line else []
    for prefix, other in BESIDE.items():
        plain = latest.get((line["shape"], line["key"].replace(prefix, other)))
        if line["key"].startswith(prefix) and plain is not None:
            found.append(f"{line['value'] / plain['value']:.2f}x {plain['key']}")
    if "cpu_ms" in line:
        found.append(f"CPU {line['cpu_ms']:.3g} ms")
    if line.get("replayed"):
        found.append(f"{line['replayed']} of {line['steps']} steps from graphs" if "steps" in line else "from graphs")
    if "stages" in line:
        found.append(", ".join(f"{name} {seconds:.1f}" for name, seconds in line["stages"].items()))
    if "idle_us" in line:
        floor = f", floor {line['floor_us']:.0f}" if "floor_us" in line else ""
        found.append(f"{line['idle_us']:.0f} between kernels{floor}")
    if "tokens_per_step" in line:
        found.append(f"{line['tokens_per_step']:.2f} tokens and {line['ms_per_step']:.2f} ms a step")
    return "; ".join(found)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=Path, nargs="+", help="folders with a config.json (default: 0.6b and 8b)")
    parser.add_argument("--only", default=",".join(GROUPS), help="groups, separated by commas (default: all)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="small numbers and a tiny model, to try the script")
    parser.add_argument("--output", type=Path, default=Path("gpu.jsonl"), help="lines of JSON are added to this file")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "penstock-bench-gpu")
    parser.add_argument("--minutes", type=float, help="of the soak (default: 2, or a few seconds with --quick)")
    parser.add_argument("--limit", type=float, help="seconds for any group on any shape (default: each group's own)")
    parser.add_argument("--within", type=float, default=1e6, help="minutes after which everything stops")
    parser.add_argument("--resume", action="store_true", help="leave out groups that --output has already")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        return args
    args.only = [name.strip() for name in args.only.split(",") if name.strip()]
    if unknown := [name for name in args.only if name not in GROUPS]:
        parser.error(f"--only {','.join(unknown)}: the groups are {', '.join(GROUPS)}")
    if not args.only:
        parser.error(f"--only names no group: the groups are {', '.join(GROUPS)}")
    if args.minutes is None:
        args.minutes = 0.05 if args.quick else 2.0
    if args.minutes < 0 or args.within <= 0 or (args.limit is not None and args.limit <= 0):
        parser.error("--minutes, --within and --limit must be positive")
    if args.shapes is None:
        args.shapes = [SHAPES / name for name in (("tiny",) if args.quick else ("qwen3-0.6b", "qwen3-8b"))]
    if missing := [str(shape) for shape in args.shapes if not (shape / "config.json").is_file()]:
        parser.error(f"--shapes {' '.join(missing)}: there is no config.json")
    if importlib.util.find_spec("penstock") is None:
        parser.error("penstock cannot be imported: install it, or set PYTHONPATH=src")
    if args.device == "cuda":
        check_gpu(parser)
    try:
        args.work.mkdir(parents=True, exist_ok=True)
        args.output.touch()
    except OSError as error:
        parser.error(f"{error.filename} cannot be written: {error.strerror}")
    return args


def check_gpu(parser: argparse.ArgumentParser) -> None:
    """Checks in a separate process, so that this one uses no GPU memory."""
    code = "import torch; assert torch.cuda.is_available(); print(torch.cuda.get_device_name(), torch.__version__)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if found.returncode:
        parser.error("torch sees no CUDA device here: --device cpu --quick tries the script without one")
    print(found.stdout.strip(), flush=True)


if __name__ == "__main__":
    sys.exit(main())

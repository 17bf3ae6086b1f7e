"""Times settings of the tuning tables on a GPU: `tiles.py` and `plan.py` in `kernels/triton/linear` and `attention`.

    python bench/gpu_tune.py --minutes 9 --output tune.jsonl
    python bench/gpu_tune.py --minutes 9 --output tune.jsonl --skip 20         # continues where that ended
    python bench/gpu_tune.py --list

For each entry of the tables, the most important first, it prints the best settings and the present one, in microseconds
a launch and TB/s of weights or KV (TFLOP/s of prefill), and the errors of those whose results are not correct
(`gpu_parts/tuning.py` describes the checks). A launch is one of a chain over so many layers with separate weights or
KV that they do not fit into the GPU's caches, replayed from a CUDA graph. Kernels are compiled ahead on all cores.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

import torch
from gpu_parts.tune_attention import DecodeCell, DeterministicCell, PrefillCell
from gpu_parts.tune_linear import LinearCell, MatmulCell
from gpu_parts.tuning import Cell, CellResult, Result, compile_ahead, measure

from penstock.config.model import load_model_config
from penstock.kernels.triton.capabilities import Capabilities
from penstock.kernels.triton.linear.tiles import Role

_CELL_SECONDS = 150.0
SHAPES = Path(__file__).parent / "shapes"
_FAMILIES = (LinearCell, DecodeCell, PrefillCell, MatmulCell, DeterministicCell)
FAMILIES = dict(zip(("linear", "decode", "prefill", "matmul", "deterministic"), _FAMILIES, strict=True))


def cells() -> list[Cell]:
    """Returns the cells in the order of their importance."""
    small, large = (load_model_config(SHAPES / name) for name in ("qwen3-0.6b", "qwen3-8b"))
    found: list[Cell] = []
    found += [LinearCell.of(small, role, num_tokens) for num_tokens in (1, 16, 64) for role in Role]
    cases = ((1, 256), (8, 256), (64, 256), (256, 850), (64, 2048), (1, 2048))
    found += [DecodeCell.of(small, *case) for case in cases]
    found += [LinearCell.of(large, role, num_tokens) for num_tokens in (1, 16) for role in Role]
    found += [DecodeCell.of(large, *case) for case in ((1, 256), (8, 256), (64, 256), (256, 850))]
    found += [PrefillCell.of(model, 8, 2048, 2048) for model in (small, large)]
    found += [LinearCell.of(small, role, 32) for role in Role]
    found += [LinearCell.of(large, role, 64) for role in Role]
    # Whether blocks that TMA can load are useful, and from what size.
    found += [PrefillCell.of(small, 8, 2048, 2048, block_size) for block_size in (32, 64)]
    found += [DecodeCell.of(small, 64, 2048, 1, 64)]
    found += [MatmulCell.of(small, role, num_tokens) for num_tokens in (1, 64, 2048) for role in (Role.QKV, Role.DOWN)]
    found += [MatmulCell.of(large, Role.GATE_UP, num_tokens) for num_tokens in (1, 64, 2048)]
    found += [DeterministicCell.of(small, *case) for case in ((1, 256), (64, 256), (8, 2048, 2048))]
    return found


def main() -> None:
    args = parse_arguments()
    chosen = [cell for cell in cells() if isinstance(cell, tuple(FAMILIES[name] for name in args.only))]
    if args.list:
        print("\n".join(f"{number:3d} {cell.name}: {len(cell.candidates())}" for number, cell in enumerate(chosen)))
        return
    until = time.monotonic() + 60 * args.minutes
    capability = torch.cuda.get_device_capability()
    print(f"{torch.cuda.get_device_name()}, {len(chosen)} cells", flush=True)
    number = args.skip
    with Tuner(10 * capability[0] + capability[1], args.jobs) as tuner:
        tuner.compile(chosen[number:])
        for number in range(args.skip, len(chosen)):
            if time.monotonic() >= until:
                print(f"{args.minutes:g} minutes are over: continue with --skip {number}")
                return
            found = tuner.measure(chosen[number], until)
            print(f"[{number}] {found.table()}", flush=True)
            with args.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found.line()) + "\n")


class Tuner:
    """One process measures, and others compile. After a fault of the GPU a new process continues to measure."""

    def __init__(self, capability: int, num_jobs: int) -> None:
        self._capability = capability
        self._compilers = self._processes(num_jobs)
        self._measurer = self._processes(1)
        self._compiled: dict[str, list[Future[None]]] = {}

    def __enter__(self) -> Tuner:
        return self

    def __exit__(self, *_: object) -> None:
        self._kill(self._compilers)
        self._kill(self._measurer)

    def _kill(self, pool: ProcessPoolExecutor) -> None:
        """Kills the process, because it would not end by itself while it hangs in a kernel."""
        for process in list((pool._processes or {}).values()):
            process.kill()
        pool.shutdown(cancel_futures=True)

    def compile(self, chosen: list[Cell]) -> None:
        """Starts to compile, in this order."""
        for cell in chosen:
            self._compiled[cell.name] = [
                self._compilers.submit(compile_ahead, cell, setting, self._capability) for setting in cell.candidates()
            ]

    def measure(self, cell: Cell, until: float) -> CellResult:
        wait(self._compiled[cell.name], max(0.0, until - time.monotonic()))
        capabilities = Capabilities(self._capability >= 90, self._capability >= 90)
        found = CellResult(cell.name, "", 0.0)
        while True:
            try:
                found = self._measurer.submit(measure, cell, "cuda", capabilities, found.results).result(_CELL_SECONDS)
            except Exception as error:  # noqa: BLE001 - whatever it is, the other cells are still measured
                # This cell is abandoned: the process died or hangs, or the operands do not fit into memory.
                problem = f"{type(error).__name__}: {error}".splitlines()[0]
                found = replace(found, results=[*found.results, Result("others", problem=problem)], is_fatal=False)
                self._restart()
            if not found.is_fatal:
                return found
            self._restart()

    def _restart(self) -> None:
        self._kill(self._measurer)
        self._measurer = self._processes(1)

    def _processes(self, count: int) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn"))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0, help="after which no cell is begun (default: 9)")
    parser.add_argument("--only", default=",".join(FAMILIES), help=f"of {', '.join(FAMILIES)}, separated by commas")
    parser.add_argument("--skip", type=int, default=0, help="number of cells to skip, as numbered by --list")
    parser.add_argument("--output", type=Path, default=Path("tune.jsonl"), help="lines of JSON are added to this file")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes that compile (default: all cores)")
    parser.add_argument(
        "--list", action="store_true", help="list the cells and how many settings each has; needs no GPU"
    )
    args = parser.parse_args()
    args.only = [name.strip() for name in args.only.split(",") if name.strip()]
    if unknown := [name for name in args.only if name not in FAMILIES]:
        parser.error(f"--only {','.join(unknown)}: the families are {', '.join(FAMILIES)}")
    if args.minutes <= 0 or args.jobs < 1 or args.skip < 0:
        parser.error("--minutes and --jobs must be positive, and --skip must not be negative")
    if not args.list:
        check(parser, args)
    return args


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if not torch.cuda.is_available():
        parser.error("torch sees no CUDA device here: settings can only be timed on a GPU (--list needs none)")
    try:
        args.output.touch()
    except OSError as error:
        parser.error(f"{error.filename} cannot be written: {error.strerror}")


if __name__ == "__main__":
    main()

"""The measurements of `bench/gpu_tune.py`: a chain of launches with distinct operands, checked, captured and replayed.

A cell is one entry of the tuning tables: a kernel, a shape and a number of tokens. Its candidates are settings of that
entry, the present one first. A candidate counts only if its result is correct compared with a reference in wide floats,
and if the last of many replays has the same bits as the first launch: this detects candidates that are fast because
they do not do all the work, or leave counters behind.
"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol, TypeVar

import torch

from penstock.kernels.triton.capabilities import Capabilities

_ROUNDS, _REPLAYS = 5, 4
_TOP = 5

T = TypeVar("T")
Tensors = tuple[torch.Tensor, ...]


class Cell(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def work(self) -> tuple[float, str]:
        """The work of one launch and its unit: candidates are compared by units per second."""
        ...

    @property
    def num_layers(self) -> int: ...

    def candidates(self) -> list[Any]:
        """Returns settings to try, the present one first."""
        ...

    def make(self, on: torch.device, num_layers: int) -> Any:
        """Returns the operands of a chain."""
        ...

    def chain(self, operands: Any, setting: Any, capabilities: Capabilities) -> Callable[[], Tensors]:
        """Launches all layers one after the other, and returns the last one's results."""
        ...

    def error(self, operands: Any, outputs: Tensors) -> float:
        """Returns the error of the last layer, relative to a reference in wider floats."""
        ...

    def tolerance(self) -> float: ...

    def library(self, operands: Any) -> Callable[[], Tensors] | None:
        """Returns a chain of torch's own kernels, if they have an equivalent."""
        ...


@dataclass(frozen=True)
class Result:
    setting: str
    us: float = 0.0  # of one launch; 0 without a valid measurement
    problem: str = ""


@dataclass(frozen=True)
class CellResult:
    name: str
    unit: str
    work: float  # in units of 1e12
    results: list[Result] = field(default_factory=list)  # the present setting first
    library_us: float = 0.0  # time of torch's own kernels, if they have an equivalent
    is_fatal: bool = False  # the process can no longer use the GPU

    def table(self) -> str:
        present = self.results[0]
        right = sorted((result for result in self.results if result.us), key=lambda result: result.us)
        lines = [f"{self.name}: {len(right)} of {len(self.results)} settings are right"]
        for result in [*right[:_TOP], *([present] if present not in right[:_TOP] else [])]:
            rate = f"{1e6 * self.work / result.us:6.2f} {self.unit}" if result.us else result.problem
            ratio = f"{present.us / result.us:5.2f}x" if result.us and present.us else ""
            mark = "  <- present" if result is present else ""
            lines.append(f"    {result.us:9.2f} us {rate} {ratio} {result.setting}{mark}")
        if self.library_us:
            lines.append(f"    {self.library_us:9.2f} us torch's own, without the operations around it")
        wrong = [result for result in self.results if result.problem and "out of resource" not in result.problem]
        lines += [f"    {result.setting}: {result.problem}" for result in wrong[:_TOP]]
        return "\n".join(lines)

    def line(self) -> dict[str, Any]:
        return asdict(self)


def neighbours(present: T, axes: dict[str, Sequence[Any]]) -> list[T]:
    """Returns `present`, and settings that differ from it in one of the fields."""
    found = [present]
    for name, values in axes.items():
        found += [replace(present, **{name: value}) for value in values]  # pyright: ignore
    return list(dict.fromkeys(found))


@contextmanager
def put(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Sets `owner.name` to `value` within the context."""
    kept = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, kept)


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns the largest of the rows' errors, root mean square, so that one wrong tile is not averaged out."""
    wide = expected.double().flatten(1)
    return ((got.double().flatten(1) - wide).norm(dim=1) / wide.norm(dim=1).clamp(min=1e-30)).max().item()


def products(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Returns x @ weight.T in float64, computed a part of the weight at a time."""
    return torch.cat([x.double() @ part.double().T for part in weight.split(16384)], 1)


def measure(cell: Cell, device: str, capabilities: Capabilities, known: Sequence[Result] = ()) -> CellResult:
    """Tries the candidates of a cell that are not known; on a CPU, which has no graphs, the times are meaningless."""
    torch.manual_seed(0)
    work, unit = cell.work
    found = CellResult(cell.name, unit, work / 1e12, list(known))
    if device == "cuda":
        torch.cuda.empty_cache()
    with torch.inference_mode():
        operands = cell.make(torch.device(device), cell.num_layers)
        for setting in cell.candidates()[len(known) :]:
            try:
                result = _measure_one(cell, operands, setting, device, capabilities)
            except Exception as error:  # noqa: BLE001 - a candidate may fail in any way
                text = f"{type(error).__name__}: {error}".splitlines()[0][:160]
                found.results.append(Result(str(setting), problem=text))
                if "CUDA" in str(error) and "out of" not in str(error):
                    return replace(found, is_fatal=True)
                continue
            found.results.append(result)
        library = cell.library(operands)
        return found if library is None else replace(found, library_us=_time(library, cell.num_layers, device)[0])


def _measure_one(cell: Cell, operands: Any, setting: Any, device: str, capabilities: Capabilities) -> Result:
    run = cell.chain(operands, setting, capabilities)
    first = tuple(tensor.clone() for tensor in run())
    error = cell.error(operands, first)
    # NaN counts as wrong too.
    if not error <= cell.tolerance():
        return Result(str(setting), problem=f"WRONG: error {error:.2g}")
    us, last = _time(run, cell.num_layers, device)
    if not all(map(torch.equal, first, last)):
        return Result(str(setting), problem="WRONG: replays have other bits")
    return Result(str(setting), us)


def _time(run: Callable[[], Tensors], num_layers: int, device: str) -> tuple[float, Tensors]:
    """Returns the microseconds of one launch of the chain, the median of rounds, and the results of the last replay."""
    if device == "cpu":
        return 1.0, run()
    recorder = importlib.import_module("penstock.runner.gpu.cudagraphs").CudaGraphRecorder(torch.device(device))
    graph = recorder.record(run)
    graph.replay()
    times = []
    for _ in range(_ROUNDS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(_REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / _REPLAYS / num_layers)
    return statistics.median(times), tuple(tensor.clone() for tensor in graph.outputs)


def compile_ahead(cell: Cell, setting: Any, capability: int) -> None:
    """Compiles into Triton's cache, without a GPU; compilation errors are reported during the measurement."""
    from penstock.runner.gpu.ahead import dry_run

    is_new = capability >= 90
    try:
        with dry_run(capability, lambda variant: True), torch.inference_mode():
            operands = cell.make(torch.device("meta"), 1)
            cell.chain(operands, setting, Capabilities(is_new, is_new))()
    except Exception:  # noqa: BLE001 - see above
        return

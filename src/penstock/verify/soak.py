"""The soak: the same greedy requests in one fresh process after another, under contention, compared bit by bit. First a
reference process runs the requests one at a time on an idle machine. Every further process draws its threads, batches,
chunks, pool and order from a seed, while others compete with it for cores and memory. Digests of everything that each
process loaded and computed are compared with the reference, row by row and layer by layer, so that the first difference
identifies the tensor or the stage where it began.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from penstock.config.engine import EngineArgs, EngineConfig, resolve
from penstock.frontend.front_end import build_front_end
from penstock.utils.clock import SystemClock
from penstock.utils.errors import ConfigError
from penstock.utils.interrupts import interrupts_blocked
from penstock.verify.recording import PLAN, Place, Plan, Recording, Round, first_difference
from penstock.verify.rows import plain_arguments, small_pool
from penstock.verify.workload import Case, make_cases
from penstock.worker.parts import choose_device

CHILD = (sys.executable, "-m", "penstock.verify.soak_run")
_NOISE = (sys.executable, "-m", "penstock.verify.contention")
DRAWN_ARGUMENTS = (
    "max_num_batched_tokens", "num_gpu_blocks_override", "enable_prefix_caching", "async_scheduling", "check_weights",
)  # fmt: skip
"""Engine arguments that differ between processes."""
_ROUNDS = 2
_CHUNKS = (17, 29, 64, 150)
_LOG = "log.txt"
_LOG_LINES_SHOWN = 12
# A process that takes this much longer than the reference, which ran without contention, is considered hung.
_HANGS_FACTOR, _HANGS_SECONDS = 50, 300


@dataclass(slots=True)
class Tally:
    """Counts of processes, rounds and rows under one condition."""

    num_processes: int = 0
    num_rounds: int = 0
    num_rows: int = 0
    num_preemptions: int = 0

    def add(self, recording: Recording) -> None:
        self.num_processes += 1
        self.num_rounds += len(recording.plan.rounds)
        self.num_rows += recording.start.num_rows
        self.num_preemptions += recording.start.num_preemptions


@dataclass(frozen=True, slots=True)
class Finding:
    """A process that differed, at `place`, or that failed (`problem`). Its folder holds its plan and its recording."""

    plan: Plan
    folder: Path
    reference: Path
    place: Place | None
    problem: str = ""

    @property
    def command(self) -> str:
        """The command that runs the plan again without competing processes, and records it in another folder."""
        return f"{Path(sys.executable).name} -m penstock.verify.soak_run {self.folder} {self.folder}-again"


@dataclass(slots=True)
class SoakResult:
    """`tallies` by condition: a process counts under each condition that it met."""

    num_reference_rows: int
    num_tensors: int
    tallies: dict[str, Tally] = field(default_factory=dict[str, Tally])
    finding: Finding | None = None


Progress = Callable[[Tally], None]
"""Receives the totals of all processes after each of them."""
ALL = "all"


def soak(
    args: EngineArgs,
    prompts: Sequence[str],
    max_tokens: int,
    minutes: float,
    on_progress: Progress,
    seed: int | None = None,
    child: Sequence[str] = CHILD,
) -> SoakResult:
    """Starts at least one process, until the time is over or one differs. Recordings are kept if one does. `seed`
    determines all random choices, by default a random one; `child` is the command of a process. Raises ConfigError or
    RequestError for invalid arguments.
    """
    clock = SystemClock()
    deadline = clock.now() + 60 * minutes
    config = choose_device(resolve(args))
    if config.device != "cpu":
        raise ConfigError("the soak compares a CPU's processes, and this engine runs on a GPU: add --device cpu")
    cases = _cases(config, prompts, max_tokens)
    drawer = _PlanDrawer(args, config, cases)
    folder = Path(tempfile.mkdtemp(prefix="penstock-soak-"))
    with ExitStack() as on_agreement:
        on_agreement.callback(shutil.rmtree, folder)
        started = clock.now()
        reference_folder = folder / "reference"
        try:
            _run(drawer.reference(), reference_folder, child, timeout=None)
        except _ChildError as error:
            raise ConfigError(f"the reference process failed: {error}") from None
        reference = Recording.load(reference_folder)
        seconds = _HANGS_SECONDS + _HANGS_FACTOR * (clock.now() - started)
        result = SoakResult(reference.start.num_rows, len(reference.start.tensors))
        rng = random.Random(seed)
        while not result.finding and (ALL not in result.tallies or clock.now() < deadline):
            plan = drawer.draw(rng.randrange(1 << 32))
            current, place, problem = folder / f"seed-{plan.seed}", None, ""
            try:
                _run(plan, current, child, timeout=seconds)
                recording = Recording.load(current)
                place = first_difference(reference, recording)
                for condition in _conditions(recording):
                    result.tallies.setdefault(condition, Tally()).add(recording)
            except _ChildError as error:
                problem = str(error)
            if place or problem:
                result.finding = Finding(plan, current, reference_folder, place, problem)
                on_agreement.pop_all()
            else:
                shutil.rmtree(current)
                on_progress(result.tallies[ALL])
    return result


class _ChildError(Exception):
    """A process of the soak failed or hung."""


def _cases(config: EngineConfig, prompts: Sequence[str], max_tokens: int) -> list[Case]:
    front_end = build_front_end(config, config.scheduler)
    cases = make_cases(front_end, prompts, config.model.vocab_size, max_tokens, is_quick=False)
    return [case for case in cases if case.is_greedy and not case.is_structured]


class _PlanDrawer:
    def __init__(self, args: EngineArgs, config: EngineConfig, cases: Sequence[Case]) -> None:
        self._config = config
        self._plain = plain_arguments(args, config, cases)
        self._prompts = tuple(tuple(case.request.prompt_token_ids) for case in cases)
        self._max_tokens = tuple(case.request.max_tokens for case in cases)
        self._num_cores = os.cpu_count() or 1

    def reference(self) -> Plan:
        """One request at a time, with unchunked prompts and no competing processes."""
        every = Round(tuple(range(len(self._prompts))), num_at_once=1, num_threads=self._num_cores, forgets=False)
        return Plan(None, self._plain, self._prompts, self._max_tokens, (every,), num_noises=0)

    def draw(self, seed: int) -> Plan:
        """Derives the whole plan from the seed, so that a process can be repeated."""
        rng, plain = random.Random(seed), self._plain
        engine = {
            **plain,
            "async_scheduling": rng.random() < 0.5,
            "enable_prefix_caching": rng.random() < 0.5,
            "check_weights": rng.random() < 0.25,
            "max_num_batched_tokens": rng.choice((*_CHUNKS, plain["max_num_batched_tokens"])),
        }
        if rng.random() < 0.5:
            engine["num_gpu_blocks_override"] = small_pool(self._config, engine)
        rounds = tuple(self._draw_round(rng) for _ in range(_ROUNDS))
        num_noises = rng.choice((0, 1, self._num_cores, 2 * self._num_cores + 1))
        return Plan(seed, engine, self._prompts, self._max_tokens, rounds, num_noises)

    def _draw_round(self, rng: random.Random) -> Round:
        count = len(self._prompts)
        return Round(
            order=tuple(rng.sample(range(count), count)),
            num_at_once=rng.randint(1, count),
            num_threads=rng.randint(1, self._num_cores),
            forgets=rng.random() < 0.5,
        )


def _run(plan: Plan, folder: Path, child: Sequence[str], timeout: float | None) -> None:
    """Runs a process to its end. Raises _ChildError with the end of its output if it fails or hangs."""
    folder.mkdir()
    (folder / PLAN).write_bytes(msgspec.json.format(msgspec.json.encode(plan)))
    log = folder / _LOG
    with ExitStack() as stack:
        for number in range(plan.num_noises):
            assert plan.seed is not None, "nothing runs beside the reference"
            stack.enter_context(_noise(plan.seed + number))
        out = stack.enter_context(log.open("wb"))
        process = stack.enter_context(
            _killed_at_exit([*child, str(folder)], stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
        )
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise _ChildError(f"it did not end within {timeout:.0f} seconds") from None
    if code:
        last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES_SHOWN:]
        raise _ChildError("\n".join((f"exit code {code}", *last)))


@contextlib.contextmanager
def _noise(seed: int) -> Iterator[None]:
    """Starts a competing process, which ends with its standard input, so also if this process is killed."""
    with _killed_at_exit([*_NOISE, str(seed)], stdin=subprocess.PIPE):
        yield


@contextlib.contextmanager
def _killed_at_exit(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    with interrupts_blocked():
        process = subprocess.Popen(command, **options)
    with process:
        try:
            yield process
        finally:
            process.kill()


def _conditions(recording: Recording) -> Iterator[str]:
    plan = recording.plan
    threads = {each.num_threads for each in plan.rounds}
    met = {
        ALL: True,
        "processes competing with it": plan.num_noises > 0,
        "one thread only": threads == {1},
        "another number of threads per round": len(threads) > 1,
        "prompts in chunks": plan.engine["max_num_batched_tokens"] in _CHUNKS,
        "asynchronous scheduling": plan.engine["async_scheduling"],
        "prefix hits": plan.engine["enable_prefix_caching"],
        "preemptions": recording.start.num_preemptions > 0,
        "packed weights checked": plan.engine["check_weights"],
    }
    return (name for name, is_met in met.items() if is_met)

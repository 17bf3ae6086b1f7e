"""Digests of everything that a process of the soak computed, and the first difference of two such recordings.

A recording is a folder of three files: `plan.json` (what to run), `start.json` (digests of all tensors of the loaded
model, and what happened) and `rows.npy` (digests of rows, [n, 2] uint64: key and digest). Keys order rows by position,
then stage, then request, so that the smallest key at which two recordings differ is the origin of the difference.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

PLAN, START, ROWS = "plan.json", "start.json", "rows.npy"
_STAGE_SHIFT, _POSITION_SHIFT, _FIELD = 16, 32, 0xFFFF


class Round(msgspec.Struct, frozen=True):
    """One run of the requests. `forgets`: the prefix cache is cleared before it."""

    order: tuple[int, ...]
    num_at_once: int
    num_threads: int
    forgets: bool


class Plan(msgspec.Struct, frozen=True):
    """Everything that a process of the soak does. `num_noises` processes compete with it, without its knowledge."""

    seed: int | None  # None: the reference
    engine: dict[str, Any]
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: tuple[int, ...]  # by prompt: a long one leaves less room
    rounds: tuple[Round, ...]
    num_noises: int

    @property
    def num_start_threads(self) -> int:
        """The number of threads with which the engine starts, that of the first round."""
        return self.rounds[0].num_threads


class Start(msgspec.Struct, frozen=True):
    """`tensors`: name -> digest, in hexadecimal, after the start; `tensors_at_end` the same after the last round."""

    arithmetic: str
    num_layers: int
    tensors: dict[str, str]
    tensors_at_end: dict[str, str]
    num_rows: int  # computed rows; repeated ones are counted in every round
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class Recording:
    folder: Path
    plan: Plan
    start: Start
    rows: np.ndarray  # [n, 2] uint64, sorted by key

    @classmethod
    def load(cls, folder: Path) -> Recording:
        plan = msgspec.json.decode((folder / PLAN).read_bytes(), type=Plan)
        start = msgspec.json.decode((folder / START).read_bytes(), type=Start)
        return cls(folder, plan, start, np.load(folder / ROWS))


@dataclass(frozen=True, slots=True)
class Place:
    """The first difference of two recordings: `what` is a tensor, or the stage of the model whose result for the token
    at `position` of a request differs.
    """

    what: str
    request: int | None = None
    position: int | None = None


def row_key(position: int, stage: int, request: int) -> int:
    return position << _POSITION_SHIFT | stage << _STAGE_SHIFT | request


def save_rows(rows: Iterable[tuple[int, int]], file: Path) -> None:
    """Writes pairs of a key and a digest."""
    np.save(file, np.array(sorted(rows), dtype=np.uint64).reshape(-1, 2))


def stage_names(num_layers: int) -> tuple[str, ...]:
    """Returns the names of the stages by number, in the order of execution."""
    return ("embedding", *(f"layer {number}" for number in range(num_layers)), "final norm", "logits", "token")


def first_difference(expected: Recording, found: Recording) -> Place | None:
    """Returns the first difference: weights and tables before rows, and among rows the smallest key."""
    if expected.start.arithmetic != found.start.arithmetic:
        return Place(f"arithmetic: {found.start.arithmetic} in place of {expected.start.arithmetic}")
    for when, tensors in (("", found.start.tensors), (" at the end", found.start.tensors_at_end)):
        for name, digest in expected.start.tensors.items():
            if tensors.get(name) != digest:
                return Place(f"{name}{when}")
    keys, digests = expected.rows[:, 0], expected.rows[:, 1]
    at = np.searchsorted(keys, found.rows[:, 0]).clip(max=len(keys) - 1)
    # A step that overlaps the last one of a request computes one row more than the reference.
    differs = (keys[at] == found.rows[:, 0]) & (digests[at] != found.rows[:, 1])
    if not differs.any():
        return None
    key = int(found.rows[differs, 0].min())
    stage = stage_names(expected.start.num_layers)[key >> _STAGE_SHIFT & _FIELD]
    return Place(stage, key & _FIELD, key >> _POSITION_SHIFT)

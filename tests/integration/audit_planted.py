"""A Penstock with a planted fault, for `penstock audit`: `serve_planted` starts its engine core with patches.

- foreign block: now and then a prefix hit takes another prompt's block;
- stale block: the cache's index keeps a block after its eviction, so that a hit finds what is in it now;
- lost rewind: the keys and values of a rejected draft stay where those of the right token belong.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.core.block_pool import NULL_BLOCK
from tests.integration.server_process import ServerProcess, serve
from tests.simulation.patches import Patches, changes

_POOL = "core.block_pool:BlockPool"
_VARIABLE = "AUDIT_PLANTED"
_ROOT = Path(__file__).parents[2]
# Python imports it in every process; the engine core is the one that computes.
_SITE = """\
import os, sys
if "penstock.engine.core_process" in sys.orig_argv:
    from tests.integration.audit_planted import plant
    plant(os.environ["AUDIT_PLANTED"])
"""


def foreign_block() -> Patches:
    hits = itertools.count()

    def find(original: Callable[..., Any], self: Any, key: Any) -> int | None:
        found = original(self, key)
        if found is None or next(hits) % 40 != 39:
            return found
        return next((block_id for other, ids in self._cached.items() if other != key for block_id in ids), found)

    return changes(f"{_POOL}.find", find)


def stale_block() -> Patches:
    places: dict[Any, int] = {}

    def publish(original: Callable[..., Any], self: Any, block_id: int, key: Any) -> bool:
        places.setdefault(key, block_id)
        return original(self, block_id, key)

    def find(original: Callable[..., Any], self: Any, key: Any) -> int | None:
        found = original(self, key)
        place = places.get(key)
        if found is None and place is not None and self.is_published(place):
            return place
        return found

    return (*changes(f"{_POOL}.publish", publish), *changes(f"{_POOL}.find", find))


def lost_rewind() -> Patches:
    last: dict[int, int] = {}

    def slot_mapping(original: Callable[..., Any], table: Any, inputs: Any, block_size: int) -> Any:
        slots = original(table, inputs, block_size)
        steps = itertools.groupby(enumerate(inputs.rows.tolist()), key=lambda each: each[1])
        for row, entries in steps:
            places = [index for index, _ in entries]
            positions = inputs.positions[places].tolist()
            for place, position in zip(places, positions, strict=True):
                # A position that the request's last step has written: it belonged to a rejected draft.
                if len(places) <= 4 and last.get(row, 0) - 4 < position <= last.get(row, 0):
                    slots[place] = NULL_BLOCK
            last[row] = positions[-1]
        return slots

    return changes("kernels.prepare_inputs:slot_mapping", slot_mapping)


FAULTS: dict[str, tuple[Callable[[], Patches], tuple[str, ...]]] = {
    "foreign block": (foreign_block, ()),
    "stale block": (stale_block, ("--num-gpu-blocks-override", "150", "--max-model-len", "1024")),
    "lost rewind": (
        lost_rewind,
        ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}'),
    ),
}


def plant(name: str) -> None:
    """Applies the patches of a fault for the rest of the process."""
    for patch in FAULTS[name][0]():
        patch.apply(pytest.MonkeyPatch())


@contextlib.contextmanager
def serve_planted(name: str, folder: Path) -> Iterator[ServerProcess]:
    (folder / "sitecustomize.py").write_text(_SITE)
    path = os.pathsep.join([str(folder), str(_ROOT), str(_ROOT / "src")])
    with serve(*FAULTS[name][1], env={"PYTHONPATH": path, _VARIABLE: name}) as server:
        yield server

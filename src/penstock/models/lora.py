"""The layers that LoRA adapters may change, and the loading of adapters into them.

A layer registers itself when the model is built. A rank loads the rows of its own outputs and all inputs, so that it
computes each output as a single rank would.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch

from penstock.config.lora import LoraFiles, plain_name, read_adapter
from penstock.kernels.lora import LoraLayer, LowRank, RowSlots
from penstock.messages.adapters import Adapter, LoraTarget
from penstock.models.sources.checkpoint import CheckpointSource


@dataclass(frozen=True, slots=True)
class _Projection:
    """A projection of a layer: its name in the checkpoint, its outputs, and those of this rank, in their order."""

    name: str
    num_outputs: int
    own: tuple[range, ...]


class LoraModel:
    """A rank's layers with adapters, `num_slots` of them at most. Threading: the runner's thread."""

    def __init__(self, num_slots: int, max_num_rows: int, dtype: torch.dtype) -> None:
        self.rows = RowSlots(max_num_rows)
        self._num_slots = num_slots
        self._dtype = dtype
        self._layers: list[tuple[LoraLayer, int, tuple[_Projection, ...]]] = []

    @property
    def targets(self) -> dict[str, LoraTarget]:
        """The projections by name."""
        return {
            each.name: LoraTarget(num_inputs, each.num_outputs)
            for _, num_inputs, projections in self._layers
            for each in projections
        }

    def num_bytes(self, max_rank: int) -> int:
        """Returns the memory of all slots with adapters of this rank."""
        return self._num_slots * sum(layer.slot_bytes(max_rank, self._dtype) for layer, _, _ in self._layers)

    def register(
        self, projections: Sequence[tuple[str, int, range]], num_inputs: int, order: torch.Tensor | None
    ) -> LoraLayer:
        """Returns the adapters of a layer that has the outputs `range` of the named projections, in this `order`.

        The numbers are the outputs of all ranks. In several layers of one name an adapter is the same.
        """
        known: list[_Projection] = []
        for (name, num_outputs), pieces in itertools.groupby(projections, key=lambda each: each[:2]):
            known.append(_Projection(plain_name(name), num_outputs, tuple(own for _, _, own in pieces)))
        sizes = [sum(map(len, each.own)) for each in known]
        layer = LoraLayer(self.rows, self._num_slots, num_inputs, sizes, order)
        self._layers.append((layer, num_inputs, tuple(known)))
        return layer

    def load(self, slot: int, adapter: Adapter) -> None:
        """Replaces a slot's adapter. Raises ConfigError for files that the front end would have refused."""
        files = read_adapter(Path(adapter.folder))
        with closing(CheckpointSource(files.folder)) as source:
            for layer, _, projections in self._layers:
                layer.load(slot, [_read(source, files, each) for each in projections], self._dtype)

    def clear(self, slot: int) -> None:
        """Leaves a slot without an adapter."""
        for layer, _, _ in self._layers:
            layer.clear(slot)


def _read(source: CheckpointSource, files: LoraFiles, projection: _Projection) -> LowRank | None:
    found = files.tensors.get(projection.name)
    if found is None:
        return None
    down = source.read(found.down, (found.rank, found.num_inputs))
    shape = found.num_outputs, found.rank
    up = [source.read(found.up, shape, (slice(rows.start, rows.stop),)) for rows in projection.own]
    return LowRank(down, torch.cat(up), found.scale)

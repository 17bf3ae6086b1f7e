"""The layers that LoRA adapters may change, and the loading of adapters into them.

A layer registers itself when the model is built. A rank loads the rows of its own outputs and all inputs, so that it
computes each output as a single rank would.
"""

from __future__ import annotations

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
    """One of a layer's projections: its name in the checkpoint, its outputs, and those of this rank."""

    name: str
    num_outputs: int
    own: range


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

    def register(
        self, projections: Sequence[tuple[str, int, range]], num_inputs: int, order: torch.Tensor | None
    ) -> LoraLayer:
        """Returns the adapters of a layer that has the outputs `range` of the named projections, in this `order`.

        The numbers are the outputs of all ranks. In several layers of one name an adapter is the same.
        """
        layer = LoraLayer(self.rows, self._num_slots, num_inputs, [len(own) for _, _, own in projections], order)
        known = tuple(_Projection(plain_name(name), count, own) for name, count, own in projections)
        self._layers.append((layer, num_inputs, known))
        return layer

    def load(self, slot: int, adapter: Adapter) -> None:
        """Replaces a slot's adapter. Raises ConfigError for files that the front end would have refused."""
        files = read_adapter(Path(adapter.folder))
        with closing(CheckpointSource(files.folder)) as source:
            for layer, _, projections in self._layers:
                layer.load(slot, [_read(source, files, each) for each in projections], self._dtype)


def _read(source: CheckpointSource, files: LoraFiles, projection: _Projection) -> LowRank | None:
    found = files.tensors.get(projection.name)
    if found is None:
        return None
    down = source.read(found.down, (found.rank, found.num_inputs))
    own = slice(projection.own.start, projection.own.stop)
    return LowRank(down, source.read(found.up, (found.num_outputs, found.rank), (own,)), found.scale)

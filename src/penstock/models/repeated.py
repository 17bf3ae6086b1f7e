"""Runs a decoder's layers: in one native call, once a step of the same shape has been recorded (`kernels.recording`).

Steps of more than `MAX_ROWS` rows, and layers that cannot be recorded, are always computed by the layers themselves.
While a KV connector's hooks are active there is one call for each layer, between its hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from penstock.attention.backend import AttentionMetadata
from penstock.attention.forward_context import ForwardContext
from penstock.kernels.native import library, num_threads
from penstock.kernels.recording import Recording, Workspace, record
from penstock.utils.layer_hooks import NO_HOOKS

MAX_ROWS = 256
MAX_RECORDINGS = 64

Layer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, ForwardContext], torch.Tensor]


class RepeatedLayers:
    """Consecutive layers. The result may lie in memory that the next call uses. Threading: the runner's thread."""

    def __init__(self, names: Sequence[str], sources: Iterable[str] = ()) -> None:
        """`names` of the layers' caches, empty for a layer without one of its own, which reads one of `sources`."""
        self._names = tuple(names)
        self._caches = tuple(dict.fromkeys(filter(None, (*names, *sources))))
        self._workspace = Workspace()
        # By the shape of a step; None after the first step of a shape, which may be the only one.
        self._recordings: dict[tuple[object, ...], Recording | None] = {}
        self._can_record = library() is not None

    def __call__(
        self,
        layers: Sequence[Layer],
        x: torch.Tensor,
        residual: torch.Tensor,
        positions: torch.Tensor,
        context: ForwardContext,
    ) -> torch.Tensor:
        """Runs `layers`, those of `names`, as each of them does."""
        if not self._can_record or not layers or not x.is_cpu or not 0 < len(x) <= MAX_ROWS:
            for layer in layers:
                x = layer(x, residual, positions, context)
            return x
        groups = tuple({id(each): each for each in context.metadata.values()}.values())
        tables = [(len(each.seq_lens), each.block_table.stride(0)) for each in groups]
        key = (len(x), num_threads(), *tables)
        recording = self._recordings.get(key)
        caches = [context.kv_caches[name] for name in self._caches]
        inputs = [x, residual, positions, *caches, *(tensor for each in groups for tensor in _tensors(each))]
        if context.per_layer is not None:
            inputs.append(context.per_layer)
        if recording is not None:
            # The last used is the last to be forgotten.
            self._recordings[key] = self._recordings.pop(key)
            recording.set_inputs([tensor.data_ptr() for tensor in inputs])
            return self._repeat(recording, context)
        # What hooks compute is no part of the layers.
        if key in self._recordings and context.hooks is NO_HOOKS:
            parts = [_part(layer, residual, positions, context) for layer in layers]
            x, self._recordings[key] = record(parts, x, inputs, self._workspace)
            self._can_record = self._recordings[key] is not None
            return x
        if key not in self._recordings:
            if len(self._recordings) == MAX_RECORDINGS:
                del self._recordings[next(iter(self._recordings))]
            self._recordings[key] = None
        for layer in layers:
            x = layer(x, residual, positions, context)
        return x

    def _repeat(self, recording: Recording, context: ForwardContext) -> torch.Tensor:
        hooks = context.hooks
        if hooks is NO_HOOKS:
            return recording.repeat()
        for number, name in enumerate(self._names):
            if name:
                hooks.wait_for_layer_load(name)
            recording.repeat(number, number + 1)
            if name:
                hooks.save_kv_layer(name)
        return recording.result(-1)


def _part(
    layer: Layer, residual: torch.Tensor, positions: torch.Tensor, context: ForwardContext
) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: layer(x, residual, positions, context)


def _tensors(metadata: AttentionMetadata) -> list[torch.Tensor]:
    tensors = [metadata.query_start_loc, metadata.seq_lens, metadata.block_table, metadata.slot_mapping]
    if (states := metadata.states) is not None:
        tensors += [each for each in (states.rows, states.num_pending, states.num_drafts) if each is not None]
    return tensors

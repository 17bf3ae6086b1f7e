"""Computes digests of a model's tensors, and of every row at every stage of its forward pass, without changing it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from penstock.models.decoder import Decoder, IntermediateTensors
from penstock.utils.digest import digest
from penstock.verify.recording import row_key, stage_names

_ROW_BYTES = 8


def tensor_digests(model: object) -> dict[str, str]:
    """Returns name -> digest, in hexadecimal, of every tensor that the model holds: packed weights, norms, tables."""
    found: dict[str, str] = {}
    seen: set[tuple[int, int]] = set()
    for name, tensor in _tensors(model):
        place = tensor.data_ptr(), tensor.nbytes
        if place not in seen:
            seen.add(place)
            found[name] = digest(_bytes(tensor).reshape(-1).numpy().data).hex()
    return found


def _tensors(root: object) -> Iterator[tuple[str, torch.Tensor]]:
    """Traverses breadth first, so that a shared tensor has its shortest name."""
    pending: deque[tuple[tuple[str, ...], object]] = deque([((), root)])
    visited: set[int] = set()
    while pending:
        path, item = pending.popleft()
        if isinstance(item, torch.Tensor):
            # Names of private attributes on the path to a tensor are omitted.
            yield ".".join((*(part for part in path[:-1] if not part.startswith("_")), path[-1].lstrip("_"))), item
        elif id(item) not in visited:
            visited.add(id(item))
            pending.extend(((*path, name), value) for name, value in _parts(item))


def _parts(item: object) -> Iterator[tuple[str, object]]:
    if isinstance(item, list | tuple):
        yield from ((str(number), value) for number, value in enumerate(item))
    elif isinstance(item, dict):
        yield from ((str(name), value) for name, value in item.items())
    elif type(item).__module__.startswith("penstock."):
        yield from getattr(item, "__dict__", {}).items()
        yield from ((name, getattr(item, name)) for name in getattr(type(item), "__slots__", ()) if hasattr(item, name))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(torch.uint8)


class _Watched:
    """A part of the model whose results are recorded."""

    def __init__(self, part: Any, look: Callable[[Any, tuple[Any, ...]], None]) -> None:
        self._part = part
        self._look = look

    def __call__(self, *args: Any) -> Any:
        result = self._part(*args)
        self._look(result, args)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)


class Watch:
    """Records what a runner's steps compute for requests whose ids are numbers.

    It permanently replaces attributes of the runner's passes and of its model; one thread runs the steps.
    """

    def __init__(self, model: Decoder, passes: Any) -> None:
        self.rows: set[tuple[int, int]] = set()
        self.num_rows = 0
        self._stages = {name: number for number, name in enumerate(stage_names(len(model.layers)))}
        self._requests: list[int] = []
        self._positions: list[int] = []
        self._sampled: list[int] = []
        # Watched parts behave like the originals.
        replaced: dict[str, Any] = {
            "embed": _Watched(model.embed, self._look_at_embedded),
            "layers": [_Watched(layer, self._look_at_layer(number)) for number, layer in enumerate(model.layers)],
            "compute_logits": _Watched(model.compute_logits, self._look_at_logits),
        }
        for name, part in replaced.items():
            setattr(model, name, part)
        vars(model.end.norm)["add"] = _Watched(model.end.norm.add, self._look_at("final norm"))
        self._forward = passes.forward
        passes.forward = self._follow

    def add_token(self, request: int, position: int, token_id: int) -> None:
        """`position` is the position from which the token was sampled."""
        self.rows.add((row_key(position, self._stages["token"], request), token_id))

    def _follow(self, batch: Any) -> Any:
        tensors, host = batch.tensors, batch.host
        counts = host.query_lens.tolist()
        self._requests = [int(name) for name, count in zip(host.request_ids, counts, strict=True) for _ in range(count)]
        self._positions = tensors.tokens.positions.tolist()
        self._sampled = tensors.logits_indices.tolist()
        return self._forward(batch)

    def _look_at(self, stage: str) -> Callable[[torch.Tensor, tuple[Any, ...]], None]:
        return lambda result, args: self._add(stage, result, range(len(result)))

    def _look_at_embedded(self, result: IntermediateTensors, args: tuple[Any, ...]) -> None:
        self._add("embedding", result.residual, range(len(result.residual)))

    def _look_at_layer(self, number: int) -> Callable[[torch.Tensor, tuple[Any, ...]], None]:
        """The residual stream after the layer is the sum of its result and its second argument."""
        return lambda result, args: self._add(f"layer {number}", torch.cat((result, args[1]), -1), range(len(result)))

    def _look_at_logits(self, result: torch.Tensor, args: tuple[Any, ...]) -> None:
        self._add("logits", result, self._sampled)

    def _add(self, stage: str, rows: torch.Tensor, tokens: range | list[int]) -> None:
        assert len(rows) == len(tokens), f"{len(rows)} rows of {stage} for {len(tokens)} tokens"
        number = self._stages[stage]
        self.num_rows += len(rows)
        for token, row in zip(tokens, _bytes(rows).numpy(), strict=True):
            key = row_key(self._positions[token], number, self._requests[token])
            self.rows.add((key, int.from_bytes(digest(row.data)[:_ROW_BYTES])))

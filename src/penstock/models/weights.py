"""A checkpoint's tensors, by name, as the model's constructors request them.

A model is built whole: every layer takes its tensors from a `Weights` view while it is constructed, with the shape that
it expects. A tensor that is missing, misshapen or unreadable is one `ConfigError` line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch
from msgspec import structs

from penstock.config.expert_parallel import ExpertParallelConfig
from penstock.config.load_quantization import AS_STORED, LOADED_GROUP, LoadQuantization
from penstock.kernels.dispatch import has_gpu_kernels
from penstock.kernels.quantized import LayerWeight, QuantizedWeight, dense, quantize_absmax, reordered
from penstock.kernels.staging import Stager
from penstock.layers.embedding import Embedding
from penstock.layers.linear import (
    Gather,
    GatheredLinear,
    GatheringLinear,
    HeadsLinear,
    JoiningLinear,
    Linear,
    SummingLinear,
)
from penstock.messages.tensor_rows import TensorRows
from penstock.models.lora import LoraModel
from penstock.models.sources.source import ALL, Part, WeightSource
from penstock.parallel.groups import ALONE, TensorGroup
from penstock.parallel.topology import Share
from penstock.utils.digest import digest_rows
from penstock.utils.errors import ConfigError

_MOST_RUNS = 8  # a layer of more runs of rows that are quantized alike is dequantised as a whole

Delivery = Callable[[Iterable[torch.Tensor], Sequence[int], torch.dtype, torch.device], torch.Tensor]
"""Converts stored tensors to the model's: concatenated along their first dimension, with this total shape."""


def direct(
    parts: Iterable[torch.Tensor], shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Uses a tensor in place if possible (`Delivery`)."""
    tensors = [part.to(device=device, dtype=dtype).contiguous() for part in parts]
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def staged(
    stager: Stager, parts: Iterable[torch.Tensor], shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Allocates only the model's tensor, and fills it through the stager (`Delivery`)."""
    out = torch.empty(tuple(shape), dtype=dtype, device=device)
    start = 0
    for part in parts:
        place = out[start : start + len(part)]
        if part.is_cpu:
            stager.copy(part.contiguous(), place)
        else:
            place.copy_(part)
        start += len(part)
    assert start == len(out), f"parts of {start} rows for {tuple(shape)}"
    return out


_Piece = tuple[str, int, range]
"""The name of a tensor, its number of rows, and those to read."""


def _join_alike(parts: Iterable[LayerWeight]) -> Iterator[LayerWeight]:
    """Joins the rows of neighbours that are of one kind."""
    run: list[LayerWeight] = []
    for part in parts:
        if run and not are_alike(run[-1], part):
            yield _cat(run)
            run = []
        run.append(part)
    yield _cat(run)


def _runs_in_order(parts: Sequence[LayerWeight], order: torch.Tensor) -> Sequence[LayerWeight]:
    """Returns the rows of all parts in another order, as parts that each have rows of one of them."""
    ends = torch.tensor([part.shape[0] for part in parts]).cumsum(0)
    numbers, counts = torch.bucketize(order, ends, right=True).unique_consecutive(return_counts=True)
    runs = zip(numbers.tolist(), order.split(counts.tolist()), strict=True)
    return [reordered(parts[number], run - (ends[number] - parts[number].shape[0])) for number, run in runs]


def are_alike(one: LayerWeight, other: LayerWeight) -> bool:
    """Whether the two are of one kind, so that one layer may have both."""
    if isinstance(one, QuantizedWeight) and isinstance(other, QuantizedWeight):
        return one.is_like(other)
    return not isinstance(one, QuantizedWeight) and not isinstance(other, QuantizedWeight) and one.dtype == other.dtype


def _cat(parts: Sequence[LayerWeight]) -> LayerWeight:
    if len(parts) == 1:
        return parts[0]
    quantized = [part for part in parts if isinstance(part, QuantizedWeight)]
    return QuantizedWeight.cat(quantized) if quantized else torch.cat([dense(part) for part in parts])


def keeps_quantized(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether layers compute with quantized weights as they are; elsewhere they become the model's type when read."""
    return device.type == "cpu" and dtype == torch.bfloat16 and not has_gpu_kernels(device)


class StoredWeight(Protocol):
    """A layer's weight in memory: of a `Linear`, of a `HeadsLinear`, or of one expert."""

    def dense_weight(self) -> torch.Tensor: ...


Check = Callable[[str, StoredWeight, LayerWeight], None]
"""Checks a layer, by name, against the weight that it was made of. Raises ConfigError if they differ."""


def trust(name: str, stored: StoredWeight, weight: LayerWeight) -> None:
    """Accepts a layer without a check (`Check`)."""


def compare(name: str, stored: StoredWeight, weight: LayerWeight) -> None:
    """Compares every element of a layer's weight with the tensor that it was made of (`Check`).

    Denormal numbers may have become zero. The copy for the comparison takes up to four times the layer's memory.
    """
    found, weight = stored.dense_weight(), dense(weight)
    is_denormal = weight.abs() < torch.finfo(weight.dtype).tiny
    num_differing = int(((found != weight) & ~(is_denormal & (found == 0))).sum())
    if num_differing:
        raise ConfigError(
            f"the weights in memory of {name} are not those that were read: {num_differing} of {weight.numel()} "
            "elements differ. This process would give wrong tokens; start it again, and if that does not help, "
            "check the machine's memory"
        )


class WeightsDigest:
    """Records which rows or columns of which tensors are read, in any order, and on request digests of their bytes."""

    def __init__(self, has_bytes: bool = False) -> None:
        self._has_bytes = has_bytes
        self._rows: dict[tuple[str, int, int], TensorRows] = {}

    def add(
        self, name: str, shape: Sequence[int], part: Part, tensor: LayerWeight, dtype: torch.dtype, axis: int = 0
    ) -> None:
        """`tensor` is `part` of the tensor `name`, which has this `shape`: some rows, or with `axis` 1 some columns.

        Numbers count as the values that a layer gets, in `dtype`, however they are stored; those of a layer that
        quantizes its inputs as such. Ids count as they are.
        """
        assert len(part) == axis + 1 and ALL * axis == part[:axis], f"{name}: {part} divides more than dimension {axis}"
        first, end, _ = part[axis].indices(shape[axis])
        if first >= end:
            return
        rounds = isinstance(tensor, QuantizedWeight) and tensor.quantizes_inputs is not None
        if isinstance(tensor, torch.Tensor) and not tensor.is_floating_point():
            dtype = tensor.dtype
        data: Iterable[np.ndarray] = ()
        if self._has_bytes:
            data = dense(tensor).to(dtype).movedim(axis, 0).contiguous().view(end - first, -1).view(torch.uint8).numpy()
        kind = "int8 times int8" if rounds else str(dtype).removeprefix("torch.")
        rows = TensorRows(name, kind, tuple(shape), first, end, digest_rows(data, first), axis)
        known = self._rows.setdefault((name, first, end), rows)
        assert known == rows, f"{name} has been read twice, as {known} and as {rows}"

    def rows(self, prefix: str = "") -> tuple[TensorRows, ...]:
        """Returns the rows read so far, under names with this prefix."""
        return tuple(structs.replace(rows, name=prefix + rows.name) for rows in self._rows.values())


@dataclass(slots=True)
class LoadedSize:
    """How many weights layers have taken so far, and their bytes; what ranks share, each of them counts. Also how the
    layers round their inputs, each way once (`QuantizedWeight.quantizes_inputs`).
    """

    num_weights: int = 0
    num_bytes: int = 0
    roundings: set[str] = field(default_factory=set[str])

    def add(self, weight: LayerWeight) -> None:
        self.num_weights += weight.shape.numel()
        self.num_bytes += weight.nbytes
        if isinstance(weight, QuantizedWeight) and weight.quantizes_inputs is not None:
            self.roundings.add(weight.quantizes_inputs)


@dataclass(frozen=True, slots=True)
class Weights:
    """A source under a prefix, delivering one dtype on one device. `weights / "model"` extends the prefix.

    Of a tensor that the ranks of `group` divide it delivers only this rank's share. Layers are divided by outputs; with
    `divides_inputs`, those whose inputs are divided among the ranks are divided by inputs. Layers are `deterministic`,
    or as fast as possible, and `check` is called with each of them and its weight. With `expert_parallel` the ranks
    have whole experts; these are divided among the ranks of `expert_group`, by default `group`. Layers that are stored
    unquantized are rounded as `load_quantization` says, and so are the inputs of quantized ones. `size` counts what is
    delivered. Layers that may have adapters register with `lora`, if there is one.
    """

    source: WeightSource
    dtype: torch.dtype
    device: torch.device
    deterministic: bool = False
    prefix: str = ""
    delivery: Delivery = direct
    group: TensorGroup = ALONE
    divides_inputs: bool = False
    expert_parallel: ExpertParallelConfig | None = None
    expert_group: TensorGroup | None = None
    digest: WeightsDigest = field(default_factory=WeightsDigest)
    check: Check = trust
    load_quantization: LoadQuantization = AS_STORED
    size: LoadedSize = field(default_factory=LoadedSize)
    lora: LoraModel | None = None

    def __truediv__(self, part: str | int) -> Weights:
        return replace(self, prefix=f"{self.prefix}{part}.")

    def has(self, name: str) -> bool:
        """Returns whether there is a tensor `prefix + name`."""
        return self.source.has(self.prefix + name)

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """Returns the tensor `prefix + name`, of exactly this shape: all of it, on every rank."""
        return self._delivered([self._read(name, shape)], shape)

    def whole(self) -> Weights:
        """Returns the view that delivers whole tensors to every rank."""
        return replace(self, group=ALONE)

    @property
    def share(self) -> Share:
        """This rank's share of what its group divides."""
        return Share(self.group.index, self.group.count)

    def tensors(self, rows: Mapping[str, int], *width: int, own: Mapping[str, range] | None = None) -> torch.Tensor:
        """Returns [sum of this rank's rows, *width]: its rows of each tensor `prefix + name`, which is [rows, *width].

        `own` names them, by default this rank's share of each tensor.
        """
        return self._delivered(*self._read_rows(self._pieces(rows, own), *width))

    def layer_weight(self, rows: Mapping[str, int], width: int, own: Mapping[str, range] | None = None) -> LayerWeight:
        """Returns what `tensors` returns, quantized if the checkpoint's tensors are and a layer computes with them."""
        return self._joined(*self._read_rows(self._pieces(rows, own), width))

    def _pieces(
        self, rows: Mapping[str, int], own: Mapping[str, range] | None = None, stored_as: str | None = None
    ) -> list[_Piece]:
        """Returns this rank's pieces of tensors, or of the one tensor that has them all, one after another."""
        own = {name: self.share.part(count) for name, count in rows.items()} if own is None else own
        if stored_as is None:
            return [(name, count, own[name]) for name, count in rows.items()]
        total, pieces, first = sum(rows.values()), list[_Piece](), 0
        for name, count in rows.items():
            pieces.append((stored_as, total, range(first + own[name].start, first + own[name].stop)))
            first += count
        return pieces

    def _read_rows(
        self, pieces: Sequence[_Piece], *width: int, kind: str = ""
    ) -> tuple[Iterable[LayerWeight], Sequence[int]]:
        """Returns the pieces, which are read one after another, and the shape of all together."""
        parts = (
            self._read(f"{name}{kind}", (count, *width), (slice(own.start, own.stop),)) for name, count, own in pieces
        )
        return parts, (sum(len(own) for _, _, own in pieces), *width)

    def _delivered(self, parts: Iterable[LayerWeight], shape: Sequence[int]) -> torch.Tensor:
        weight = self.delivery(map(dense, parts), shape, self.dtype, self.device)
        self.size.add(weight)
        return weight

    def _joined(self, parts: Iterable[LayerWeight], shape: Sequence[int]) -> LayerWeight:
        """Returns the rows of all parts, quantized if they are of one kind, or if layers are quantized here."""
        if not keeps_quantized(self.dtype, self.device):
            return self._delivered(parts, shape)
        found = list(_join_alike(parts))
        bits = self.load_quantization.layers
        if len(found) > 1 or not isinstance(found[0], QuantizedWeight):
            # What is stored in several ways is not rounded again.
            if not bits or len(shape) == 1 or any(isinstance(part, QuantizedWeight) for part in found):
                return self._delivered(found, shape)
            found = [
                quantize_absmax(self.delivery(map(dense, found), shape, self.dtype, self.device), bits, LOADED_GROUP)
            ]
        weight = found[0]
        assert isinstance(weight, QuantizedWeight)
        if self.load_quantization.activations and weight.has_integers and weight.quantizes_inputs is None:
            weight = replace(weight, quantizes_inputs="by group")
        self.size.add(weight)
        return weight

    def of_expert(
        self, name: str, expert: int, shape: Sequence[int], own: Sequence[range], is_transposed: bool = False
    ) -> LayerWeight:
        """Returns [sum of `own`, *shape[2:]]: these rows of one expert's part of the tensor `prefix + name`, which has
        all experts and this shape; or, `is_transposed`, these of its columns, [sum of `own`, shape[1]].

        The digest knows it as a tensor of the rows of all experts, one expert after another.
        """
        num_rows, *width = (shape[2], shape[1]) if is_transposed else shape[1:]
        name, parts = self.prefix + name, list[LayerWeight]()
        for rows in own:
            place = (slice(None), slice(rows.start, rows.stop)) if is_transposed else (slice(rows.start, rows.stop),)
            part = self.source.read(name, shape, (slice(expert, expert + 1), *place))
            if not isinstance(part, QuantizedWeight):
                part = part[0].T if is_transposed else part[0]
            flat = slice(expert * num_rows + rows.start, expert * num_rows + rows.stop)
            self.digest.add(name, (shape[0] * num_rows, *width), (flat,), part, self.dtype)
            parts.append(part)
        return self._joined(parts, (sum(map(len, own)), *width))

    def linear(
        self,
        outputs: Mapping[str, int],
        width: int,
        bias: bool = False,
        own: Mapping[str, range] | None = None,
        is_wide: bool = False,
        stored_as: str | None = None,
        order: torch.Tensor | None = None,
    ) -> Linear:
        """Returns the projections `outputs` (name -> number of features) of `width` inputs as one layer.

        It has this rank's features, which `own` names, by default its share of each projection, and in another `order`
        if one is given ([own features] int64). `stored_as` is the one tensor that has all of them, one after another,
        in a checkpoint that stores them so.
        """
        pieces = self._pieces(outputs, own, stored_as)
        layer = self._read_linear(stored_as or ", ".join(outputs), pieces, width, bias, is_wide, order)
        if self.lora is not None:
            projections = [(self.prefix + name, count, own) for name, count, own in pieces]
            layer.adapters = self.lora.register(projections, width, order)
        return layer

    def _read_linear(
        self, name: str, pieces: Sequence[_Piece], width: int, bias: bool, is_wide: bool, order: torch.Tensor | None
    ) -> Linear:
        biases = self._delivered(*self._read_rows(pieces, kind=".bias")) if bias else None
        parts, shape = self._read_rows(pieces, width, kind=".weight")
        if order is not None and biases is not None:
            biases = biases[order.to(biases.device)]
        if keeps_quantized(self.dtype, self.device):
            parts = list(_join_alike(parts))
            if len(parts) > 1 and any(isinstance(part, QuantizedWeight) for part in parts):
                in_order = parts if order is None else _runs_in_order(parts, order)
                if len(in_order) <= _MOST_RUNS:
                    return self._linear_of_parts(name, in_order, biases, is_wide)
        weight = self._joined(parts, shape)
        return self.linear_of(name, weight if order is None else reordered(weight, order), biases, is_wide)

    def _linear_of_parts(
        self, name: str, parts: Sequence[LayerWeight], biases: torch.Tensor | None, is_wide: bool
    ) -> Linear:
        """Returns the layer of weights of several kinds."""
        sizes = [part.shape[0] for part in parts]
        split = [None] * len(parts) if biases is None else biases.split(sizes)
        weights = [self._joined([part], part.shape) for part in parts]
        return Linear.joined([self.linear_of(name, *each, is_wide) for each in zip(weights, split, strict=True)])

    def whole_linear(
        self, name: str, size: int, width: int, bias: bool = False, is_wide: bool = False
    ) -> GatheredLinear:
        """Returns the projection `name` to `size` features; every rank computes its share of them."""
        return self.gathered(self.linear({name: size}, width, bias, is_wide=is_wide), size)

    def joining_linear(self, name: str, size: int, widths: Sequence[int], bias: bool = False) -> JoiningLinear:
        """Returns the projection `name` to `size` features; the ranks have `widths` of its inputs, in their order."""
        index, width = self.group.index, sum(widths)
        if not self.divides_inputs:
            return GatheringLinear(Gather(self.group, widths), self.whole_linear(name, size, width, bias))
        first = sum(widths[:index])
        own = (slice(None), slice(first, first + widths[index]))
        weight = self._joined([self._read(f"{name}.weight", (size, width), own, axis=1)], (size, widths[index]))
        biases = self.tensor(f"{name}.bias", size) if bias and index == 0 else None
        return SummingLinear(self.linear_of(name, weight, biases), self.group)

    def embedding(self, name: str, vocab_size: int, hidden_size: int) -> Embedding:
        """Returns the vectors of `vocab_size` tokens, divided among the ranks."""
        weight = replace(self, load_quantization=AS_STORED).layer_weight({f"{name}.weight": vocab_size}, hidden_size)
        if isinstance(weight, QuantizedWeight):
            self.size.num_bytes += weight.unpacked_nbytes - weight.nbytes
        return Embedding(weight, self.group, vocab_size)

    def tied(self, weight: LayerWeight) -> LayerWeight:
        """Returns an embedding's weight as the output head that is tied to it takes it."""
        is_changed = self.load_quantization.layers or isinstance(weight, QuantizedWeight)
        return self._joined([weight], weight.shape) if is_changed else weight

    def gathered(self, linear: Linear, size: int) -> GatheredLinear:
        """Combines a layer with this rank's share of `size` features with those of the other ranks."""
        return GatheredLinear(linear, self.group, size)

    def check_on_cpu(self, what: str) -> None:
        """Raises ConfigError on a GPU, and where a CPU stands for one, since its kernels lack `what`."""
        if has_gpu_kernels(self.device):
            raise ConfigError(f"the model has {what}, which is computed on a CPU only (--device cpu)")

    def linear_of(
        self, name: str, weight: LayerWeight, bias: torch.Tensor | None = None, is_wide: bool = False
    ) -> Linear:
        """Returns a layer of an existing weight, [out_features, in_features]; errors call it `prefix + name`."""
        linear = Linear(weight, bias, self.deterministic, is_wide, self.dtype)
        self.check(self.prefix + name, linear, weight)
        return linear

    def heads_linear_of(self, name: str, weight: torch.Tensor) -> HeadsLinear:
        """Returns a layer per head of an existing weight, [heads, out_features, in_features]."""
        linear = HeadsLinear(weight, self.deterministic)
        self.check(self.prefix + name, linear, weight)
        return linear

    def integers(self, name: str, *shape: int) -> torch.Tensor:
        """Returns the tensor as int64, for tensors of ids."""
        return dense(self._read(name, shape)).to(device=self.device, dtype=torch.int64)

    def _read(self, name: str, shape: Sequence[int], part: Part = ALL, axis: int = 0) -> LayerWeight:
        tensor = self.source.read(self.prefix + name, shape, part)
        self.digest.add(self.prefix + name, shape, part, tensor, self.dtype, axis)
        return tensor

"""The tensors of a GGUF file, under the names and with the shapes of a Hugging Face checkpoint.

Blocks are unpacked as ggml defines them (`ggml-common.h` and `ggml-quants.c` in the repository ggml-org/ggml): a number
is a code times the scale of its group, or that less the group's minimum.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from penstock.config.gguf.architectures import Place, TensorNames, fields_of
from penstock.config.gguf.file import BlockType, GGUFFile, StoredTensor, open_gguf
from penstock.kernels.block_codes import Planes, unpack_codes
from penstock.kernels.host_memory import aligned_bytes
from penstock.kernels.quantized import E2M1, QuantizedWeight, dense, integers, reordered, signed_integers
from penstock.models.sources.gguf_orders import Orders
from penstock.models.sources.source import ALL, Part, progress_of
from penstock.utils.errors import ConfigError

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_THREE = 3
# The memory of codes that is used again; only what has been used is resident.
_CODE_BYTES = 1 << 28
# The vectors of tokens, to which the output head may be tied, and those of every layer.
_EMBEDDINGS = ("token_embd.weight", "per_layer_token_embd.weight")
# What `attn_kv_b` is divided into: for every head, what makes keys, transposed, and what makes values.
_LATENT_PARTS = ("attn_k_b", "attn_v_b")


class GGUFSource:
    """A `WeightSource`."""

    def __init__(self, path: Path) -> None:
        self._file = open_gguf(path)
        self._names = TensorNames(self._file)
        self._orders = Orders(self._names.family, fields_of(self._file))
        self._memory = _Memory()
        self._progress = progress_of(len(self._file.tensors))

    def has(self, name: str) -> bool:
        place = self._names.find(name)
        return place is not None and (place.name in self._file.tensors or self._latent_parts(place) is not None)

    def close(self) -> None:
        self._progress.close()

    def read(self, name: str, shape: Sequence[int], part: Part = ALL) -> torch.Tensor | QuantizedWeight:
        place = self._names.find(name)
        if place is None:
            raise ConfigError(f"{self._file.path} has no tensor {name}: it is incomplete or another model's")
        if len(shape) < _THREE:
            return self._read(name, place, shape, part)
        if shape[1] == 1:
            # Taps of every channel.
            return dense(self._read(name, place, (shape[0], shape[2]), part[:1])).unsqueeze(1)
        assert part[0].stop == part[0].start + 1, f"experts {part[0]} of {name}"
        found = self._read(name, replace(place, expert=part[0].start), shape[1:], part[1:])
        return found if isinstance(found, QuantizedWeight) else found[None]

    def _read(self, name: str, place: Place, shape: Sequence[int], part: Part) -> torch.Tensor | QuantizedWeight:
        """Reads a part of a vector or a matrix."""
        latent_parts = self._latent_parts(place)
        if latent_parts is None:
            self._check(name, place, shape)
        self._progress.update(1 if latent_parts is None else len(latent_parts))
        try:
            if latent_parts is not None:
                return self._join_latent(latent_parts, shape, part)
            if len(shape) == 1:
                return self._vector(name, place, self._orders.rows(name, shape[0], place.half))[part[0]]
            return self._matrix(name, place, shape, part)
        except ValueError as error:
            raise ConfigError(f"{self._file.path}: {place.name} cannot be used: {error}") from None

    def _matrix(self, name: str, place: Place, shape: Sequence[int], part: Part) -> torch.Tensor | QuantizedWeight:
        first, end, _ = part[0].indices(shape[0])
        order = self._orders.rows(name, shape[0], place.half)
        if order is None:
            rows = self._rows(place, shape[0], first, end)
        else:
            # The rows between the first and the last are read too; of reordered heads these are a few.
            order = order[first:end]
            first, end = (int(order.min()), int(order.max()) + 1) if len(order) else (0, 0)
            rows = reordered(self._rows(place, shape[0], first, end), order - first)
        inputs = self._orders.inputs(name)
        if inputs is not None:
            rows = _with_inputs(rows, *inputs)
        columns = part[1] if len(part) > 1 else slice(None)
        return rows.part(columns=columns) if isinstance(rows, QuantizedWeight) else rows[:, columns]

    def _vector(self, name: str, place: Place, order: torch.Tensor | None) -> torch.Tensor:
        stored = self._file.tensors[place.name]
        rows = range(stored.num_rows) if place.expert is None else range(place.expert, place.expert + 1)
        values, family = self._floats(place.name, stored, rows.start, rows.stop).flatten(), self._names.family
        if order is not None:
            values = values[order]
        module = name.rpartition(".")[0]
        if module.endswith("norm") and not module.endswith(family.plain_norms):
            values = values.float() - family.norm_offset
        elif name.endswith("A_log"):
            if not (values < 0).all():
                raise ValueError("minus the exponential of a number is negative")
            values = (-values.float()).log()
        return values

    def _check(self, wanted: str, place: Place, shape: Sequence[int]) -> None:
        """Raises ConfigError if a tensor of a matrix or a vector is missing or has another shape."""
        rows, *width = shape
        # Those of the two tensors that have a half of the rows each, or of the one that has the rows of two.
        rows = rows // 2 if place.second is not None else rows * (1 if place.half is None else 2)
        for name in filter(None, (place.name, place.second)):
            expected = (rows, *width)
            if name not in self._file.tensors:
                raise ConfigError(
                    f"{self._file.path} has no tensor {name} ({wanted}): it is incomplete or another model's"
                )
            stored = self._file.tensors[name]
            found = stored.shape if place.expert is None else stored.shape[1:]
            if place.expert is not None and place.expert >= stored.shape[0]:
                raise ConfigError(f"{self._file.path}: {name} has no expert {place.expert}")
            # Dimensions of one do not count, nor those of a vector.
            is_alike = [each for each in found if each > 1] == [each for each in expected if each > 1]
            if not is_alike and (len(expected) > 1 or math.prod(found) != math.prod(expected)):
                raise ConfigError(f"{self._file.path}: {name} has shape {list(found)}, not {list(expected)}")

    def _latent_parts(self, place: Place) -> tuple[str, str] | None:
        """Returns the tensors of keys and of values that the file has in place of the one that makes both."""
        if place.name in self._file.tensors:
            return None
        keys, values = (place.name.replace("attn_kv_b", part) for part in _LATENT_PARTS)
        return (keys, values) if keys != place.name and {keys, values} <= self._file.tensors.keys() else None

    def _join_latent(self, names: tuple[str, str], shape: Sequence[int], part: Part) -> torch.Tensor:
        """Returns rows of [heads * (plain + value), rank] of keys [heads, rank, plain] and values [heads, value, rank],
        as values, since keys have their groups along other inputs.
        """
        keys, values = (self._file.tensors[name] for name in names)
        rows, rank = shape
        others = values.shape[:1] + values.shape[2:]
        if len(keys.shape) != _THREE or keys.shape[1] != rank or others != (keys.shape[0], rank):
            raise ConfigError(f"{self._file.path}: {names[0]} {list(keys.shape)} does not fit {list(values.shape)}")
        size = keys.shape[2] + values.shape[1]
        if keys.shape[0] * size != rows:
            raise ConfigError(
                f"{self._file.path}: {names[0]} and {names[1]} have {keys.shape[0] * size} rows of {rows}"
            )
        first, end, _ = part[0].indices(rows)
        heads = range(first // size, -(-end // size))
        parts: list[torch.Tensor] = []
        for name, stored in zip(names, (keys, values), strict=True):
            begin, stop = heads.start * stored.shape[1], heads.stop * stored.shape[1]
            found = self._span(Place(name), stored, begin, stop)
            parts.append(dense(found).view(len(heads), stored.shape[1], -1))
        joined = torch.cat((parts[0].transpose(1, 2), parts[1]), 1).flatten(0, 1)[first - heads.start * size :]
        return joined[: end - first, part[1] if len(part) > 1 else slice(None)]

    def _rows(self, place: Place, count: int, first: int, end: int) -> torch.Tensor | QuantizedWeight:
        """Returns stored rows from `first` to `end` of a matrix of `count` rows."""
        if place.second is not None:
            half = count // 2
            place = replace(place, name=place.second if first >= half else place.name, second=None)
            if first < half < end:
                raise ValueError(f"rows {first} to {end} are in two tensors")
            first, end = (first - half, end - half) if first >= half else (first, end)
        return self._span(place, self._file.tensors[place.name], first, end)

    def _span(self, place: Place, stored: StoredTensor, first: int, end: int) -> torch.Tensor | QuantizedWeight:
        skipped = 0 if place.expert is None else place.expert * (stored.num_rows // stored.shape[0])
        if stored.type.name in _FLOATS:
            return self._floats(place.name, stored, first + skipped, end + skipped)
        with self._file.mapped_rows(place.name, first + skipped, end + skipped) as rows:
            # The codes of an embedding stay, and must not keep the memory of layers.
            memory = _Memory() if place.name in _EMBEDDINGS else self._memory
            return _FORMATS[stored.type.name].unpack(rows, stored.type, memory)

    def _floats(self, name: str, stored: StoredTensor, first: int, end: int) -> torch.Tensor:
        if stored.type.name not in _FLOATS:
            raise ValueError(f"its numbers are {stored.type.name}, and floats are expected")
        return torch.from_numpy(self._file.rows(name, first, end)).view(_FLOATS[stored.type.name])


def _with_inputs(rows: torch.Tensor | QuantizedWeight, order: torch.Tensor, run: int) -> torch.Tensor | QuantizedWeight:
    """Returns runs of inputs in another order: as values, if runs divide groups."""
    if isinstance(rows, QuantizedWeight):
        try:
            return rows.with_inputs(order, run)
        except ValueError:
            rows = rows.dequantize()
    return rows.unflatten(1, (-1, run))[:, order].flatten(1)


# Of every block scales, minima and factors, each [blocks, numbers of a block], as `QuantizedWeight` has them.
_Numbers = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


def _bytes(blocks: np.ndarray, first: int, count: int) -> torch.Tensor:
    """Returns a copy of some bytes of every block, [blocks, count] uint8."""
    out = torch.empty((len(blocks), count), dtype=torch.uint8)
    unpack_codes(blocks, Planes(first, count, 8), Planes(), out)
    return out


def _scales(blocks: np.ndarray) -> _Numbers:
    return _bytes(blocks, 0, 2).view(torch.float16), None, None


def _scales_and_minima(blocks: np.ndarray) -> _Numbers:
    """What is subtracted is stored negated."""
    scales, minima = _bytes(blocks, 0, 4).view(torch.float16).split(1, 1)
    return scales, -minima, None


def _k_numbers(blocks: np.ndarray) -> _Numbers:
    """Eight scales and minima are 6-bit numbers times a float16 of the block: four of each in the low bits of bytes 0
    to 3 and 4 to 7; of the others, bytes 8 to 11 have the low bits, and the top bits of the first eight the high ones.
    """
    factors, scales, minima, low = _bytes(blocks, 0, 16).view(torch.int32).unbind(1)
    four_bits, top_bits, six_bits = 0x0F0F0F0F, 0x30303030, 0x3F3F3F3F
    scales = torch.stack((scales & six_bits, (low & four_bits) | (scales >> 2 & top_bits)), 1)
    minima = torch.stack((minima & six_bits, (low >> 4 & four_bits) | (minima >> 2 & top_bits)), 1)
    return scales.view(torch.int8), minima.view(torch.int8), factors[:, None].view(torch.float16)


def _q6_k_numbers(blocks: np.ndarray) -> _Numbers:
    numbers = _bytes(blocks, 192, 18)
    return numbers[:, :16].view(torch.int8), None, numbers[:, 16:].view(torch.float16)


def _mxfp4_numbers(blocks: np.ndarray) -> _Numbers:
    """The exponent of a power of two has the bias of bfloat16; the smallest is denormal."""
    exponents = _bytes(blocks, 0, 1)
    return (exponents.to(torch.int16) << 7).masked_fill(exponents == 0, 1 << 6).view(torch.bfloat16), None, None


class _Memory:
    """Memory for codes. Those of a layer's tensors are neighbours, and the next layer's take their place when nothing
    refers to them any more: the system would zero new memory, which takes longer than unpacking.
    """

    def __init__(self) -> None:
        self._all = aligned_bytes(_CODE_BYTES).numpy()
        self._taken = 0
        self._in_use: Callable[[], np.ndarray | None] = lambda: None

    def take(self, count: int) -> torch.Tensor:
        """Returns [count] uint8."""
        if count > _CODE_BYTES:
            return aligned_bytes(count)
        array = self._in_use()
        if array is not None and self._taken + count > _CODE_BYTES:
            self._all, array = aligned_bytes(_CODE_BYTES).numpy(), None
        if array is None:
            # Every tensor of these bytes keeps this array.
            array, self._taken = self._all[:], 0
            self._in_use = weakref.ref(array)
        self._taken += count
        return torch.from_numpy(array)[self._taken - count : self._taken]


@dataclass(frozen=True, slots=True)
class _Format:
    """What the bytes of a type's block are."""

    codebook: torch.Tensor
    low: Planes
    high: Planes
    numbers: Callable[[np.ndarray], _Numbers]
    group: int = 32
    factor_groups: int = 0

    def unpack(self, stored: np.ndarray, type: BlockType, memory: _Memory) -> QuantizedWeight:
        """Returns the weight of rows of blocks, [rows, row_bytes] uint8."""
        rows, inputs = len(stored), stored.shape[1] // type.num_bytes * type.values
        blocks, groups = stored.reshape(-1, type.num_bytes), (rows, inputs // self.group)
        codes = memory.take(rows * inputs).view(len(blocks), type.values)
        unpack_codes(blocks, self.low, self.high, codes)
        scales, minima, factors = self.numbers(blocks)
        return QuantizedWeight(
            codes.view(rows, inputs),
            self.codebook,
            scales.reshape(groups),
            self.group,
            self.low.bits + self.high.bits,
            minima=None if minima is None else minima.reshape(groups),
            factors=None if factors is None else factors.view(rows, inputs // type.values, -1).movedim(2, 0),
            factor_groups=self.factor_groups,
            has_sound_codes=True,
        )


_FORMATS = {
    "Q4_0": _Format(integers(4, 8), Planes(2, 16, 4), Planes(), _scales),
    "Q4_1": _Format(integers(4), Planes(4, 16, 4), Planes(), _scales_and_minima),
    "Q5_0": _Format(integers(5, 16), Planes(6, 16, 4), Planes(2, 1, 1), _scales),
    "Q5_1": _Format(integers(5), Planes(8, 16, 4), Planes(4, 1, 1), _scales_and_minima),
    "Q8_0": _Format(signed_integers(8), Planes(2, 32, 8), Planes(), _scales),
    "Q4_K": _Format(integers(4), Planes(16, 32, 4), Planes(), _k_numbers, factor_groups=8),
    "Q5_K": _Format(integers(5), Planes(48, 32, 4), Planes(16, 32, 1), _k_numbers, factor_groups=8),
    "Q6_K": _Format(integers(6, 32), Planes(0, 64, 4), Planes(128, 32, 2), _q6_k_numbers, 16, 16),
    "MXFP4": _Format(E2M1, Planes(1, 16, 4), Planes(), _mxfp4_numbers),
}


def bytes_in_memory(file: GGUFFile, dtype: torch.dtype, keeps_quantized: bool) -> int:
    """Returns the memory that a file's weights take. Quantized ones stay so if `keeps_quantized`, those of an embedding
    with a byte for every code; all others are in `dtype`.
    """
    memory, total = _Memory(), 0
    for name, tensor in file.tensors.items():
        kind = tensor.type
        packed_bytes = unpacked_bytes = kind.values * dtype.itemsize
        if keeps_quantized and kind.name in _FORMATS:
            weight = _FORMATS[kind.name].unpack(np.zeros((1, kind.num_bytes), np.uint8), kind, memory)
            packed_bytes, unpacked_bytes = weight.nbytes, weight.unpacked_nbytes
        total += tensor.num_blocks * (unpacked_bytes if name in _EMBEDDINGS else packed_bytes)
        if name == _EMBEDDINGS[0] and keeps_quantized and "output.weight" not in file.tensors:
            total += tensor.num_blocks * packed_bytes
    return total

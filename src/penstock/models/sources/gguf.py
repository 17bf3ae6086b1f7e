"""The tensors of a GGUF file, under the names and with the shapes of a Hugging Face checkpoint.

Blocks are unpacked as ggml defines them (`ggml-common.h` and `ggml-quants.c` in the repository ggml-org/ggml): a number
is a code times the scale of its group, or that less the group's minimum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from penstock.config.gguf.architectures import Place, TensorNames, fields_of
from penstock.config.gguf.file import GGUFFile, StoredTensor, open_gguf
from penstock.kernels.quantized import E2M1, QuantizedWeight, dense, integers, reordered, signed_integers
from penstock.models.sources.gguf_orders import Orders
from penstock.models.sources.source import ALL, Part, progress_of
from penstock.utils.errors import ConfigError

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_GROUP = 32
_THREE = 3
# Numbers that are unpacked at a time.
_CHUNK = 1 << 22
# What `attn_kv_b` is divided into: for every head, what makes keys, transposed, and what makes values.
_LATENT_PARTS = ("attn_k_b", "attn_v_b")


class GGUFSource:
    """A `WeightSource`."""

    def __init__(self, path: Path) -> None:
        self._file = open_gguf(path)
        self._names = TensorNames(self._file)
        self._orders = Orders(self._names.family, fields_of(self._file))
        self._progress = progress_of(len(self._file.tensors))

    def has(self, name: str) -> bool:
        place = self._names.find(name)
        return place is not None and (place.name in self._file.tensors or self._latent_parts(place) is not None)

    def close(self) -> None:
        self._progress.close()

    def read(self, name: str, shape: Sequence[int], part: Part = ALL) -> torch.Tensor | QuantizedWeight:
        place = self._names.find(name)
        latent_parts = None if place is None else self._latent_parts(place)
        if latent_parts is not None:
            self._progress.update(2)
            return self._join_latent(latent_parts, shape, part)
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
        self._check(name, place, shape)
        self._progress.update()
        try:
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

    def _stored_shapes(self, place: Place, shape: Sequence[int]) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yields the tensors that a matrix or a vector is in, and the shapes that they must have."""
        rows, *width = shape
        if place.second is not None:
            yield place.name, (rows // 2, *width)
            yield place.second, (rows // 2, *width)
        else:
            yield place.name, (rows * 2 if place.half is not None else rows, *width)

    def _check(self, wanted: str, place: Place, shape: Sequence[int]) -> None:
        """Raises ConfigError if a tensor of a matrix or a vector is missing or has another shape."""
        for name, expected in self._stored_shapes(place, shape):
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
        if keys.shape[:2] != (keys.shape[0], rank) or values.shape != (keys.shape[0], values.shape[1], rank):
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
        joined = torch.cat((parts[0].transpose(1, 2), parts[1]), 1).flatten(0, 1)
        return joined[first - heads.start * size : end - heads.start * size][
            :, part[1] if len(part) > 1 else slice(None)
        ]

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
        first, end = first + skipped, end + skipped
        if stored.type.name in _FLOATS:
            return self._floats(place.name, stored, first, end)
        # Some rows at a time, since the intermediate results take several times the memory of the codes.
        step, unpack = max(1, _CHUNK // max(1, stored.shape[-1])), _UNPACKERS[stored.type.name]
        parts: list[QuantizedWeight] = []
        for start in range(first, end, step):
            rows = self._file.rows(place.name, start, min(start + step, end))
            parts.append(unpack(torch.from_numpy(rows).view(-1, stored.type.num_bytes), len(rows)))
        return QuantizedWeight.cat(parts)

    def _floats(self, name: str, stored: StoredTensor, first: int, end: int) -> torch.Tensor:
        dtype = _FLOATS.get(stored.type.name)
        if dtype is None:
            raise ValueError(f"its numbers are {stored.type.name}, and floats are expected")
        return torch.from_numpy(self._file.rows(name, first, end)).view(dtype)


def _with_inputs(rows: torch.Tensor | QuantizedWeight, order: torch.Tensor, run: int) -> torch.Tensor | QuantizedWeight:
    """Returns runs of inputs in another order: as values, if runs divide groups."""
    if isinstance(rows, QuantizedWeight):
        try:
            return rows.with_inputs(order, run)
        except ValueError:
            rows = rows.dequantize()
    return rows.unflatten(1, (-1, run))[:, order].flatten(1)


def _halves(packed: torch.Tensor) -> torch.Tensor:
    """[n, bytes] -> [n, 2, bytes]: the low four bits of all bytes, then the high ones."""
    return torch.stack((packed & 15, packed >> 4), 1)


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Returns a float16 of every block, [n, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16)


def _by_rows(values: torch.Tensor, rows: int) -> torch.Tensor:
    return values.reshape(rows, -1).contiguous()


def _q4_0(blocks: torch.Tensor, rows: int) -> QuantizedWeight:
    codes = _halves(blocks[:, 2:])
    return QuantizedWeight(_by_rows(codes, rows), integers(4, 8), _by_rows(_half(blocks, 0), rows), _GROUP)


def _q4_1(blocks: torch.Tensor, rows: int) -> QuantizedWeight:
    """What is subtracted is stored negated."""
    scales, minima = _by_rows(_half(blocks, 0), rows), _by_rows(-_half(blocks, 2), rows)
    return QuantizedWeight(_by_rows(_halves(blocks[:, 4:]), rows), integers(4), scales, _GROUP, minima=minima)


def _fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    """[n, 4] -> [n, 32]: the bits of a 32-bit word, the lowest first, as the fifth bit of a code."""
    return (((packed[:, :, None] >> torch.arange(8, dtype=torch.uint8)) & 1) << 4).flatten(1)


def _q5_0(blocks: torch.Tensor, rows: int) -> QuantizedWeight:
    codes = _halves(blocks[:, 6:]).flatten(1) | _fifth_bits(blocks[:, 2:6])
    return QuantizedWeight(_by_rows(codes, rows), integers(5, 16), _by_rows(_half(blocks, 0), rows), _GROUP, 5)


def _q5_1(blocks: torch.Tensor, rows: int) -> QuantizedWeight:
    codes = _halves(blocks[:, 8:]).flatten(1) | _fifth_bits(blocks[:, 4:8])
    scales, minima = _by_rows(_half(blocks, 0), rows), _by_rows(-_half(blocks, 2), rows)
    return QuantizedWeight(_by_rows(codes, rows), integers(5), scales, _GROUP, 5, minima=minima)


def _q8_0(blocks: torch.Tensor, rows: int) -> QuantizedWeight:
    return QuantizedWeight(
        _by_rows(blocks[:, 2:], rows), signed_integers(8), _by_rows(_half(blocks, 0), rows), _GROUP, 8
    )


def _k_weight(codes: torch.Tensor, bits: int, blocks: torch.Tensor) -> QuantizedWeight:
    """Returns the weight [rows, inputs] of blocks with eight groups.

    Scales and minima are 6-bit numbers times a float16 of the block: four of each in the low bits of bytes 0 to 3 and 4
    to 7; of the other four, bytes 8 to 11 have the low bits, and the top bits of the first eight bytes the high ones.
    """
    packed, rows = blocks[:, 4:16], len(codes)
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), 1)
    minima = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), 1)
    return QuantizedWeight(
        codes,
        integers(bits),
        _by_rows(scales, rows).view(torch.int8),
        _GROUP,
        bits,
        minima=_by_rows(minima, rows).view(torch.int8),
        factors=torch.stack([_by_rows(_half(blocks, at), rows) for at in (0, 2)]),
        factor_groups=8,
    )


def _q4_k(blocks: torch.Tensor, rows: int) -> QuantizedWeight:
    codes = _halves(blocks[:, 16:].reshape(-1, 32))
    return _k_weight(_by_rows(codes, rows), 4, blocks)


def _q5_k(blocks: torch.Tensor, rows: int) -> QuantizedWeight:
    low = _halves(blocks[:, 48:].reshape(-1, 32)).view(-1, 8, 32)
    high = (blocks[:, None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1
    return _k_weight(_by_rows(low | (high << 4), rows), 5, blocks)


def _q6_k(blocks: torch.Tensor, rows: int) -> QuantizedWeight:
    """Half a block is 128 numbers: the low four bits of the first 64 and then the high ones, and two bits more of each
    quarter in 32 bytes. A group of 16 has a signed 8-bit number times the block's float16.
    """
    low = _halves(blocks[:, :128].reshape(-1, 64)).view(-1, 4, 32)
    high = (blocks[:, 128:192].reshape(-1, 1, 32) >> torch.tensor([[0], [2], [4], [6]], dtype=torch.uint8)) & 3
    scales = _by_rows(blocks[:, 192:208], rows).view(torch.int8)
    factors = _by_rows(_half(blocks, 208), rows)[None]
    codes = _by_rows(low | (high << 4), rows)
    return QuantizedWeight(codes, integers(6, 32), scales, 16, 6, factors=factors, factor_groups=16)


def _mxfp4(blocks: torch.Tensor, rows: int) -> QuantizedWeight:
    """The exponent of a power of two has the bias of bfloat16; the smallest is denormal."""
    exponents = blocks[:, :1]
    scales = (exponents.to(torch.int16) << 7).masked_fill(exponents == 0, 1 << 6).view(torch.bfloat16)
    return QuantizedWeight(_by_rows(_halves(blocks[:, 1:]), rows), E2M1, _by_rows(scales, rows), _GROUP)


_UNPACKERS: dict[str, Callable[[torch.Tensor, int], QuantizedWeight]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
}


def bytes_in_memory(file: GGUFFile, dtype: torch.dtype, keeps_quantized: bool) -> int:
    """Returns the memory that a file's weights take: those of layers as they are stored if they are kept so, the others
    and the embedding in `dtype`.
    """
    is_tied = "output.weight" not in file.tensors
    total = 0
    for name, tensor in file.tensors.items():
        dense_bytes = tensor.num_blocks * tensor.type.values * dtype.itemsize
        kept_bytes = dense_bytes
        if keeps_quantized and tensor.type.name in _UNPACKERS:
            block = torch.zeros((1, tensor.type.num_bytes), dtype=torch.uint8)
            kept_bytes = tensor.num_blocks * _UNPACKERS[tensor.type.name](block, 1).nbytes
        if name == "token_embd.weight":
            # A head of the same tensor is read again.
            kept_bytes = dense_bytes + (kept_bytes if is_tied else 0)
        total += kept_bytes
    return total

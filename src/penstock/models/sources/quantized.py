"""The tensors of a quantized checkpoint, under the names and with the shapes of one that is not.

Which tensors store a weight tells its format; `{layer}` is what precedes ".weight" in the weight's name:

    {layer}.weight_packed, weight_scale, weight_zero_point   integers of compressed-tensors, in 32-bit words
    {layer}.qweight, scales, qzeros, g_idx                   GPTQ (Frantar et al. 2022, arXiv:2210.17323), AWQ
                                                             (Lin et al. 2023, arXiv:2306.00978)
    {layer}.weight in 8 bits, with a scale beside it         floats and integers, by rows or in blocks
    {name}_blocks, {name}_scales                             4-bit floats of all experts (gpt-oss)

A weight is delivered as it is stored (`QuantizedWeight`), or in bfloat16 where its groups are no intervals of inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from penstock.config.quantization import AWQ, COMPRESSED, QuantizationConfig
from penstock.kernels.quantized import E2M1, E4M3, QuantizedWeight, integers, signed_integers
from penstock.models.sources.checkpoint import CheckpointSource
from penstock.models.sources.source import ALL, Part
from penstock.utils.errors import ConfigError

_WEIGHT = ".weight"
_WORD_BITS = 32
# AWQ stores the outputs of a word in the order 0, 2, 4, 6, 1, 3, 5, 7: so output i is its value number _AWQ_PLACES[i].
_AWQ_PLACES = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])


class QuantizedSource:
    """A `WeightSource` over one with the stored tensors. Tensors that are not quantized pass unchanged."""

    def __init__(self, source: CheckpointSource, config: QuantizationConfig) -> None:
        self._source = source
        self._config = config

    def has(self, name: str) -> bool:
        return self._source.has(name) or self._reader(name) != self._read_scaled

    def close(self) -> None:
        self._source.close()

    def read(self, name: str, shape: Sequence[int], part: Part = ALL) -> torch.Tensor | QuantizedWeight:
        try:
            return self._reader(name)(name, shape, part)
        except ValueError as error:
            raise ConfigError(f"{self._source.folder}: the quantized tensor {name!r} cannot be used: {error}") from None

    def _reader(self, name: str) -> Callable[[str, Sequence[int], Part], torch.Tensor | QuantizedWeight]:
        layer = name.removesuffix(_WEIGHT)
        if self._source.has(f"{name}_blocks"):
            return self._read_micro_floats
        if layer != name and self._source.has(f"{layer}.weight_packed"):
            return self._read_packed
        if layer != name and self._source.has(f"{layer}.qweight"):
            return self._read_awq if self._config.method == AWQ else self._read_gptq
        return self._read_scaled

    # ---- Integers in words ----

    def _read_packed(self, name: str, shape: Sequence[int], part: Part) -> torch.Tensor | QuantizedWeight:
        """Words hold consecutive inputs, [rows, inputs in words], and of zero points consecutive rows."""
        rows, inputs = shape
        own, columns = _two(part)
        bits = self._bits(f"{name}_packed", 1, inputs)
        words = self._source.read(f"{name}_packed", (rows, _words(inputs, bits)), (own,))
        # 1 where the scales have no dimension: reading them then refuses their shape.
        groups = math.prod(self._source.shape(f"{name}_scale")[-1:])
        scales = self._source.read(f"{name}_scale", (rows, groups), (own,))
        zeros = None
        if self._source.has(f"{name}_zero_point"):
            packed = self._source.read(f"{name}_zero_point", (_words(rows, bits), groups))
            zeros = _unless_middle(_unpack(packed.T, bits).T[:rows], bits, own)
        return self._grouped(_unpack(words, bits)[:, :inputs], bits, scales, zeros, f"{name}_g_idx", columns)

    def _read_gptq(self, name: str, shape: Sequence[int], part: Part) -> torch.Tensor | QuantizedWeight:
        """Words hold consecutive inputs, [inputs in words, rows]."""
        rows, inputs = shape
        layer, (own, columns) = name.removesuffix(_WEIGHT), _two(part)
        bits = self._bits(f"{layer}.qweight", 0, inputs)
        words = self._source.read(f"{layer}.qweight", (_words(inputs, bits), rows), (slice(None), own))
        scales, zeros = self._read_gptq_scales(layer, rows, own, bits)
        return self._grouped(_unpack(words.T, bits)[:, :inputs], bits, scales, zeros, f"{layer}.g_idx", columns)

    def _read_awq(self, name: str, shape: Sequence[int], part: Part) -> torch.Tensor | QuantizedWeight:
        """Words hold eight rows in AWQ's order, [inputs, rows in words]."""
        rows, inputs = shape
        layer, (own, columns) = name.removesuffix(_WEIGHT), _two(part)
        covering, inner = _covering(own, rows, 4)
        words = self._source.read(f"{layer}.qweight", (inputs, _words(rows, 4)), (slice(None), covering))
        scales, zeros = self._read_gptq_scales(layer, rows, own, 4)
        codes = _unpack(words, 4, _AWQ_PLACES)[:, inner].T
        return self._grouped(codes, 4, scales, zeros, f"{layer}.g_idx", columns)

    def _read_gptq_scales(
        self, layer: str, rows: int, own: slice, bits: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns scales and zero points, [own rows, groups]. Words of zero points hold rows, [groups, words]."""
        groups = math.prod(self._source.shape(f"{layer}.scales")[:1])
        scales = self._source.read(f"{layer}.scales", (groups, rows), (slice(None), own)).T
        words = self._source.read(f"{layer}.qzeros", (groups, _words(rows, bits)))
        # The format subtracts one from all numbers of a word in one subtraction, so a 0 borrows from its neighbour.
        ones = self._config.counts_zeros_from_one * (2**_WORD_BITS // (2**bits - 1))
        zeros = _unpack(words, bits, _AWQ_PLACES if self._config.method == AWQ else None, ones)[:, :rows].T
        return scales, _unless_middle(zeros, bits, own)

    def _bits(self, name: str, axis: int, inputs: int) -> int:
        """Returns the bits of a number, by the number of words that hold `inputs` of them."""
        words = math.prod(self._source.shape(name)[axis : axis + 1])
        for bits in (4, 8):
            if words == _words(inputs, bits):
                return bits
        raise ValueError(f"{words} words for {inputs} inputs are of neither 4 nor 8 bits each")

    def _grouped(
        self,
        codes: torch.Tensor,
        bits: int,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
        order: str,
        columns: slice,
    ) -> torch.Tensor | QuantizedWeight:
        """Returns some inputs of a weight of integers. `zeros`, the integers that stand for 0, are by default the
        middle ones. The tensor `order`, if there is one, has the group of every input.
        """
        inputs, groups = codes.shape[1], scales.shape[1]
        # That which the configuration names for all layers, or another.
        sizes = self._config.group, inputs // max(1, groups)
        group = next((size for size in sizes if size > 0 and -(-inputs // size) == groups), 0)
        if not group:
            raise ValueError(f"it has {groups} scales per row for {inputs} inputs")
        middle = 2 ** (bits - 1)
        of_inputs = torch.arange(inputs) // group
        if self._source.has(order):
            stored = self._source.read(order, (inputs,)).long()
            # compressed-tensors leaves -1 where it has not set an order.
            is_unset = self._config.method == COMPRESSED and bool((stored == -1).any())
            if not is_unset and not torch.equal(stored, of_inputs):
                if int(stored.min()) < 0 or int(stored.max()) >= groups:
                    raise ValueError(f"{order} names groups that are none of its {groups}")
                shifted = codes.float() - (middle if zeros is None else zeros.float()[:, stored])
                return (shifted * _floats(scales)[:, stored]).bfloat16()[:, columns]
        book = integers(bits, middle if zeros is None else 0)
        zeros = None if zeros is None else zeros.to(scales.dtype).contiguous()
        weight = QuantizedWeight(codes.contiguous(), book, scales.contiguous(), group, bits, zeros)
        return weight.part(columns=columns)

    # ---- Numbers of 8 bits, and floats of 4 ----

    def _read_scaled(self, name: str, shape: Sequence[int], part: Part) -> torch.Tensor | QuantizedWeight:
        """Of a tensor of all experts, one expert's part is [rows, inputs] if it is quantized."""
        stored = self._source.read(name, shape, part)
        if stored.dtype not in (torch.float8_e4m3fn, torch.int8):
            if stored.dtype.itemsize == 1:
                raise ValueError(f"its numbers are {stored.dtype}, which is not supported")
            return stored
        *others, rows, inputs = shape
        whole = (*part, *[slice(None)] * (len(shape) - len(part)))
        codes = stored.flatten(0, -2).contiguous().view(torch.uint8)
        scales, group = self._read_scales(name, others, rows, inputs, whole)
        if stored.dtype == torch.int8:
            if self._source.has(f"{name}_zero_point"):
                raise ValueError("8-bit integers with zero points are not supported")
            by = "by row" if self._config.quantizes_inputs(name.removesuffix(_WEIGHT)) else None
            return QuantizedWeight(codes, signed_integers(8), scales, inputs, 8, quantizes_inputs=by)
        if group % 16 and group < inputs:
            of_inputs = torch.arange(inputs)[whole[-1]] // group - range(inputs)[whole[-1]].start // group
            return (stored.flatten(0, -2).float() * scales.float()[:, of_inputs]).bfloat16()
        return QuantizedWeight(codes, E4M3, scales, group, 8)

    def _read_scales(
        self, name: str, others: Sequence[int], rows: int, inputs: int, part: Part
    ) -> tuple[torch.Tensor, int]:
        """Returns the scales of some rows and inputs, [rows, groups], and the number of inputs of a group."""
        stored = next((each for each in (f"{name}_scale_inv", f"{name}_scale") if self._source.has(each)), None)
        if stored is None:
            raise ValueError("it has no scales")
        shape = self._source.shape(stored)
        block = self._config.block
        if block is not None and shape[len(others) :] == (-(-rows // block[0]), -(-inputs // block[1])):
            of_rows = torch.arange(rows)[part[-2]] // block[0]
            first, end, _ = part[-1].indices(inputs)
            if first % block[1]:
                raise ValueError(f"inputs from {first} divide a block of {block[1]}")
            groups = slice(first // block[1], -(-end // block[1]))
            scales = _floats(self._source.read(stored, shape, part[:-2] or ALL))
            if scales.numel() != shape[-2] * shape[-1]:
                raise ValueError("the weights of several experts cannot be one")
            return scales.view(shape[-2:])[of_rows][:, groups].contiguous(), block[1]
        if torch.Size(shape).numel() not in (1, rows) or others:
            raise ValueError(f"{stored} has shape {list(shape)}, which is neither one per row nor one for all")
        scales = _floats(self._source.read(stored, shape, ALL if shape else ())).reshape(-1, 1).expand(rows, 1)
        return scales[part[-2]].contiguous(), inputs

    def _read_micro_floats(self, name: str, shape: Sequence[int], part: Part) -> QuantizedWeight:
        """Of one expert [rows, inputs]: bytes of two numbers, the first in the low bits, and exponents of groups, which
        have the bias of bfloat16 (OCP Microscaling Formats 1.0, section 5.4.1).
        """
        count, rows, inputs = shape
        chosen, own = _two(part)
        groups = inputs // 32
        blocks = self._source.read(f"{name}_blocks", (count, rows, groups, 16), (chosen, own))
        exponents = self._source.read(f"{name}_scales", (count, rows, groups), (chosen, own))
        if {blocks.dtype, exponents.dtype} != {torch.uint8}:
            raise ValueError(f"its blocks and scales are {blocks.dtype} and {exponents.dtype}, not bytes")
        # A power of two is the exponent of a bfloat16, but for the smallest, which is denormal.
        scales = (exponents.to(torch.int16) << 7).masked_fill(exponents == 0, 1 << 6).view(torch.bfloat16)
        codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-3)
        return QuantizedWeight(codes.flatten(0, -2), E2M1, scales.flatten(0, -2), 32)


def _two(part: Part) -> tuple[slice, slice]:
    """Returns the intervals of a tensor's first two dimensions."""
    return part[0], part[1] if len(part) > 1 else slice(None)


def _unless_middle(zeros: torch.Tensor, bits: int, own: slice) -> torch.Tensor | None:
    """Returns the zero points of some rows, or None if those of all rows are the middle integers: what rows a rank has
    must not decide in which way a layer computes.
    """
    return None if bool((zeros == 2 ** (bits - 1)).all()) else zeros[own]


def _floats(scales: torch.Tensor) -> torch.Tensor:
    """Returns scales in float32. Raises ValueError if they are no floats or not finite."""
    if not scales.is_floating_point() or not (values := scales.float()).isfinite().all():
        raise ValueError(f"its scales must be finite floats, and are {scales.dtype}")
    return values


def _words(count: int, bits: int) -> int:
    """Returns the number of words that hold `count` numbers."""
    return -(-count * bits // _WORD_BITS)


def _covering(own: slice, count: int, bits: int) -> tuple[slice, slice]:
    """Returns the words that hold an interval of `count` numbers, and the interval among theirs."""
    first, end, _ = own.indices(count)
    words = slice(first * bits // _WORD_BITS, _words(end, bits))
    start = first - words.start * _WORD_BITS // bits
    return words, slice(start, start + end - first)


def _unpack(words: torch.Tensor, bits: int, places: torch.Tensor | None = None, added: int = 0) -> torch.Tensor:
    """[n, words] int32 -> [n, words * 32 / bits] uint8, a word's lowest bits first, or from its `places`; of words to
    which a number is added.
    """
    if words.dtype != torch.int32:
        raise ValueError(f"its words are {words.dtype}, not int32")
    # Copied: a column of words counts as contiguous, and yet has no view of bytes.
    stored = (words + added if added else words).clone(memory_format=torch.contiguous_format).view(torch.uint8)
    if bits == 4:
        stored = torch.stack((stored & 15, stored >> 4), -1).flatten(1)
    if places is not None:
        stored = stored.unflatten(1, (-1, len(places)))[:, :, places].flatten(1)
    return stored

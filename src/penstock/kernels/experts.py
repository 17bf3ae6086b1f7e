"""The grouped products of a mixture of experts: rows that chose one expert are multiplied together.

A token's row appears once for every expert that it chose. These (token, choice) pairs are sorted by the expert's slot
(`group`); `gate_up` computes the activated features of every pair, `down` the expert's output, and `combine` adds the
outputs of a token's experts:

    x [T, H] -> gate_up -> [P, I] -> down -> [P, O] -> combine -> [T, O]        P = T * top_k pairs, sorted by slot

Every element is computed as `PackedLinear` and one of `ACTIVATIONS` compute it: gate and up are rounded to the dtype,
the activation is rounded to it, and so is an expert's output. `combine` multiplies by the weights and adds in float32,
in the order of a token's choices, and rounds once. So a row's bits depend on that row and its own experts, not on other
rows, the number of threads, or the slot in which an expert is.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from penstock.config.experts import CLAMPED, SILU
from penstock.config.families import GELU_TANH, SQUARED_RELU
from penstock.kernels.gelu import gelu_and_mul
from penstock.kernels.host_memory import aligned_bytes
from penstock.kernels.linear import PANEL, PackedFormat, PackedLinear, PackedWeights
from penstock.kernels.native import DTYPE_CODES, NativeLibrary, library, num_threads
from penstock.kernels.quantized import LayerWeight, reordered
from penstock.kernels.relu import squared_relu
from penstock.kernels.sigmoid import sigmoid_reference
from penstock.kernels.silu_and_mul import silu_and_mul

CLAMP_ALPHA, CLAMP_LIMIT = 1.702, 7.0

# Of gate_up and of down, if they are quantized.
Formats = tuple[PackedFormat | None, PackedFormat | None]


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """Of the experts in `num_slots` slots, as far as this rank computes them."""

    num_slots: int
    in_features: int  # of gate and up: H
    own_inner: int  # features of gate and of up: this rank's share of I
    inner: int  # inputs of down: I
    out_features: int  # of down: this rank's share of H
    dtype: torch.dtype
    activation: str = SILU  # of ACTIVATIONS

    @property
    def gate_up_features(self) -> int:
        """Rows of gate_up: of gate and up, or of up alone if the activation has no gate."""
        return self.own_inner * (1 if self.activation == SQUARED_RELU else 2)


@dataclass(frozen=True, slots=True)
class Groups:
    """A step's pairs sorted by slot, those of a slot in ascending order; the pairs of token t are t * top_k and after.

    A pair whose expert is in no slot here is in no group.
    """

    pairs: torch.Tensor  # [T * top_k] int32: which pair is in a sorted row; undefined after the last group
    rows: torch.Tensor  # [T, top_k] int32: the sorted row of a pair, -1 if its expert is in no slot
    starts: torch.Tensor  # [num_slots + 1] int32: where the rows of a slot begin


class ExpertWeight(Protocol):
    def dense_weight(self) -> torch.Tensor:
        """Returns [out_features, in_features], in which denormal numbers may be zero."""
        ...


class GroupedExperts(Protocol):
    """The weights of the experts in some slots, and their products."""

    def store(self, slot: int, gate_up: LayerWeight, down: LayerWeight, biases: Biases | None = None) -> None:
        """Puts an expert into a slot: gate_up [gate_up_features, in_features], gate first, and down [out_features,
        inner].

        The tensors may be freed afterwards. Raises ValueError if one is quantized in another way than these experts.
        """
        ...

    def weights(self, slot: int) -> tuple[ExpertWeight, ExpertWeight]:
        """Returns gate_up and down as they are stored, for comparisons."""
        ...

    def arrays(self) -> tuple[torch.Tensor, ...]:
        """Returns all memory of the experts, each array [num_slots, bytes of one expert] uint8; none if they have no
        such memory. With all of a slot's bytes an expert can be copied to another slot.
        """
        ...

    def group(self, ids: torch.Tensor, slots: torch.Tensor, num_slots: int = 0) -> Groups:
        """ids [T, top_k] int64 of experts; `slots` [num_experts] int32: an expert's slot, -1 if it is in none.

        There are groups for as many slots as `num_slots`, by default those of this object.
        """
        ...

    def gate_up(self, x: torch.Tensor, groups: Groups) -> torch.Tensor:
        """[T, in_features] -> [P, own_inner], activated."""
        ...

    def down(self, activated: torch.Tensor, groups: Groups) -> torch.Tensor:
        """[P, inner] -> [P, out_features]."""
        ...

    def combine(self, outputs: torch.Tensor, groups: Groups, weights: torch.Tensor) -> torch.Tensor:
        """[P, out_features] with weights [T, top_k] float32 -> [T, out_features]. Every pair must be in a group."""
        ...


@dataclass(frozen=True, slots=True)
class Biases:
    gate_up: torch.Tensor  # [gate_up_features]
    down: torch.Tensor  # [out_features]


def group_reference(ids: torch.Tensor, slots: torch.Tensor, num_slots: int) -> Groups:
    """Does not wait for a device."""
    slot_of = slots[ids.view(-1)].long()
    is_here = slot_of >= 0
    sorted_slots, pairs = slot_of.where(is_here, num_slots).sort(stable=True)
    rows = torch.empty_like(pairs)
    rows[pairs] = torch.arange(len(pairs), device=ids.device)
    starts = torch.searchsorted(sorted_slots, torch.arange(num_slots + 1, device=ids.device))
    return Groups(pairs.int(), rows.where(is_here, -1).int().view_as(ids), starts.int())


def combine_reference(outputs: torch.Tensor, groups: Groups, weights: torch.Tensor) -> torch.Tensor:
    total = weights.new_zeros((len(weights), outputs.shape[1]))
    for choice in range(weights.shape[1]):
        total = total + outputs[groups.rows[:, choice].long()].float() * weights[:, choice : choice + 1]
    return total.to(outputs.dtype)


def clamped_swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """gpt-oss' activation, [T, 2I], gate then up, -> [T, I]: (up + 1) * gate * sigmoid(alpha * gate), after gate is
    limited from above and up on both sides. float32 throughout, rounded once.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=CLAMP_LIMIT), up.clamp(-CLAMP_LIMIT, CLAMP_LIMIT)
    return ((up + 1) * (gate * sigmoid_reference(gate * CLAMP_ALPHA))).to(gate_up.dtype)


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    SILU: silu_and_mul,
    CLAMPED: clamped_swiglu,
    GELU_TANH: partial(gelu_and_mul, is_tanh=True),
    SQUARED_RELU: squared_relu,
}
"""[T, 2I], gate then up, or [T, I] without a gate, -> [T, I], in the order of the native library's codes."""


class _Linear(Protocol):
    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def dense_weight(self) -> torch.Tensor: ...


class ReferenceExperts:
    """One layer after another, each made by `make_linear` from its weight and bias."""

    def __init__(self, shape: ExpertsShape, make_linear: Callable[[LayerWeight, torch.Tensor | None], _Linear]) -> None:
        self._shape = shape
        self._make_linear = make_linear
        self._layers: dict[int, tuple[_Linear, _Linear]] = {}
        self._activate = ACTIVATIONS[shape.activation]

    def store(self, slot: int, gate_up: LayerWeight, down: LayerWeight, biases: Biases | None = None) -> None:
        make = self._make_linear
        self._layers[slot] = make(gate_up, biases and biases.gate_up), make(down, biases and biases.down)

    def weights(self, slot: int) -> tuple[ExpertWeight, ExpertWeight]:
        return self._layers[slot]

    def arrays(self) -> tuple[torch.Tensor, ...]:
        return ()

    def group(self, ids: torch.Tensor, slots: torch.Tensor, num_slots: int = 0) -> Groups:
        return group_reference(ids, slots, num_slots or self._shape.num_slots)

    def gate_up(self, x: torch.Tensor, groups: Groups) -> torch.Tensor:
        rows = x[groups.pairs.long() // groups.rows.shape[1]]
        out = x.new_empty((len(rows), self._shape.own_inner))
        for slot, first, end in _intervals(groups):
            out[first:end] = self._activate(self._layers[slot][0](rows[first:end]))
        return out

    def down(self, activated: torch.Tensor, groups: Groups) -> torch.Tensor:
        out = activated.new_empty((len(activated), self._shape.out_features))
        for slot, first, end in _intervals(groups):
            out[first:end] = self._layers[slot][1](activated[first:end])
        return out

    def combine(self, outputs: torch.Tensor, groups: Groups, weights: torch.Tensor) -> torch.Tensor:
        return combine_reference(outputs, groups, weights)


def _intervals(groups: Groups) -> list[tuple[int, int, int]]:
    """Returns (slot, first row, end) of the slots that have rows."""
    starts = groups.starts.tolist()
    spans = zip(range(len(starts)), starts, starts[1:], strict=False)
    return [(slot, first, end) for slot, first, end in spans if first < end]


def make_experts(
    shape: ExpertsShape,
    has_biases: bool = False,
    library: Callable[[], NativeLibrary | None] = library,
    allocate: Callable[[int], torch.Tensor] = aligned_bytes,
    formats: Formats = (None, None),
) -> GroupedExperts:
    """Returns experts for a CPU; `library` is as for `PackedLinear`. `allocate` returns [bytes] uint8, aligned like
    `aligned_bytes`, for each of the arrays. `formats` are those of experts with quantized weights.
    """
    native = library()
    if native is None:
        return ReferenceExperts(shape, partial(PackedLinear, library=library, dtype=shape.dtype))
    return NativeExperts(native, shape, has_biases, allocate, formats)


class ExpertsDescriptor(ctypes.Structure):
    """`Experts` in native/experts.cpp."""

    _fields_ = (
        ("gate_up", ctypes.c_void_p),
        ("down", ctypes.c_void_p),
        ("gate_up_bias", ctypes.c_void_p),
        ("down_bias", ctypes.c_void_p),
        ("num_slots", ctypes.c_int64),
        ("in_features", ctypes.c_int64),
        ("own_inner", ctypes.c_int64),
        ("inner", ctypes.c_int64),
        ("out_features", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
        ("activation", ctypes.c_int64),
        ("gate_up_quantization", ctypes.c_void_p),
        ("down_quantization", ctypes.c_void_p),
    )


class NativeExperts:
    """Weights in panels of 32 features, in which a panel of gate, if there is one, is followed by the panel of up for
    the same features.
    """

    def __init__(
        self,
        native: NativeLibrary,
        shape: ExpertsShape,
        has_biases: bool,
        allocate: Callable[[int], torch.Tensor] = aligned_bytes,
        formats: Formats = (None, None),
    ) -> None:
        self._shape = shape
        self._has_gate = shape.gate_up_features > shape.own_inner
        rows = -(-shape.own_inner // PANEL) * 2 * PANEL if self._has_gate else shape.own_inner
        sizes = ((rows, shape.in_features), (shape.out_features, shape.inner))
        count, dtype = shape.num_slots, shape.dtype
        self.gate_up_weights, self.down_weights = (
            PackedWeights(native, count, *size, dtype, allocate, format)
            for size, format in zip(sizes, formats, strict=True)
        )
        self._biases: Biases | None = None
        if has_biases:
            sizes = (shape.gate_up_features, shape.out_features)
            self._biases = Biases(*(allocate(4 * count * size).view(torch.float32).view(count, -1) for size in sizes))
        self._descriptor = ExpertsDescriptor(
            self.gate_up_weights.address,
            self.down_weights.address,
            self._biases and self._biases.gate_up.data_ptr(),
            self._biases and self._biases.down.data_ptr(),
            shape.num_slots,
            shape.in_features,
            shape.own_inner,
            shape.inner,
            shape.out_features,
            DTYPE_CODES[shape.dtype],
            list(ACTIVATIONS).index(shape.activation),
            self.gate_up_weights.quantization,
            self.down_weights.quantization,
        )
        self._address = ctypes.addressof(self._descriptor)
        self._run_group = native.function("experts_group", "pppppnn")
        self._run_gate_up = native.function("experts_gate_up", "pppppnn")
        self._run_down = native.function("experts_down", "ppppn")
        self._run_combine = native.function("experts_combine", "ppppnnnni")

    def store(self, slot: int, gate_up: LayerWeight, down: LayerWeight, biases: Biases | None = None) -> None:
        assert gate_up.shape == (self._shape.gate_up_features, self._shape.in_features), f"{tuple(gate_up.shape)}"
        self.gate_up_weights.store(slot, _interleave(gate_up) if self._has_gate else gate_up)
        self.down_weights.store(slot, down)
        if self._biases is not None:
            assert biases is not None, "an expert without biases"
            self._biases.gate_up[slot] = biases.gate_up
            self._biases.down[slot] = biases.down

    def weights(self, slot: int) -> tuple[ExpertWeight, ExpertWeight]:
        gate_up = _Stored(self.gate_up_weights, slot)
        if self._has_gate:
            gate_up = _Interleaved(self.gate_up_weights, slot, self._shape.own_inner)
        return gate_up, _Stored(self.down_weights, slot)

    def arrays(self) -> tuple[torch.Tensor, ...]:
        biases = () if self._biases is None else (self._biases.gate_up, self._biases.down)
        arrays = (self.gate_up_weights.packed, self.down_weights.packed, *biases)
        return tuple(each.view(torch.uint8).view(self._shape.num_slots, -1) for each in arrays)

    def group(self, ids: torch.Tensor, slots: torch.Tensor, num_slots: int = 0) -> Groups:
        assert (ids.dtype, slots.dtype) == (torch.int64, torch.int32) and ids.is_contiguous(), f"{ids.dtype}"
        count, num_slots = ids.numel(), num_slots or self._shape.num_slots
        memory = torch.empty(2 * count + num_slots + 1, dtype=torch.int32)
        pairs, rows, starts = memory.split((count, count, num_slots + 1))
        self._run_group(
            ids.data_ptr(), slots.data_ptr(), pairs.data_ptr(), rows.data_ptr(), starts.data_ptr(), count, num_slots
        )
        return Groups(pairs, rows.view(ids.shape), starts)

    def gate_up(self, x: torch.Tensor, groups: Groups) -> torch.Tensor:
        self._check(x, self._shape.in_features)
        out = x.new_empty((len(groups.pairs), self._shape.own_inner))
        self._run_gate_up(
            self._address,
            x.data_ptr(),
            groups.pairs.data_ptr(),
            groups.starts.data_ptr(),
            out.data_ptr(),
            groups.rows.shape[1],
            num_threads(),
        )
        return out

    def down(self, activated: torch.Tensor, groups: Groups) -> torch.Tensor:
        self._check(activated, self._shape.inner)
        out = activated.new_empty((len(activated), self._shape.out_features))
        starts = groups.starts.data_ptr()
        self._run_down(self._address, activated.data_ptr(), starts, out.data_ptr(), num_threads())
        return out

    def combine(self, outputs: torch.Tensor, groups: Groups, weights: torch.Tensor) -> torch.Tensor:
        (tokens, top_k), width = weights.shape, outputs.shape[1]
        assert weights.dtype == torch.float32 and weights.is_contiguous(), f"{weights.dtype} {weights.stride()}"
        self._check(outputs, width)
        out = outputs.new_empty((tokens, width))
        self._run_combine(
            outputs.data_ptr(),
            groups.rows.data_ptr(),
            weights.data_ptr(),
            out.data_ptr(),
            tokens,
            top_k,
            width,
            num_threads(),
            DTYPE_CODES[outputs.dtype],
        )
        return out

    def _check(self, x: torch.Tensor, width: int) -> None:
        assert x.dtype == self._shape.dtype and x.shape[1] == width and x.is_contiguous(), f"{x.dtype} {x.shape}"


def _interleave(gate_up: LayerWeight) -> LayerWeight:
    """[2 I, K] -> [panels * 2 * PANEL, K]: PANEL rows of gate, then of up, and so on; any where there are no rows."""
    inner = gate_up.shape[0] // 2
    rows = torch.arange(-(-inner // PANEL) * PANEL).clamp(max=inner - 1).view(-1, 1, PANEL)
    order = torch.cat([rows, rows + inner], 1).flatten()
    return reordered(gate_up, order)


@dataclass(frozen=True, slots=True)
class _Stored:
    packed: PackedWeights
    slot: int

    def dense_weight(self) -> torch.Tensor:
        return self.packed.dense_weight(self.slot)


@dataclass(frozen=True, slots=True)
class _Interleaved:
    packed: PackedWeights
    slot: int
    inner: int

    def dense_weight(self) -> torch.Tensor:
        rows = self.packed.dense_weight(self.slot)
        halves = rows.view(-1, 2, PANEL, rows.shape[1]).transpose(0, 1).reshape(2, -1, rows.shape[1])
        return halves[:, : self.inner].reshape(2 * self.inner, -1)

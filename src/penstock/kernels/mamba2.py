"""Mamba2's selective state space (Dao and Gu 2024, arXiv:2405.21060), one token after another.

Shapes: T tokens, H heads of P features, G groups of heads with N keys, C = H P + 2 G N channels. A token's channels
(the values x of all heads, then keys B and queries C of all groups) go through a causal convolution with a bias, and
silu. For each head,

    dt = softplus(dt + dt_bias);  S = exp(-exp(A_log) dt) S + B (dt x);  out = (C^T S + D x) silu(z)

The state of a head is contiguous and depends on no other head: the matrix S [N, P], then the last inputs
[taps - 1, P + 2 N] of its values and of its group's keys and queries, the oldest first. Everything is float32, rounded
to the model's dtype after the convolution, after its silu and before the gate; what the gate gives is not rounded. Sums
over keys are in ascending order: a token's result depends on its sequence alone, however that is divided into steps.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import torch

from penstock.config.recurrent import MambaSizes
from penstock.kernels.dispatch import triton_module, uses_triton
from penstock.kernels.native import DTYPE_CODES, NativeLibrary, library, num_threads
from penstock.kernels.recurrent import STATE_ARGUMENTS, StateRequests, StateSpan
from penstock.kernels.sigmoid import sigmoid_reference

_LANES, _MOST_KEYS, _MOST_TAPS, _MOST_HISTORY = 16, 256, 8, 16384  # of the native kernel


class _Descriptor(ctypes.Structure):
    """`Mamba2` in native/mamba2.cpp."""

    _fields_ = (
        ("conv", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("decay", ctypes.c_void_p),
        ("dt_bias", ctypes.c_void_p),
        ("skip", ctypes.c_void_p),
        ("heads", ctypes.c_int64),
        ("groups", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("offset", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("keys", ctypes.c_int64),
        ("taps", ctypes.c_int64),
    )


@dataclass(frozen=True, slots=True)
class MambaWeights:
    """All float32."""

    conv: torch.Tensor  # [C, taps]
    bias: torch.Tensor  # [C]: of the convolution
    a_log: torch.Tensor  # [H]
    dt_bias: torch.Tensor  # [H]
    skip: torch.Tensor  # [H]: D


class Mamba2:
    """One layer's recurrence with its weights."""

    def __init__(
        self, sizes: MambaSizes, weights: MambaWeights, library: Callable[[], NativeLibrary | None] = library
    ) -> None:
        """`library` is as for `PackedLinear`."""
        assert weights.conv.shape == (sizes.channels, sizes.taps), (weights.conv.shape, sizes)
        self.sizes = sizes
        self.conv, self.decay = weights.conv.T.contiguous(), weights.a_log.exp()  # [taps, C] and [H]
        self.channels = _channels_of_heads(sizes).to(self.conv.device, torch.int32)
        self.bias, self.dt_bias, self.skip = weights.bias, weights.dt_bias, weights.skip
        numbers = (self.conv, self.bias, self.decay, self.dt_bias, self.skip)
        assert all(each.dtype == torch.float32 and each.is_contiguous() for each in numbers), "weights"
        native = library() if _is_native(sizes) and self.conv.is_cpu else None
        self._run = native.function("mamba2", f"pp{STATE_ARGUMENTS}ni") if native is not None else None
        self._descriptor = _Descriptor(
            *(each.data_ptr() for each in numbers),
            sizes.heads,
            sizes.groups,
            sizes.group,
            sizes.offset,
            sizes.size,
            sizes.keys,
            sizes.taps,
        )
        self._address = ctypes.addressof(self._descriptor)

    def __call__(
        self,
        given: torch.Tensor,  # [T, H P + C + H]: z of all heads, then all channels, then dt
        states: torch.Tensor,  # [blocks, H, numbers of a head's state] float32
        requests: StateRequests,
    ) -> torch.Tensor:
        """Returns [T, H P] float32. The requests' states are stored, and the inputs of their drafts kept."""
        sizes = self.sizes
        assert given.shape[1] == sizes.inner + sizes.channels + sizes.heads, (given.shape, sizes)
        assert states.shape[1:] == (sizes.heads, sizes.head_size), (states.shape, sizes)
        assert given.is_contiguous(), "strided inputs"
        if uses_triton(given):
            return triton_module("mamba2").mamba2(self, given, states, requests)
        if self._run is None:
            return mamba2_reference(self, given, states, requests)
        out = given.new_empty((len(given), sizes.inner), dtype=torch.float32)
        arguments = requests.arguments(out, states)
        self._run(self._address, given.data_ptr(), *arguments, num_threads(), DTYPE_CODES[given.dtype])
        return out


def _is_native(sizes: MambaSizes) -> bool:
    is_whole = sizes.keys % _LANES == 0 and sizes.size % _LANES == 0
    history = (sizes.taps - 1) * sizes.unit
    return is_whole and sizes.keys <= _MOST_KEYS and sizes.taps <= _MOST_TAPS and history <= _MOST_HISTORY


def mamba2_reference(layer: Mamba2, given: torch.Tensor, states: torch.Tensor, requests: StateRequests) -> torch.Tensor:
    sizes, width = layer.sizes, layer.sizes.channels + layer.sizes.heads
    z, rest = given.split([sizes.inner, width], 1)
    out = given.new_zeros((len(given), sizes.inner), dtype=torch.float32)
    for span in requests.spans():
        inputs, kept = rest[span.first : span.end], requests.draft_inputs
        if span.num_pending:
            assert kept is not None, "pending drafts without inputs"
            inputs = torch.cat((kept[span.row, : span.num_pending, :width], inputs))
        for row, read in enumerate(_run_span(layer, inputs, states, span)[span.num_pending :], span.first):
            gate = z[row].float()
            out[row] = read.to(given.dtype).float().flatten() * (gate * sigmoid_reference(gate))
        if span.num_drafts:
            assert kept is not None, "drafts without a place for their inputs"
            kept[span.row, : span.num_drafts, :width] = inputs[-span.num_drafts :]
    return out


def _run_span(layer: Mamba2, inputs: torch.Tensor, states: torch.Tensor, span: StateSpan) -> list[torch.Tensor]:
    """inputs [n, C + H] -> n tensors [H, P] float32; stores the states.

    Torch is always called with one token: the last elements of a tensor have another exponential than the others.
    """
    sizes, dtype, before = layer.sizes, inputs.dtype, span.before()
    state = torch.zeros_like(states[0]) if before is None else states[before].clone()
    matrices, history = state.split([sizes.keys * sizes.size, (sizes.taps - 1) * sizes.unit], 1)
    matrices = matrices.reshape(sizes.heads, sizes.keys, sizes.size)
    channels = _channels_of_heads(sizes)  # [H, P + 2 N]
    # The heads of a group have the same inputs.
    before_all = states.new_zeros(sizes.taps - 1, sizes.channels)
    before_all[:, channels] = history.reshape(sizes.heads, sizes.taps - 1, sizes.unit).transpose(0, 1)
    raw = torch.cat((before_all, inputs[:, : sizes.channels].float()))
    found: list[torch.Tensor] = []
    for token in range(len(inputs)):
        window = raw[token : token + sizes.taps]
        total = window[0] * layer.conv[0]
        for tap in range(1, sizes.taps):
            total = total + window[tap] * layer.conv[tap]
        mixed = (total + layer.bias).to(dtype).float()
        mixed = (mixed * sigmoid_reference(mixed)).to(dtype).float()
        x, key, query = mixed[channels].split([sizes.size, sizes.keys, sizes.keys], 1)
        dt = torch.nn.functional.softplus(inputs[token, sizes.channels :].float() + layer.dt_bias)
        matrices = matrices * (-layer.decay * dt).exp()[:, None, None] + key[..., None] * (x * dt[:, None])[:, None]
        found.append((matrices * query[..., None]).sum(1) + x * layer.skip[:, None])
        after = span.after(token)
        if after is not None:
            last = raw[token + 1 : token + sizes.taps][:, channels].transpose(0, 1)
            states[after] = torch.cat((matrices.flatten(1), last.flatten(1)), 1)
    return found


def _channels_of_heads(sizes: MambaSizes) -> torch.Tensor:
    """Returns [H, P + 2 N] int64: which channels are a head's values, keys and queries."""
    heads = torch.arange(sizes.heads)
    values = heads[:, None] * sizes.size + torch.arange(sizes.size)
    keys = sizes.inner + (heads + sizes.offset)[:, None] // sizes.group * sizes.keys + torch.arange(sizes.keys)
    return torch.cat((values, keys, keys + sizes.groups * sizes.keys), 1)

"""The gated delta rule (Yang et al. 2024, arXiv:2412.06464), as Qwen3-Next and Qwen3.5 use it, one token after another.

Shapes: T tokens, K key heads of size D, V value heads of size E, C = 2 K D + V E channels. A token's channels (all
queries, all keys, all values) go through a causal convolution and silu; queries and keys are then normalized. For each
value head, whose key head is that of its group,

    S = decay S;  S = S + k (beta (v - k^T S));  out = q^T S / sqrt(D)

with decay = exp(-exp(A_log) softplus(dt + dt_bias)) and beta = sigmoid(b). Then every head's result has an RMS norm
and is multiplied with silu(z). The state of a key head is contiguous: the matrices S [D, E] of its value heads, then
the last inputs [taps - 1, 2 D + V E / K] of its channels, the oldest first. Everything is float32, rounded to the
model's dtype after the convolution, after silu, after sigmoid and around the norm. Sums over keys are in ascending
order: a token's result depends on its sequence alone, however that is divided into steps.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable

import torch

from penstock.config.recurrent import DeltaSizes
from penstock.kernels.dispatch import triton_module, uses_triton
from penstock.kernels.native import DTYPE_CODES, NativeLibrary, library, num_threads
from penstock.kernels.recurrent import STATE_ARGUMENTS, StateRequests, StateSpan
from penstock.kernels.sigmoid import sigmoid_reference

_LANES, _MOST_KEYS, _MOST_TAPS, _MOST_HISTORY = 16, 256, 8, 16384  # of the native kernel
_EPS = 1e-6


class _Descriptor(ctypes.Structure):
    """`GatedDelta` in native/gated_delta.cpp."""

    _fields_ = (
        ("conv", ctypes.c_void_p),
        ("decay", ctypes.c_void_p),
        ("dt_bias", ctypes.c_void_p),
        ("norm", ctypes.c_void_p),
        ("key_heads", ctypes.c_int64),
        ("value_heads", ctypes.c_int64),
        ("key_size", ctypes.c_int64),
        ("value_size", ctypes.c_int64),
        ("taps", ctypes.c_int64),
        ("eps", ctypes.c_float),
    )


class GatedDelta:
    """One layer's rule with its weights, all float32."""

    def __init__(
        self,
        sizes: DeltaSizes,
        conv: torch.Tensor,  # [C, taps]
        a_log: torch.Tensor,  # [V]
        dt_bias: torch.Tensor,  # [V]
        norm: torch.Tensor,  # [E]
        eps: float,
        library: Callable[[], NativeLibrary | None] = library,
    ) -> None:
        """`eps` is that of the norm. `library` is as for `PackedLinear`."""
        assert conv.shape == (sizes.channels, sizes.taps), (conv.shape, sizes)
        self.sizes, self.eps = sizes, eps
        self.conv = conv.T.contiguous()  # [taps, C]
        channels = torch.arange(sizes.channels, dtype=torch.int32, device=conv.device)
        self.channels = _to_heads(channels[None], sizes)[:, 0]  # [K, 2 D + V E / K]: which ones are a key head's
        self.decay, self.dt_bias, self.norm = a_log.exp(), dt_bias.contiguous(), norm.contiguous()
        native = library() if _is_native(sizes) and conv.is_cpu else None
        self._run = native.function("gated_delta", f"ppp{STATE_ARGUMENTS}ni") if native is not None else None
        numbers = (self.conv, self.decay, self.dt_bias, self.norm)
        assert all(each.dtype == torch.float32 for each in numbers), [each.dtype for each in numbers]
        self._descriptor = _Descriptor(
            *(each.data_ptr() for each in numbers),
            sizes.key_heads,
            sizes.value_heads,
            sizes.key_size,
            sizes.value_size,
            sizes.taps,
            eps,
        )
        self._address = ctypes.addressof(self._descriptor)

    def __call__(
        self,
        qkv: torch.Tensor,  # [T, C]
        gates: torch.Tensor,  # [T, V E + 2 V]: z of all heads, then b and dt of each
        states: torch.Tensor,  # [blocks, K, numbers of a key head's state] float32
        requests: StateRequests,
    ) -> torch.Tensor:
        """Returns [T, V E]. The requests' states are stored, and the inputs of their drafts kept."""
        sizes = self.sizes
        assert qkv.shape[1] == sizes.channels and gates.shape[1] == sizes.value_heads * (sizes.value_size + 2), sizes
        assert states.shape[1:] == (sizes.key_heads, sizes.head_size), states.shape
        assert qkv.is_contiguous() and gates.is_contiguous(), "strided inputs"
        assert qkv.dtype == gates.dtype, (qkv.dtype, gates.dtype)
        if uses_triton(qkv):
            return triton_module("gated_delta").gated_delta(self, qkv, gates, states, requests)
        if self._run is None:
            return gated_delta_reference(self, qkv, gates, states, requests)
        out = qkv.new_empty((len(qkv), sizes.value_heads * sizes.value_size))
        self._run(
            self._address,
            qkv.data_ptr(),
            gates.data_ptr(),
            *requests.arguments(out, states),
            num_threads(),
            DTYPE_CODES[qkv.dtype],
        )
        return out


def _is_native(sizes: DeltaSizes) -> bool:
    is_whole = sizes.key_size % _LANES == 0 and sizes.value_size % _LANES == 0
    history = (sizes.taps - 1) * sizes.unit
    return is_whole and sizes.key_size <= _MOST_KEYS and sizes.taps <= _MOST_TAPS and history <= _MOST_HISTORY


def gated_delta_reference(
    layer: GatedDelta, qkv: torch.Tensor, gates: torch.Tensor, states: torch.Tensor, requests: StateRequests
) -> torch.Tensor:
    sizes = layer.sizes
    out = qkv.new_zeros((len(qkv), sizes.value_heads * sizes.value_size))
    z, rates = gates.split([sizes.value_heads * sizes.value_size, 2 * sizes.value_heads], 1)
    for span in requests.spans():
        inputs = torch.cat((qkv[span.first : span.end], rates[span.first : span.end]), 1)
        kept = requests.draft_inputs
        if span.num_pending:
            assert kept is not None, "pending drafts without inputs"
            inputs = torch.cat((kept[span.row, : span.num_pending], inputs))
        read = _run_span(layer, inputs, states, span)[span.num_pending :]
        for row, one in enumerate(read, span.first):
            out[row] = _gate(layer, one, z[row])
        if span.num_drafts:
            assert kept is not None, "drafts without a place for their inputs"
            kept[span.row, : span.num_drafts] = inputs[-span.num_drafts :]
    return out


def _run_span(layer: GatedDelta, inputs: torch.Tensor, states: torch.Tensor, span: StateSpan) -> list[torch.Tensor]:
    """inputs [n, C + 2 V] -> n tensors [V, E] in their dtype; stores the states.

    Torch is always called with one token: the last elements of a tensor have another exponential than the others.
    """
    sizes, dtype = layer.sizes, inputs.dtype
    before = span.before()
    state = torch.zeros_like(states[0]) if before is None else states[before].clone()
    split = [sizes.group * sizes.key_size * sizes.value_size, (sizes.taps - 1) * sizes.unit]
    matrices, history = state.split(split, 1)
    matrices = matrices.reshape(sizes.value_heads, sizes.key_size, sizes.value_size)
    raw = inputs[:, : sizes.channels].float()
    # The histories are by key head; the channels of all of them are queries, keys and values.
    by_head = history.reshape(sizes.key_heads, sizes.taps - 1, sizes.unit)
    raw = torch.cat((_from_heads(by_head, sizes), raw))
    found: list[torch.Tensor] = []
    for token in range(len(inputs)):
        window = raw[token : token + sizes.taps]
        total = window[0] * layer.conv[0]
        for tap in range(1, sizes.taps):
            total = total + window[tap] * layer.conv[tap]
        mixed = total.to(dtype).float()
        mixed = (mixed * sigmoid_reference(mixed)).to(dtype).float()
        query, key, value = mixed.split([sizes.key_heads * sizes.key_size] * 2 + [sizes.value_heads * sizes.value_size])
        query, key = (_normalize(each.view(sizes.key_heads, -1)) for each in (query, key))
        query = query / math.sqrt(sizes.key_size)
        query, key = (each.repeat_interleave(sizes.group, 0) for each in (query, key))
        share, decay = _gates(layer, inputs[token, sizes.channels :])
        matrices = matrices * decay[:, None, None]
        delta = (value.view(sizes.value_heads, -1) - (matrices * key[..., None]).sum(1)) * share[:, None]
        matrices = matrices + key[..., None] * delta[:, None]
        found.append((matrices * query[..., None]).sum(1).to(dtype))
        after = span.after(token)
        if after is not None:
            last = _to_heads(raw[token + 1 : token + sizes.taps], sizes)
            states[after] = torch.cat((matrices.reshape(sizes.key_heads, -1), last.flatten(1)), 1)
    return found


def _to_heads(raw: torch.Tensor, sizes: DeltaSizes) -> torch.Tensor:
    """[n, C] -> [K, n, 2 D + V E / K]."""
    widths = [sizes.key_heads * sizes.key_size] * 2 + [sizes.value_heads * sizes.value_size]
    parts = [part.unflatten(1, (sizes.key_heads, -1)) for part in raw.split(widths, 1)]
    return torch.cat(parts, 2).transpose(0, 1)


def _from_heads(by_head: torch.Tensor, sizes: DeltaSizes) -> torch.Tensor:
    """[K, n, 2 D + V E / K] -> [n, C]."""
    widths = [sizes.key_size, sizes.key_size, sizes.group * sizes.value_size]
    return torch.cat([part.flatten(1) for part in by_head.transpose(0, 1).split(widths, 2)], 1)


def _gates(layer: GatedDelta, rates: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[2 V] -> beta and decay, each [V] float32."""
    b, dt = rates.float().split(layer.sizes.value_heads)
    decay = (-layer.decay * torch.nn.functional.softplus(dt + layer.dt_bias)).exp()
    return sigmoid_reference(b).to(rates.dtype).float(), decay


def _normalize(x: torch.Tensor) -> torch.Tensor:
    return x * (x.square().sum(-1, keepdim=True) + _EPS).rsqrt()


def _gate(layer: GatedDelta, read: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """[V, E] and [V E] -> [V E]."""
    x, z = read.float(), z.float().view_as(read)
    normed = (x * (x.square().mean(-1, keepdim=True) + layer.eps).rsqrt()).to(read.dtype)
    normed = (normed.float() * layer.norm).to(read.dtype).float()
    return (normed * z * sigmoid_reference(z)).to(read.dtype).flatten()

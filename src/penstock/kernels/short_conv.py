"""The gated short convolution of LFM2 (Liquid AI 2025, arXiv:2511.23404), one token after another.

Shapes: T tokens, C channels, in heads of neighbours. A token has three numbers b, c and x for each channel, and

    out = c conv(b x)

with a causal convolution of each channel. Everything is float32, rounded to the model's dtype after each product and
after the convolution. The state of a head is the last inputs [taps - 1, channels of a head] of its convolution, the
oldest first: a token's result depends on its sequence alone, however that is divided into steps.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from penstock.config.recurrent import ConvSizes
from penstock.kernels.dispatch import triton_module, uses_triton
from penstock.kernels.native import DTYPE_CODES, NativeLibrary, library, num_threads
from penstock.kernels.recurrent import STATE_ARGUMENTS, StateRequests, StateSpan

_LANES, _MOST_TAPS, _MOST_HISTORY = 16, 8, 1024  # of the native kernel


class _Descriptor(ctypes.Structure):
    """`ShortConv` in native/short_conv.cpp."""

    _fields_ = (
        ("conv", ctypes.c_void_p),
        ("heads", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("taps", ctypes.c_int64),
    )


class ShortConv:
    """One layer's convolution with its weights, which are float32."""

    def __init__(
        self,
        sizes: ConvSizes,
        conv: torch.Tensor,  # [C, taps]
        library: Callable[[], NativeLibrary | None] = library,
    ) -> None:
        """`library` is as for `PackedLinear`."""
        assert conv.shape == (sizes.channels, sizes.taps) and conv.dtype == torch.float32, (conv.shape, sizes)
        self.sizes = sizes
        self.conv = conv.T.contiguous()  # [taps, C]
        self.channels = torch.arange(sizes.channels, dtype=torch.int32, device=conv.device).view(sizes.heads, -1)
        is_native = sizes.width % _LANES == 0 and sizes.taps <= _MOST_TAPS and sizes.head_size <= _MOST_HISTORY
        native = library() if is_native and conv.is_cpu else None
        self._run = native.function("short_conv", f"pp{STATE_ARGUMENTS}ni") if native is not None else None
        self._descriptor = _Descriptor(self.conv.data_ptr(), sizes.heads, sizes.width, sizes.taps)
        self._address = ctypes.addressof(self._descriptor)

    def __call__(
        self,
        bcx: torch.Tensor,  # [T, 3 C]: b of all channels, then c and x
        states: torch.Tensor,  # [blocks, heads, numbers of a head's state] float32
        requests: StateRequests,
    ) -> torch.Tensor:
        """Returns [T, C]. The requests' states are stored, and the inputs of their drafts kept."""
        sizes = self.sizes
        assert bcx.shape[1] == 3 * sizes.channels, (bcx.shape, sizes)
        assert states.shape[1:] == (sizes.heads, sizes.head_size), (states.shape, sizes)
        assert bcx.is_contiguous(), "strided inputs"
        if uses_triton(bcx):
            return triton_module("short_conv").short_conv(self, bcx, states, requests)
        if self._run is None:
            return short_conv_reference(self, bcx, states, requests)
        out = bcx.new_empty((len(bcx), sizes.channels))
        arguments = requests.arguments(out, states)
        self._run(self._address, bcx.data_ptr(), *arguments, num_threads(), DTYPE_CODES[bcx.dtype])
        return out


def short_conv_reference(
    layer: ShortConv, bcx: torch.Tensor, states: torch.Tensor, requests: StateRequests
) -> torch.Tensor:
    out = bcx.new_zeros((len(bcx), layer.sizes.channels))
    b, c, x = bcx.float().split(layer.sizes.channels, 1)
    products = (b * x).to(bcx.dtype)
    for span in requests.spans():
        rows, inputs, kept = slice(span.first, span.end), products[span.first : span.end], requests.draft_inputs
        if span.num_pending:
            assert kept is not None, "pending drafts without inputs"
            inputs = torch.cat((kept[span.row, : span.num_pending], inputs))
        mixed = _convolve(layer, inputs, states, span)[span.num_pending :]
        out[rows] = (c[rows] * mixed.float()).to(out.dtype)
        if span.num_drafts:
            assert kept is not None, "drafts without a place for their inputs"
            kept[span.row, : span.num_drafts] = inputs[-span.num_drafts :]
    return out


def _convolve(layer: ShortConv, inputs: torch.Tensor, states: torch.Tensor, span: StateSpan) -> torch.Tensor:
    """[n, C] -> [n, C] in their dtype; stores the states."""
    sizes, count, before = layer.sizes, len(inputs), span.before()
    state = torch.zeros_like(states[0]) if before is None else states[before]
    by_head = state.reshape(sizes.heads, sizes.taps - 1, sizes.width)
    raw = torch.cat((by_head.transpose(0, 1).flatten(1), inputs.float()))
    total = raw[:count] * layer.conv[0]
    for tap in range(1, sizes.taps):
        total = total + raw[tap : tap + count] * layer.conv[tap]
    for token in range(count):
        after = span.after(token)
        if after is not None:
            last = raw[token + 1 : token + sizes.taps].unflatten(1, (sizes.heads, sizes.width))
            states[after] = last.transpose(0, 1).flatten(1)
    return total.to(inputs.dtype)

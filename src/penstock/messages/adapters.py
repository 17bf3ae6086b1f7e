"""LoRA adapters as the engine core and the workers receive them."""

from __future__ import annotations

import msgspec

NO_SLOT = -1
"""The slot of a request without an adapter."""


class Adapter(msgspec.Struct, frozen=True, weakref=True):
    """`folder` has the adapter's files, which do not change; `digest` is that of their contents, [32 bytes].

    `name` is for display: adapters with one digest are the same, and those with different ones share no KV.
    """

    name: str
    digest: bytes
    folder: str


class AdapterLoad(msgspec.Struct, frozen=True):
    """The adapter that a slot has from this step on."""

    slot: int
    adapter: Adapter


class LoraTarget(msgspec.Struct, frozen=True):
    """A projection that adapters may change: [num_outputs, num_inputs] on all ranks together."""

    num_inputs: int
    num_outputs: int

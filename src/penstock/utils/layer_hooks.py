"""The hooks around attention layers, by which a KV connector moves layers while a step computes them."""

from __future__ import annotations

from typing import Protocol


class LayerHooks(Protocol):
    """Hooks called around every attention layer of the target model."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Called before the layer stores and reads."""
        ...

    def save_kv_layer(self, layer_name: str) -> None:
        """Called when the layer has stored the step's keys and values.

        A speculator's layers, which run over the step several times, are complete at `wait_for_save`.
        """
        ...


class _NoHooks:
    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str) -> None: ...


NO_HOOKS: LayerHooks = _NoHooks()

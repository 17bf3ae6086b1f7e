"""What the layers that store states have in common."""

from __future__ import annotations

from collections.abc import Callable

import torch

from penstock.attention.forward_context import ForwardContext
from penstock.kernels.recurrent import StateRequests
from penstock.parallel.topology import Share
from penstock.utils.errors import ConfigError


def check_ranks(share: Share, num_heads: int, what: str) -> None:
    """Raises ConfigError if there are more ranks than heads of this kind."""
    if share.count > num_heads:
        raise ConfigError(f"tensor_parallel_size={share.count} is more than the {num_heads} {what}: lower it")


def on_states(
    context: ForwardContext, name: str, run: Callable[[torch.Tensor, StateRequests], torch.Tensor]
) -> torch.Tensor:
    """Calls `run` with the states [blocks, heads, numbers of a head's state] of a layer, and the step's requests."""
    context.hooks.wait_for_layer_load(name)
    out = run(context.kv_caches[name].flatten(1, 3), context.state_requests(name))
    context.hooks.save_kv_layer(name)
    return out

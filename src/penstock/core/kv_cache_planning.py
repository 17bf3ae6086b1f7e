"""From layers and a memory budget to a planned KV cache."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.messages.kv_cache_spec import AttachedLayer, KVCacheConfig, KVCacheGroup, KVCacheSpec
from penstock.utils.errors import ConfigError
from penstock.utils.math import cdiv


def group_layers(specs: Mapping[str, KVCacheSpec]) -> tuple[KVCacheGroup, ...]:
    """Layers with equal specs share a group. All groups must have blocks of one size, because they share one pool."""
    layers: dict[KVCacheSpec, list[str]] = {}
    for name, spec in specs.items():
        layers.setdefault(spec, []).append(name)
    sizes = {spec.block_bytes(1) for spec in layers}
    if len(sizes) > 1:
        raise ConfigError(f"layers store {sorted(sizes)} bytes per token; Penstock needs one size in all layers")
    return tuple(KVCacheGroup(tuple(names), spec) for spec, names in layers.items())


def attach_layers(specs: Mapping[str, KVCacheSpec], groups: tuple[KVCacheGroup, ...]) -> tuple[AttachedLayer, ...]:
    """Puts a speculator's layers under the block tables of groups that keep the same tokens. Raises ConfigError."""
    group_of_window = {group.spec.sliding_window: number for number, group in enumerate(groups)}
    attached: list[AttachedLayer] = []
    for name, spec in specs.items():
        group = group_of_window.get(spec.sliding_window)
        if group is None:
            raise ConfigError(
                f"the speculator's layer {name} has a sliding window of {spec.sliding_window} (0 is none), and no "
                "layer of the target model has the same"
            )
        attached.append(AttachedLayer(name, spec, group))
    return tuple(attached)


def block_bytes(groups: tuple[KVCacheGroup, ...], block_size: int, attached: tuple[AttachedLayer, ...] = ()) -> int:
    """Bytes that one block id stands for: its share of every tensor of the cache."""
    num_tensors = max(len(group.layer_names) for group in groups)
    of_attached = sum(layer.spec.block_bytes(block_size) for layer in attached)
    return num_tensors * groups[0].spec.block_bytes(block_size) + of_attached


def blocks_for_one_request(
    groups: tuple[KVCacheGroup, ...], block_size: int, num_tokens: int, max_in_flight: int
) -> int:
    """Most blocks that one request of `num_tokens` holds at once, with at most `max_in_flight` tokens unprocessed.

    A sliding-window group holds its window and what the steps in flight add to it.
    """
    total = 0
    for group in groups:
        window = group.spec.sliding_window
        held = num_tokens if not window else min(num_tokens, window + max_in_flight)
        total += cdiv(held, block_size) + (1 if window else 0)
    return total


def plan_kv_cache(
    groups: tuple[KVCacheGroup, ...],
    *,
    block_size: int,
    num_blocks: int,
    max_model_len: int,
    max_in_flight: int,
    attached: tuple[AttachedLayer, ...] = (),
) -> KVCacheConfig:
    """Checks that a request of `max_model_len` fits into `num_blocks` blocks (the null block included).

    Raises ConfigError that names the flags to turn when it does not.
    """
    needed = 1 + blocks_for_one_request(groups, block_size, max_model_len, max_in_flight)
    if needed > num_blocks:
        per_block = block_bytes(groups, block_size, attached)
        fits = longest_request(groups, block_size, num_blocks, max_in_flight)
        raise ConfigError(
            f"max_model_len={max_model_len} needs {needed} KV blocks ({needed * per_block / 2**20:.0f} MiB), but there "
            f"are {num_blocks} ({num_blocks * per_block / 2**20:.0f} MiB): lower max_model_len to at most {fits}, or "
            "raise kv_cache_memory, gpu_memory_utilization or num_gpu_blocks_override"
        )
    return KVCacheConfig(num_blocks=num_blocks, block_size=block_size, groups=groups, attached=attached)


def longest_request(groups: tuple[KVCacheGroup, ...], block_size: int, num_blocks: int, max_in_flight: int) -> int:
    """The longest request, in tokens, that fits into `num_blocks` blocks."""
    low, high = 0, num_blocks * block_size
    if all(group.spec.sliding_window for group in groups):
        high = 1 << 40
    while low < high:
        middle = (low + high + 1) // 2
        if 1 + blocks_for_one_request(groups, block_size, middle, max_in_flight) <= num_blocks:
            low = middle
        else:
            high = middle - 1
    return low

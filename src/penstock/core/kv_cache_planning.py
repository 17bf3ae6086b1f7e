"""Plans the KV cache from groups of layers and a memory budget."""

from __future__ import annotations

from penstock.messages.kv_cache_spec import AttachedLayer, KVCacheConfig, KVCacheGroup
from penstock.utils.errors import ConfigError
from penstock.utils.math import cdiv


def blocks_for_one_request(
    groups: tuple[KVCacheGroup, ...], block_size: int, num_tokens: int, max_in_flight: int
) -> int:
    """Returns the maximum number of blocks that a request of `num_tokens` tokens holds at once.

    A sliding-window group holds its window and the at most `max_in_flight` tokens that the steps in flight add to it.
    """
    total = 0
    for group in groups:
        if group.spec.is_recurrent:
            continue
        window = group.spec.sliding_window
        held = num_tokens if not window else min(num_tokens, window + max_in_flight)
        total += cdiv(held, block_size) + (1 if window else 0)
    return total


def states_for_one_request(
    max_num_in_flight: int, max_in_flight: int, checkpoint_interval: int, num_uncertain_blocks: int
) -> int:
    """Returns the maximum number of states that a request holds at once.

    They are those that each of the steps in flight reads and writes, and those of the last one, in as many more blocks
    as drafts may fill; the checkpoints among the at most `max_in_flight` tokens that these steps compute; and two other
    checkpoints.
    """
    per_step = 2 + num_uncertain_blocks
    return per_step * (max_num_in_flight + 1) + max_in_flight // checkpoint_interval + 1 + 2


def plan_kv_cache(
    groups: tuple[KVCacheGroup, ...],
    *,
    block_size: int,
    num_blocks: int,
    max_model_len: int,
    max_in_flight: int,
    bytes_per_block: int,
    attached: tuple[AttachedLayer, ...] = (),
) -> KVCacheConfig:
    """Checks that a request of `max_model_len` fits into `num_blocks` blocks (the null block included).

    `bytes_per_block` is the size of a block on all ranks together. Raises ConfigError, which names the flags to change,
    when the request does not fit.
    """
    needed = 1 + blocks_for_one_request(groups, block_size, max_model_len, max_in_flight)
    if needed > num_blocks:
        fits = longest_request(groups, block_size, num_blocks, max_in_flight)
        mib = bytes_per_block / 2**20
        raise ConfigError(
            f"max_model_len={max_model_len} needs {needed} KV blocks ({needed * mib:.0f} MiB), but there are "
            f"{num_blocks} ({num_blocks * mib:.0f} MiB): lower max_model_len to at most {fits}, or "
            "raise kv_cache_memory, gpu_memory_utilization or num_gpu_blocks_override"
        )
    return KVCacheConfig(num_blocks=num_blocks, block_size=block_size, groups=groups, attached=attached)


def longest_request(groups: tuple[KVCacheGroup, ...], block_size: int, num_blocks: int, max_in_flight: int) -> int:
    """Returns the length of the longest request, in tokens, that fits into `num_blocks` blocks."""
    low, high = 0, num_blocks * block_size
    if all(group.spec.sliding_window for group in groups if not group.spec.is_recurrent):
        high = 1 << 40
    while low < high:
        middle = (low + high + 1) // 2
        if 1 + blocks_for_one_request(groups, block_size, middle, max_in_flight) <= num_blocks:
            low = middle
        else:
            high = middle - 1
    return low

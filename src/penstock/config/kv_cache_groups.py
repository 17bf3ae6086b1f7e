"""Decides which layers share a block table."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.messages.kv_cache_spec import AttachedLayer, KVCacheConfig, KVCacheGroup, KVCacheSpec
from penstock.utils.errors import ConfigError


def group_layers(specs: Mapping[str, KVCacheSpec]) -> tuple[KVCacheGroup, ...]:
    """Layers with equal specs share a group. Raises ConfigError for recurrent layers of several sizes."""
    layers: dict[KVCacheSpec, list[str]] = {}
    for name, spec in specs.items():
        layers.setdefault(spec, []).append(name)
    if sum(spec.is_recurrent for spec in layers) > 1:
        raise ConfigError("the model has recurrent layers of several sizes; Penstock needs one size in all of them")
    return tuple(KVCacheGroup(tuple(names), spec) for spec, names in layers.items())


def attach_layers(
    specs: Mapping[str, KVCacheSpec], groups: tuple[KVCacheGroup, ...], num_tokens_ahead: int = 0
) -> tuple[AttachedLayer, ...]:
    """Assigns a speculator's layers to the block tables of groups that keep the same tokens. Raises ConfigError.

    `num_tokens_ahead` is as in `AttachedLayer`.
    """
    group_of_window = {
        group.spec.sliding_window: number for number, group in enumerate(groups) if not group.spec.is_recurrent
    }
    attached: list[AttachedLayer] = []
    for name, spec in specs.items():
        if spec.is_recurrent:
            raise ConfigError(f"the speculator's layer {name} is recurrent: choose a draft model with attention alone")
        group = group_of_window.get(spec.sliding_window)
        if group is None:
            raise ConfigError(
                f"the speculator's layer {name} has a sliding window of {spec.sliding_window} (0 means none), and no "
                "layer of the target model has the same"
            )
        attached.append(AttachedLayer(name, spec, group, num_tokens_ahead))
    return tuple(attached)


def cache_of_one_rank(
    specs: Mapping[str, KVCacheSpec], draft_specs: Mapping[str, KVCacheSpec], num_tokens_ahead: int, block_size: int
) -> KVCacheConfig:
    """Returns the smallest cache with a rank's layers, to run steps on before the engine's cache is planned.

    The groups are numbered among this rank's layers alone.
    """
    groups = group_layers(specs)
    windows = {group.spec.sliding_window for group in groups if not group.spec.is_recurrent}
    # The target's layers with the drafter's window may all be on other stages.
    elsewhere = {spec.sliding_window: spec for spec in draft_specs.values() if spec.sliding_window not in windows}
    groups += tuple(KVCacheGroup((), spec) for spec in elsewhere.values())
    num_states = int(any(group.spec.is_recurrent for group in groups))
    return KVCacheConfig(1, block_size, groups, attach_layers(draft_specs, groups, num_tokens_ahead), num_states)

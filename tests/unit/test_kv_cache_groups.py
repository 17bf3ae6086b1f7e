"""KV groups: longest prefix hits compared with brute force, grouping of layers, and planning."""

from __future__ import annotations

import random

import pytest

from penstock.config.kv_cache_groups import attach_layers, group_layers
from penstock.core.kv_cache_groups import AttentionGroup
from penstock.core.kv_cache_planning import blocks_for_one_request, longest_request, plan_kv_cache
from penstock.messages.kv_cache_spec import KVCacheConfig, KVCacheSpec, KVPlane
from penstock.utils.errors import ConfigError
from penstock.utils.wire import Codec, FrameReader

BLOCK_SIZE = 4


def is_usable(cached: list[bool], length: int, window: int) -> bool:
    """Returns whether the query after `length` cached blocks finds everything that it reads."""
    position = length * BLOCK_SIZE
    first = max(0, position - window + 1) if window else 0
    return all(cached[index] for index in range(first // BLOCK_SIZE, length))


@pytest.mark.parametrize("window", [0, 1, 3, 4, 5, 8, 9, 100])
def test_longest_hit_is_the_longest_usable_prefix(window: int) -> None:
    group = AttentionGroup(KVCacheSpec.keys_and_values(1, 1, "float32", window), BLOCK_SIZE)
    rng = random.Random(window)
    for _ in range(500):
        cached = [rng.random() < 0.7 for _ in range(rng.randrange(12))]

        longest = max(length for length in range(len(cached) + 1) if is_usable(cached, length, window))
        assert group.longest_hit(cached.__getitem__, len(cached)) == longest


def test_layers_with_equal_specs_share_a_group() -> None:
    full, sliding = KVCacheSpec.keys_and_values(2, 64, "bfloat16"), KVCacheSpec.keys_and_values(2, 64, "bfloat16", 128)
    groups = group_layers({"a": full, "b": sliding, "c": full})
    assert [group.layer_names for group in groups] == [("a", "c"), ("b",)]
    one, other = (KVCacheSpec.states(1, size, 0, 1) for size in (8, 16))
    with pytest.raises(ConfigError, match="one size"):
        group_layers({"a": full, "b": one, "c": other})


def test_a_block_id_has_memory_of_every_size_of_groups() -> None:
    full, sliding = KVCacheSpec.keys_and_values(2, 64, "bfloat16"), KVCacheSpec.keys_and_values(2, 64, "bfloat16", 32)
    wide = KVCacheSpec.keys_and_values(1, 256, "bfloat16", 48)
    layers = {"a": full, "b": sliding, "c": sliding, "d": wide, "e": wide, "f": wide}
    cache = KVCacheConfig(9, 16, group_layers(layers))
    sizes = [spec.block_bytes(16) for spec in (full, wide)]
    assert cache.bytes_per_block == 2 * sizes[0] + 3 * sizes[1]
    assert [cache.block_bytes(group) for group in range(3)] == [sizes[0], 2 * sizes[0], 3 * sizes[1]]
    # Ranks may have other heads of one group than of another: then their sizes are others, too.
    own = {"a": KVCacheSpec.keys_and_values(1, 64, "bfloat16", 0, 0, 2), "d": wide}
    assert cache.part(own).bytes_per_block == sizes[0] // 2 + sizes[1]


def test_a_block_holds_all_planes() -> None:
    latent = KVCacheSpec((KVPlane("latent", 1, 512), KVPlane("rope", 1, 64)), "bfloat16")
    assert latent.block_bytes(16) == 16 * (512 + 64) * 2
    assert KVCacheSpec.keys_and_values(4, 32, "float32").block_bytes(16) == 16 * 2 * 4 * 32 * 4


def test_attached_layers_share_the_block_tables_of_a_group() -> None:
    full, sliding = (KVCacheSpec.keys_and_values(2, 64, "bfloat16", window) for window in (0, 128))
    groups = group_layers({"a": full, "b": full, "c": sliding})
    small = KVCacheSpec.keys_and_values(1, 8, "bfloat16", 128)
    (ahead,) = attach_layers({"draft.a": small}, groups, num_tokens_ahead=1)
    (level,) = attach_layers({"draft.b": full}, groups)
    assert (ahead.group, level.group) == (1, 0)
    assert KVCacheConfig(9, 16, groups, (ahead, level)).bytes_per_block == 3 * full.block_bytes(16) + small.block_bytes(
        16
    )
    counts = [KVCacheConfig(9, 16, groups, layers).num_tokens_ahead for layers in ((), (level,), (level, ahead))]
    assert counts == [0, 0, 1]
    with pytest.raises(ConfigError, match=r"draft.a has a sliding window of 128"):
        attach_layers({"draft.a": small}, groups[:1])


def test_a_planned_cache_survives_the_wire() -> None:
    groups = group_layers({"a": KVCacheSpec((KVPlane("latent", 1, 512),), "bfloat16", 64)})
    cache = KVCacheConfig(9, 16, groups, attach_layers({"draft": groups[0].spec}, groups, num_tokens_ahead=1))
    codec = Codec(KVCacheConfig)
    assert list(FrameReader(codec).feed(codec.encode(cache))) == [cache]


def test_longest_request_is_exactly_what_planning_accepts() -> None:
    for windows in ((0,), (0, 10), (10,)):
        groups = group_layers({str(w): KVCacheSpec.keys_and_values(1, 8, "float32", w) for w in windows})
        longest = longest_request(groups, BLOCK_SIZE, 20, 16)
        assert 1 + blocks_for_one_request(groups, BLOCK_SIZE, longest, 16) <= 20
        if windows != (10,):
            with pytest.raises(ConfigError, match=f"at most {longest}") as caught:
                plan_kv_cache(
                    groups,
                    block_size=BLOCK_SIZE,
                    num_blocks=20,
                    max_model_len=longest + BLOCK_SIZE,
                    max_in_flight=16,
                    bytes_per_block=1 << 20,
                )
            assert "kv_cache_memory" in str(caught.value)

"""What each kind of attention finds in the cache and still needs, against brute force."""

from __future__ import annotations

import random

import pytest

from penstock.core.kv_cache_groups import make_group
from penstock.core.kv_cache_planning import blocks_for_one_request, group_layers, longest_request, plan_kv_cache
from penstock.messages.kv_cache_spec import KVCacheSpec
from penstock.utils.errors import ConfigError

BLOCK_SIZE = 4


def is_usable(cached: list[bool], length: int, window: int) -> bool:
    """Whether the query behind `length` cached blocks finds everything that it reads."""
    position = length * BLOCK_SIZE
    first = max(0, position - window + 1) if window else 0
    return all(cached[index] for index in range(first // BLOCK_SIZE, length))


@pytest.mark.parametrize("window", [0, 1, 3, 4, 5, 8, 9, 100])
def test_longest_hit_is_the_longest_usable_prefix(window: int) -> None:
    group = make_group(KVCacheSpec(1, 1, "float32", window), BLOCK_SIZE)
    rng = random.Random(window)
    for _ in range(500):
        cached = [rng.random() < 0.7 for _ in range(rng.randrange(12))]

        longest = max(length for length in range(len(cached) + 1) if is_usable(cached, length, window))
        assert group.longest_hit(cached.__getitem__, len(cached)) == longest


def test_layers_with_equal_specs_share_a_group() -> None:
    full, sliding = KVCacheSpec(2, 64, "bfloat16"), KVCacheSpec(2, 64, "bfloat16", 128)
    groups = group_layers({"a": full, "b": sliding, "c": full})
    assert [group.layer_names for group in groups] == [("a", "c"), ("b",)]
    with pytest.raises(ConfigError, match="one size"):
        group_layers({"a": full, "b": KVCacheSpec(4, 64, "bfloat16")})


def test_longest_request_is_exactly_what_planning_accepts() -> None:
    for windows in ((0,), (0, 10), (10,)):
        groups = group_layers({str(w): KVCacheSpec(1, 8, "float32", w) for w in windows})
        longest = longest_request(groups, BLOCK_SIZE, 20, 16)
        assert 1 + blocks_for_one_request(groups, BLOCK_SIZE, longest, 16) <= 20
        if windows != (10,):
            with pytest.raises(ConfigError, match=f"at most {longest}") as caught:
                plan_kv_cache(
                    groups, block_size=BLOCK_SIZE, num_blocks=20, max_model_len=longest + BLOCK_SIZE, max_in_flight=16
                )
            assert "kv_cache_memory" in str(caught.value)

"""The fields of latent attention in `config.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.config.model import parse_model_config
from penstock.utils.errors import ConfigError

YOUTU: dict[str, Any] = {
    "model_type": "youtu",
    "vocab_size": 301,
    "hidden_size": 96,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "q_lora_rank": 48,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}


def test_one_head_stores_the_latent_and_the_rotated_part() -> None:
    config = parse_model_config(Path("model"), YOUTU, "bfloat16")
    assert config.latent is not None
    assert (config.num_key_value_heads, config.head_dim, config.rotary_dim) == (1, 56, 16)
    assert config.latent.scale == 40**-0.5


@pytest.mark.parametrize(("given", "expected"), [({}, True), ({"rope_interleave": False}, False)])
def test_rotated_pairs_are_neighbours_unless_the_checkpoint_says_otherwise(given: Any, expected: bool) -> None:
    config = parse_model_config(Path("model"), {**YOUTU, **given}, "bfloat16")
    assert config.latent is not None
    assert config.latent.has_rotary_pairs == expected


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"kv_lora_rank": 12}, "kv_lora_rank must be a positive multiple of 8, got 12"),
        ({"v_head_dim": "32"}, "v_head_dim must be a positive multiple of 8, got '32'"),
        ({"qk_rope_head_dim": None}, "qk_rope_head_dim must be"),
        ({"sliding_window": 64}, "sliding_window=64 and latent attention"),
        ({"rope_parameters": {"rope_type": "yarn", "mscale_all_dim": 1.0}}, "lacks the field 'factor'"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse_model_config(Path("model"), {**YOUTU, **given}, "bfloat16")

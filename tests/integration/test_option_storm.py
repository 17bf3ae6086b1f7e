"""Random options together: an engine refuses them with a reason, or gives the answers of a plain run.

Some options decide the numbers, and a plain run has these too; with all others the answers are the same bit for bit.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from penstock.utils.errors import ConfigError
from tests.integration.test_identity_families import (
    EPLB,
    FAMILIES,
    MTP,
    NGRAM,
    NUM_EXPERTS,
    TIER,
    WITH_MODULE,
    Families,
    check_batches,
)

# Draws of the quick test and of the long one.
NUM_QUICK, NUM_LONG = 5, 40
Options = dict[str, Any]


@dataclass(frozen=True)
class Draw:
    """A family, options that decide the numbers, and others."""

    family: str
    numbers: Options
    others: Options


def draw(seed: int) -> Draw:
    rng = random.Random(seed)
    family = rng.choice(FAMILIES)
    has_experts = family in NUM_EXPERTS
    numbers, others = Options(), Options()

    def maybe(chance: float, options: Options, name: str, values: Sequence[Any]) -> None:
        if rng.random() < chance:
            options[name] = rng.choice(values)

    maybe(0.15, numbers, "dtype", ["float32", "float16"])
    if not numbers:
        maybe(0.5, numbers, "quantization", ["int4", "int8"])
        maybe(0.3, numbers, "quantize_head", ["int8"])
        maybe(0.5 if "quantization" in numbers else 0.0, numbers, "quantize_activations", ["int8"])
    maybe(0.3, numbers, "kv_cache_dtype", ["int8"])
    maybe(0.4, others, "max_num_batched_tokens", [16, 24, 48])
    maybe(0.3, others, "max_num_seqs", [1, 2, 3])
    maybe(0.4, others, "async_scheduling", [True])
    maybe(0.5, others, "enable_prefix_caching", [True])
    maybe(0.5 if others.get("enable_prefix_caching") else 0.0, others, "kv_transfer_config", [TIER])
    maybe(0.3, others, "num_gpu_blocks_override", [40, 60])
    maybe(0.2, others, "block_size", [8, 32])
    maybe(0.4, others, "tensor_parallel_size", [2, 3])
    maybe(0.2, others, "pipeline_parallel_size", [2, 3])
    maybe(0.3, others, "speculative_config", [NGRAM, *([MTP] if family in WITH_MODULE else [])])
    maybe(0.3, others, "enable_lora", [True])
    maybe(0.3, others, "num_threads", [1, 2])
    maybe(0.1, others, "scheduling_policy", ["priority"])
    maybe(0.1, others, "check_weights", [True])
    maybe(0.2, others, "state_checkpoint_interval", [32])
    if has_experts and "tensor_parallel_size" in others and rng.random() < 0.7:
        ranks = others["tensor_parallel_size"]
        eplb = {"num_redundant_experts": -NUM_EXPERTS[family] % ranks, "window_size": 3, "step_interval": 3}
        others |= {**EPLB, "eplb_config": eplb}
    return Draw(family, numbers, others)


def check(families: dict[str, Families], seeds: Sequence[int]) -> int:
    """Runs the draws of these seeds, and returns how many were refused."""
    num_refused = 0
    for seed in seeds:
        drawn = draw(seed)
        like = families.setdefault(str(drawn.numbers), Families(families[""].folder, drawn.numbers))
        try:
            check_batches(like, drawn.family, drawn.others)
        except ConfigError:
            num_refused += 1
        except BaseException as error:
            error.add_note(f"seed {seed}: {drawn}")
            raise
    return num_refused


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Families]:
    """Those with the numbers of each draw so far."""
    return {"": Families(tmp_path_factory.mktemp("families"))}


def test_a_few_draws(families: dict[str, Families]) -> None:
    assert check(families, range(NUM_QUICK)) <= NUM_QUICK // 4


@pytest.mark.long
@pytest.mark.timeout(900)
def test_draws_of_fresh_seeds(families: dict[str, Families]) -> None:
    first = random.SystemRandom().randrange(1 << 40)
    assert check(families, range(first, first + NUM_LONG)) <= NUM_LONG // 4

"""The identity of an engine's KV and weights does not depend on how ranks divide the model, and covers every byte."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from penstock.config.load_quantization import LoadQuantization
from penstock.config.speculative import parse_speculative_config
from penstock.engine.cache_plan import plan_cache
from penstock.engine.rank_identity import check_arithmetic, digest_weights
from penstock.engine.transfer import fingerprint, meaning, token_fingerprint
from penstock.kernels.quantized import LayerWeight, quantize_absmax
from penstock.messages.kv_transfer import ShardId
from penstock.messages.tensor_rows import TensorRows
from penstock.models.weights import WeightsDigest
from penstock.utils.digest import add_digests, digest_rows, subtract_digests
from penstock.utils.errors import ConfigError
from penstock.utils.math import interval
from penstock.worker.messages import WorkerFacts
from tests.unit.rank_fakes import heads_of, make_engine_config, make_facts, make_rank, stages_of

GRID = list(itertools.product(range(1, 5), range(1, 5)))
NUM_KV_HEADS, HEAD_ROWS, VOCAB = 2, 3, 101
Checkpoint = dict[str, torch.Tensor]


def make_checkpoint() -> Checkpoint:
    random = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"embed": (VOCAB, 5), "norm": (7,), "lm_head": (VOCAB, 5)}
    for layer in range(7):
        shapes |= {f"{layer}.k": (NUM_KV_HEADS * HEAD_ROWS, 5), f"{layer}.up": (11, 5), f"{layer}.norm": (5,)}
    return {name: torch.randn(shape, generator=random).bfloat16() for name, shape in shapes.items()}


def read_by(tensors: Checkpoint, rows: Mapping[str, Sequence[tuple[int, int]]]) -> tuple[TensorRows, ...]:
    found = WeightsDigest(has_bytes=True)
    for name, intervals in rows.items():
        for first, end in intervals:
            part = tensors[name][first:end]
            found.add(name, tensors[name].shape, (slice(first, end),), part, part.dtype)
    return found.rows()


def read_by_ranks(tensors: Checkpoint, pp: int, tp: int, counts: Sequence[int] | None = None) -> dict[ShardId, tuple]:
    """Features are divided, and keys by whole heads; norms are read whole, and the embedding whole and in parts."""
    read: dict[ShardId, tuple] = {}
    for stage, layers in enumerate(stages_of(pp, counts)):
        for rank in range(tp):
            rows: dict[str, list[tuple[int, int]]] = {}
            for layer in layers:
                first, end = heads_of(NUM_KV_HEADS, rank, tp)
                rows[f"{layer}.k"] = [(first * HEAD_ROWS, end * HEAD_ROWS)]
                rows[f"{layer}.up"] = [interval(11, rank, tp)]
                rows[f"{layer}.norm"] = [(0, 5)]
            if stage == 0:
                rows["embed"] = [(0, VOCAB)]
            if stage == pp - 1:
                rows["embed"] = [*rows.get("embed", ()), interval(VOCAB, rank, tp)]
                rows["lm_head"] = [interval(VOCAB, rank, tp)]
                rows["norm"] = [(0, 7)]
            read[stage, rank] = read_by(tensors, rows)
    return read


def facts_of(tensors: Checkpoint, pp: int = 1, tp: int = 1, counts: Sequence[int] | None = None) -> list[WorkerFacts]:
    read = read_by_ranks(tensors, pp, tp, counts)
    return [structs.replace(each, read=read[each.shard]) for each in make_facts(pp, tp, counts)]


WHOLE = digest_weights(facts_of(make_checkpoint()))


@pytest.mark.parametrize(("pp", "tp"), [*GRID, (2, 7), (1, 20)])
def test_the_weights_digest_does_not_depend_on_the_split(pp: int, tp: int) -> None:
    tensors = make_checkpoint()
    facts = facts_of(tensors, pp, tp)
    random.Random(pp).shuffle(facts)
    assert digest_weights(facts) == WHOLE
    if pp == 3:
        assert digest_weights(facts_of(tensors, pp, tp, (1, 1, 5))) == WHOLE


def test_the_weights_digest_covers_every_byte() -> None:
    found = {WHOLE}
    count = 1
    for name in ("embed", "3.k", "norm"):
        num_bytes = make_checkpoint()[name].nbytes
        for at in range(0, num_bytes, max(1, num_bytes // 40)):
            tensors = make_checkpoint()
            tensors[name].view(-1).view(torch.uint8)[at] ^= 1
            found |= {digest_weights(facts_of(tensors, 2, 3)), digest_weights(facts_of(tensors))}
            count += 1
    assert len(found) == count


def test_the_weights_digest_covers_positions_names_and_types() -> None:
    tensors = make_checkpoint()
    swapped = {**tensors, "embed": tensors["embed"][[1, 0, *range(2, VOCAB)]]}
    exchanged = {**tensors, "0.up": tensors["1.up"], "1.up": tensors["0.up"]}
    renamed = {**tensors, "2.up": tensors["2.up"].view(torch.float16)}
    shorter = {**tensors, "embed": tensors["embed"][:-1], "extra": tensors["embed"][-1:]}
    others = [facts_of(each) for each in (swapped, exchanged, renamed)]
    others.append([make_rank((0, 0), read_by(shorter, {name: [(0, len(each))] for name, each in shorter.items()}))])
    assert len({WHOLE, *map(digest_weights, others)}) == 5


def test_the_weights_digest_is_that_of_the_values_that_a_layer_gets() -> None:
    """However they are stored: in wider numbers, or rounded to a grid."""
    weight = quantize_absmax(torch.randn(6, 64).bfloat16(), 4, 32)
    values = weight.dequantize()

    def found(tensor: LayerWeight, dtype: torch.dtype) -> tuple[TensorRows, ...]:
        rows = WeightsDigest(has_bytes=True)
        rows.add("up", tensor.shape, (slice(6),), tensor, dtype)
        return rows.rows()

    for dtype in (torch.bfloat16, torch.float32):
        assert found(weight, dtype) == found(values, dtype) == found(values.float(), dtype)
    close = values.float() * (1 + 2**-12)
    assert found(close, torch.bfloat16) == found(values, torch.bfloat16)
    assert found(close, torch.float32) != found(values, torch.float32)
    by_integers = quantize_absmax(values, 8, 0)
    assert found(by_integers, torch.bfloat16) != found(replace(by_integers, quantizes_inputs="by row"), torch.bfloat16)
    ids = torch.tensor([256, 257, 1 << 40])
    assert found(ids, torch.bfloat16) == found(ids, torch.float32) != found(ids + 1, torch.bfloat16)


def test_ranks_that_have_read_other_bytes_are_refused() -> None:
    """This includes the case that one rank has read all rows, and others parts that add up to a different digest."""
    other = make_checkpoint()
    other["embed"][7, 3] += 1
    facts = facts_of(make_checkpoint(), 2, 3)
    facts[4] = structs.replace(facts[4], read=facts_of(other, 2, 3)[4].read)
    assert digest_weights(facts) == WHOLE  # the row that differs is not among those of rank (1, 1)
    facts[3] = structs.replace(facts[3], read=facts_of(other, 2, 3)[3].read)
    with pytest.raises(ConfigError, match=r"ranks .*\(1, 0\).* have read different weights of 'embed'"):
        digest_weights(facts)
    other = make_checkpoint()
    other["3.norm"][0] += 1
    facts = facts_of(make_checkpoint(), 2, 3)
    facts[4] = structs.replace(facts[4], read=facts_of(other, 2, 3)[4].read)
    with pytest.raises(ConfigError, match=r"ranks \(1, 0\), \(1, 1\) have read different weights of '3.norm'"):
        digest_weights(facts)


def test_rows_that_no_rank_has_read_are_an_assertion_error() -> None:
    facts = facts_of(make_checkpoint(), 2, 3)
    for shard in ((0, 1), (1, 2)):
        with pytest.raises(AssertionError, match="are not all of its"):
            digest_weights([each for each in facts if each.shard != shard])


def test_digests_of_rows_add_up() -> None:
    rows = np.random.default_rng(0).integers(0, 256, (37, 11), dtype=np.uint8)
    whole = digest_rows(rows, 0)
    for cut in (0, 1, 16, 36, 37):
        before, after = digest_rows(rows[:cut], 0), digest_rows(rows[cut:], cut)
        assert add_digests(before, after) == whole
        assert subtract_digests(whole, after) == before
    assert digest_rows(rows, 1) != whole


@pytest.mark.parametrize(("pp", "tp"), GRID)
def test_the_fingerprint_does_not_depend_on_the_split(pp: int, tp: int) -> None:
    config = make_engine_config(num_gpu_blocks_override=40)
    identities = []
    for facts in (facts_of(make_checkpoint()), facts_of(make_checkpoint(), pp, tp)):
        _, cache = plan_cache(config, facts)
        identities.append((fingerprint(config, cache, facts), meaning(config, cache, facts)))
    assert identities[0] == identities[1]


def test_what_the_fingerprint_covers() -> None:
    config = make_engine_config(num_gpu_blocks_override=40)
    other = make_checkpoint()
    other["lm_head"][100, 4] += 1
    facts = facts_of(make_checkpoint(), 2, 2)
    found: set[bytes] = set()
    for each in (
        facts,
        facts_of(other, 2, 2),
        [structs.replace(each, arithmetic="avx2") for each in facts],
        [structs.replace(each, device="cuda") for each in facts],
        make_facts(2, 2, num_heads=8),
        make_facts(2, 2, has_drafter=False),
    ):
        _, cache = plan_cache(config, each)
        found.add(fingerprint(config, cache, each))
    assert len(found) == 6
    _, cache = plan_cache(config, facts)
    long = replace(config.model.rope, scaling={"is_long": True})
    longer = replace(config, model=replace(config.model, rope=long))
    assert fingerprint(longer, cache, facts) not in found
    for rounded in (LoadQuantization(layers=8), LoadQuantization(layers=4), LoadQuantization(head=8), A8):
        changed = fingerprint(replace(config, load_quantization=rounded), cache, facts)
        assert changed not in found
        found.add(changed)


A8 = LoadQuantization(layers=8, activations=True)


def test_streams_go_on_with_the_same_weights_and_arithmetic_whatever_the_speculator_is() -> None:
    config = make_engine_config(num_gpu_blocks_override=40)
    facts, other = facts_of(make_checkpoint()), make_checkpoint()
    other["lm_head"][100, 4] += 1

    def found(facts: Sequence[WorkerFacts]) -> str:
        return token_fingerprint(config, plan_cache(config, facts)[1], facts)

    arithmetic = [structs.replace(each, arithmetic="avx2") for each in facts]
    assert len({found(facts), found(facts_of(other)), found(arithmetic)}) == 3
    without = [structs.replace(each, read=facts[0].read) for each in make_facts(1, 1, has_drafter=False)]
    assert found(without) == found(facts)


SAMPLED_DRAFTS = {"draft_sample_method": "probabilistic"}
SYNTHETIC = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [1, 1]}


@pytest.mark.parametrize(("options", "go_on"), [({}, True), (SAMPLED_DRAFTS, False), (SYNTHETIC, False)])
def test_streams_do_not_go_on_where_drafts_determine_tokens(options: Mapping[str, Any], go_on: bool) -> None:
    config, facts = make_engine_config(num_gpu_blocks_override=40), facts_of(make_checkpoint())
    _, cache = plan_cache(config, facts)
    drafts = parse_speculative_config({"method": "mtp", "num_speculative_tokens": 2, **options}, config.model)
    usual, found = (token_fingerprint(replace(config, speculative=each), cache, facts) for each in (None, drafts))
    assert found == (usual if go_on else "")


def test_other_kernels_differ_in_nothing_that_allow_other_arithmetic_does_not_cover() -> None:
    config = make_engine_config(num_gpu_blocks_override=40)
    facts = make_facts(1, 1)
    _, cache = plan_cache(config, facts)
    usual = meaning(config, cache, facts)
    other = meaning(config, cache, [structs.replace(each, arithmetic="avx2 0123", device="cuda") for each in facts])
    assert {name for name in usual if usual[name] != other[name]} == {"arithmetic"}


@pytest.mark.parametrize(
    ("kernels", "dtype", "matters"),
    [("torch", "float32", True), ("torch", "bfloat16", False), ("avx2", "float32", False)],
)
def test_the_number_of_threads_is_covered_where_it_changes_bits(kernels: str, dtype: str, matters: bool) -> None:
    config = make_engine_config(num_gpu_blocks_override=40, dtype=dtype)
    identities: set[tuple[bytes, str]] = set()
    for num_threads in (1, 2):
        facts = [structs.replace(each, kernels=kernels, num_threads=num_threads) for each in make_facts(2, 2)]
        _, cache = plan_cache(config, facts)
        identities.add((fingerprint(config, cache, facts), meaning(config, cache, facts)["arithmetic"]))
    assert len(identities) == 1 + matters


def test_the_meaning_names_what_differs() -> None:
    config = make_engine_config(num_gpu_blocks_override=40)
    facts = facts_of(make_checkpoint(), 2, 2)
    other = make_checkpoint()
    other["3.up"][10, 4] += 1
    _, cache = plan_cache(config, facts)
    own = meaning(config, cache, facts)
    for changed, name in (
        (facts_of(other, 2, 2), "weights"),
        ([structs.replace(each, arithmetic="avx2") for each in facts], "arithmetic"),
        ([structs.replace(each, device="cuda") for each in facts], "arithmetic"),
    ):
        found = meaning(config, cache, changed)
        assert [key for key in own if found[key] != own[key]] == [name]
    found = meaning(replace(config, load_quantization=LoadQuantization(layers=4)), cache, facts)
    assert [key for key in own if found[key] != own[key]] == ["weights"]


def test_ranks_with_another_arithmetic_are_refused() -> None:
    facts = make_facts(2, 2)
    check_arithmetic(facts)
    for number, changed in ((2, {"arithmetic": "avx2"}), (1, {"device": "cuda"})):
        mixed = [*facts[:number], structs.replace(facts[number], **changed), *facts[number + 1 :]]
        with pytest.raises(ConfigError, match=r"rank \(0, 0\) computes on cpu with generic, and rank \(\d, [01]\) on"):
            check_arithmetic(mixed)

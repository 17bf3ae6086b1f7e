"""The graph that a step replays: the captured shape that fits it with the least padding, or no graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from penstock.attention.native import NativeAttention
from penstock.config.engine import SchedulerConfig
from penstock.runner.batch_shapes import BatchDescriptor, BatchShapes, graph_sizes
from penstock.runner.host_batch import HostBatch

CONTEXTS = (1024, 4096, 10000)


def shapes(contexts: Sequence[int] = CONTEXTS, ragged: bool = True, mixed: bool = False, **changes: Any) -> BatchShapes:
    limits: dict[str, Any] = {"max_num_batched_tokens": 512, "max_num_seqs": 100, "max_model_len": 10000}
    attention = NativeAttention()
    attention.captures_ragged, attention.captures_mixed = ragged, mixed
    return BatchShapes(SchedulerConfig(**{**limits, "drafts": ((8, 3), (32, 1)), **changes}), contexts, attention)


def host(counts: Sequence[int], computed: int = 100, sampling: Sequence[int] | None = None) -> HostBatch:
    """Returns requests with these numbers of tokens; all are sampled from unless `sampling` gives other numbers."""
    lens = np.array(counts)
    drafts = (lens if sampling is None else np.array(sampling)) - 1
    rows = np.arange(len(lens))
    return HostBatch(("",) * len(lens), rows, lens, np.full(len(lens), computed), rows, drafts, int(lens.sum()))


def test_sizes_grow_by_quarters() -> None:
    assert graph_sizes(1) == [1]
    assert graph_sizes(5) == [1, 2, 4, 5]
    assert graph_sizes(256)[-9:] == [64, 80, 96, 112, 128, 160, 192, 224, 256]


@pytest.mark.parametrize(
    ("counts", "computed", "expected"),
    [
        ([1], 100, (1, 1, 1, 1024)),
        ([1, 1, 1], 1020, (4, 4, 1, 1024)),
        ([1, 1, 1], 1021, (4, 4, 1, 4096)),  # with three drafts after them
        ([4] * 9, 100, (16, 64, 4, 1024)),
        ([2, 1], 9990, (2, 4, 2, 10000)),
        ([4, 1, 3], 100, (4, 16, 4, 1024)),
        ([1] * 97, 9999, (100, 100, 1, 10000)),
    ],
)
def test_a_step_gets_the_smallest_captured_shape_that_fits(
    counts: list[int], computed: int, expected: tuple[int, ...]
) -> None:
    found = shapes().of(host(counts, computed))
    assert found == BatchDescriptor(*expected)
    assert found in shapes().captured


@pytest.mark.parametrize(
    ("batch", "kind"),
    [
        (host([5]), shapes()),  # more tokens than any window of drafts
        (host([2, 2], sampling=[2, 1]), shapes()),  # a prompt's end: not all of its tokens are sampled from
        (host([4, 1, 3]), shapes(ragged=False)),
        (host([1, 1]), shapes(contexts=())),
    ],
)
def test_steps_that_fit_no_graph_have_their_own_shape(batch: HostBatch, kind: BatchShapes) -> None:
    found = kind.of(batch)
    assert found == BatchDescriptor(len(batch.rows), batch.num_tokens, batch.max_query_len, batch.max_seq_len + 3)
    assert found not in kind.captured


@pytest.mark.parametrize(
    ("batch", "kind", "expected"),
    [
        (host([5]), shapes(mixed=True), (16, 16)),
        (host([2, 2], sampling=[2, 1]), shapes(mixed=True), (16, 16)),
        (host([4, 1, 3]), shapes(ragged=False, mixed=True), (16, 16)),
        (host([30, *[1] * 70], computed=9000), shapes(mixed=True), (100, 128)),
        (host([512]), shapes(mixed=True), (100, 512)),
    ],
)
def test_mixed_steps_get_mixed_shapes(batch: HostBatch, kind: BatchShapes, expected: tuple[int, int]) -> None:
    num_reqs, num_tokens = expected
    found = kind.of(batch)
    assert found == BatchDescriptor(num_reqs, num_tokens, num_tokens, CONTEXTS[-1])
    assert found in kind.captured
    assert kind.is_mixed(found)


def test_steps_that_are_too_large_for_a_mixed_graph() -> None:
    kind = shapes(mixed=True, max_num_batched_tokens=4096)
    assert kind.of(host([1024])) in kind.captured
    assert kind.of(host([1025])) not in kind.captured
    # No mixed graph is larger than the largest step.
    few = shapes(mixed=True, max_num_batched_tokens=100)
    assert few.of(host([97])) == BatchDescriptor(1, 97, 97, 200)
    assert not shapes(mixed=True, contexts=()).captured


def test_a_backend_without_ragged_graphs_replays_uniform_steps() -> None:
    assert shapes(ragged=False).of(host([4, 4, 4])) == BatchDescriptor(4, 16, 4, 1024)


def test_the_captured_shapes() -> None:
    captured = shapes().captured
    assert len(captured) == len(set(captured)) == len(graph_sizes(100)) * 3 * len(CONTEXTS)
    assert captured[0] == BatchDescriptor(100, 400, 4, 10000)
    assert not any(map(shapes().is_mixed, captured))
    assert shapes().max_num_tokens == 512
    assert shapes(max_num_batched_tokens=16).max_num_tokens == 400
    assert shapes(max_num_batched_tokens=16, contexts=()).max_num_tokens == 16

"""Results that an earlier stage has not yet received: when it must receive them, and to which requests they apply."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

import numpy as np
import pytest

from penstock.messages.scheduler_output import SchedulerOutput
from penstock.runner.awaited_results import AwaitedResults
from penstock.runner.host_batch import HostBatch, read_plan
from penstock.runner.rows import Rows


def batch(rows: Rows, step: int, decoding: Sequence[str] = (), in_prompt: Sequence[str] = ()) -> HostBatch:
    """Returns a step in which some requests sample and others compute a chunk inside their prompts of 8 tokens."""
    counts = {**dict.fromkeys(in_prompt, 2), **dict.fromkeys(decoding, 1)}
    plan = SchedulerOutput(
        step=step,
        num_scheduled_tokens=counts,
        num_computed_tokens=(0,) * len(in_prompt) + (8,) * len(decoding),
        total_num_scheduled_tokens=sum(counts.values()),
    )
    return read_plan(plan, rows)


def make(*request_ids: str, depth: int = 3) -> tuple[Rows, AwaitedResults]:
    rows = Rows(4)
    for request_id in request_ids:
        rows.add(request_id, 8)
    return rows, AwaitedResults(rows, depth)


def due(awaited: AwaitedResults, rows: Rows, step: int, *request_ids: str) -> int:
    return awaited.num_due(step, rows.rows(request_ids))


def test_a_result_and_all_before_it_are_due_when_its_request_runs_again() -> None:
    rows, awaited = make("a", "b", "c")
    awaited.expect(1, batch(rows, 1, ["a"]))
    awaited.expect(2, batch(rows, 2, ["b"]))
    assert due(awaited, rows, 3, "c") == 0
    assert due(awaited, rows, 3, "a", "c") == 1
    assert due(awaited, rows, 3, "b") == 2
    assert due(awaited, rows, 3) == 0
    awaited.take()
    assert due(awaited, rows, 3, "a", "b") == 1
    awaited.take()
    assert due(awaited, rows, 3, "a", "b", "c") == 0


def test_a_step_that_samples_nothing_has_no_result() -> None:
    rows, awaited = make("a", "b")
    awaited.expect(1, batch(rows, 1, in_prompt=["a", "b"]))
    assert len(awaited) == 0
    awaited.expect(2, batch(rows, 2, ["b"], in_prompt=["a"]))
    assert len(awaited) == 1
    assert due(awaited, rows, 3, "a") == 0
    owned = awaited.take()
    assert owned.positions.tolist() == [0]
    assert owned.rows.tolist() == rows.rows(["b"]).tolist()


def test_tokens_for_an_earlier_owner_of_a_row_are_dropped() -> None:
    rows, awaited = make("a", "b")
    awaited.expect(1, batch(rows, 1, ["a", "b"]))
    row = rows.row("a")
    rows.remove(["a"])
    assert rows.add("new", 8) == row
    assert due(awaited, rows, 2, "new") == 0, "a new owner waits for nothing"
    owned = awaited.take()
    assert owned.positions.tolist() == [1]
    assert owned.rows.tolist() == [rows.row("b")]


def test_a_request_that_returns_to_its_row_is_a_new_owner() -> None:
    rows, awaited = make("a")
    awaited.expect(1, batch(rows, 1, ["a"]))
    rows.remove(["a"])
    rows.add("a", 8)
    assert due(awaited, rows, 2, "a") == 0
    awaited.expect(2, batch(rows, 2, ["a"]))
    assert due(awaited, rows, 3, "a") == 2
    assert awaited.take().positions.tolist() == []
    assert awaited.take().positions.tolist() == [0]


def test_results_of_processed_steps_are_due_for_any_request() -> None:
    rows, awaited = make("a", "b", depth=2)
    awaited.expect(1, batch(rows, 1, ["a"]))
    assert due(awaited, rows, 2, "b") == 0
    assert due(awaited, rows, 3, "b") == 1
    assert due(awaited, rows, 9) == 1
    with pytest.raises(AssertionError, match="never received"):
        awaited.expect(3, batch(rows, 3, ["b"]))


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_random_traffic_applies_each_token_to_its_own_request(depth: int) -> None:
    rng = random.Random(depth)
    rows = Rows(3)
    awaited = AwaitedResults(rows, depth)
    channel: deque[list[str]] = deque()
    last_of: dict[int, str] = {}  # row -> the request whose token it holds
    owners: list[str] = []
    sampled: set[str] = set()
    num_dropped = 0
    for step in range(1, 3000):
        for leaver in [each for each in owners if rng.random() < 0.2]:
            owners.remove(leaver)
            rows.remove([leaver])
        while len(owners) < 3 and rng.random() < 0.7:
            owners.append(f"{step}-{len(owners)}")
            last_of[rows.add(owners[-1], 8)] = ""
        host = batch(rows, step, rng.sample(owners, rng.randrange(len(owners) + 1)))
        for _ in range(awaited.num_due(step, host.rows)):
            result, owned = channel.popleft(), awaited.take()
            num_dropped += len(result) - len(owned.positions)
            last_of.update(zip(owned.rows.tolist(), [result[i] for i in owned.positions], strict=True))
        for request_id in host.request_ids:
            holds = last_of[rows.row(request_id)]
            assert holds == (request_id if request_id in sampled else ""), "a foreign or a stale token"
        awaited.expect(step, host)
        assert len(awaited) <= depth
        if host.request_ids:
            channel.append(host.sampling_request_ids)
            sampled.update(host.request_ids)
    assert num_dropped > 100
    assert np.all(rows.generation > 100)

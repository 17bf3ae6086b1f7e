"""State rows: the row that a request gets, and the requests of a step that sample."""

from __future__ import annotations

from penstock.messages.scheduler_output import SchedulerOutput
from penstock.runner.host_batch import read_plan
from penstock.runner.rows import Rows


def test_rows_are_freed_equally_on_every_rank_and_the_lowest_is_reused() -> None:
    ranks = [Rows(4), Rows(4)]
    for rows, order in zip(ranks, (("b", "a", "unknown"), ("unknown", "a", "b")), strict=True):
        assert [rows.add(name, 3) for name in "abcd"] == [0, 1, 2, 3]
        assert rows.remove(order) == [0, 1]
        assert [rows.add(name, 3) for name in "ef"] == [0, 1]
        assert rows.rows(["f", "c", "e"]).tolist() == [1, 2, 0]


def test_a_row_samples_when_the_step_reaches_the_last_known_token() -> None:
    rows = Rows(3)
    for name, known in (("chunk", 10), ("last chunk", 10), ("decode", 5)):
        rows.add(name, known)
    plan = SchedulerOutput(
        step=1,
        num_scheduled_tokens={"chunk": 4, "last chunk": 4, "decode": 3},
        num_computed_tokens=(0, 6, 5),
        total_num_scheduled_tokens=11,
        num_draft_tokens={"decode": 2},
    )
    host = read_plan(plan, rows)
    assert host.sampling_request_ids == ["last chunk", "decode"]
    assert host.num_drafts.tolist() == [0, 2]
    assert host.num_computed_upper_bound.tolist() == [0, 6, 5]

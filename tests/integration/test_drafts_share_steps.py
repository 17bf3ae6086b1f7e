"""Steps that are too short for every request's drafts."""

from __future__ import annotations

import pytest

from penstock import LLM, SamplingParams
from penstock.core.scheduler import Scheduler
from penstock.messages.scheduler_output import SchedulerOutput


@pytest.mark.parametrize("budget", [8, 16])
def test_drafts_of_requests_in_front_leave_a_token_for_those_behind(
    budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With drafts for all, eight requests would take 32 tokens of a step."""
    steps: list[SchedulerOutput] = []
    schedule = Scheduler.schedule

    def recorded(self: Scheduler, must: bool = False) -> SchedulerOutput | None:
        plan = schedule(self, must)
        steps.extend([] if plan is None else [plan])
        return plan

    speculation = {"method": "mtp", "num_speculative_tokens": 3}
    limits = {"max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": budget}
    llm = LLM(**limits, speculative_config=speculation, async_scheduling=False)
    monkeypatch.setattr(Scheduler, "schedule", recorded)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    llm.generate([{"prompt_token_ids": [5 + number]} for number in range(8)], params, use_tqdm=False)
    llm.shutdown()
    assert budget == 8 or any(step.num_draft_tokens for step in steps)
    # Six steps at least: a request has at most four new tokens in one.
    assert [len(step.num_scheduled_tokens) for step in steps[:6]] == [8] * 6
    assert all(step.total_num_scheduled_tokens <= budget for step in steps)

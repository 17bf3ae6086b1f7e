"""A token that cannot be drawn, among drafts: those before it count."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from penstock.core.step_result import apply_counts
from penstock.messages.runner_output import ModelRunnerOutput
from penstock.runner.outputs import NOT_FINITE, NOTHING_ALLOWED, SampledArrays, Verdict, make_output


def test_tokens_up_to_the_first_one_that_cannot_be_drawn() -> None:
    bad = {"grammar": (1, Verdict.NOTHING_ALLOWED), "nan": (0, Verdict.NOT_FINITE), "fine": (2, Verdict.FINE)}
    verdicts = np.zeros(9, np.int8)
    for number, (place, verdict) in enumerate(bad.values()):
        verdicts[3 * number + place] = verdict
    host = SimpleNamespace(
        request_ids=list(bad),
        sampling_request_ids=list(bad),
        num_logits=9,
        has_drafts=True,
        window_starts=np.array([0, 3, 6]),
        num_drafts=np.array([2, 2, 2]),
    )
    sampled = SampledArrays(np.arange(9), verdicts, np.array([2, 2, 1]), np.array([2, 2, 2]))
    output = make_output(cast(Any, host), sampled)
    assert output.sampled_token_ids == {"grammar": (0,), "nan": (), "fine": (6, 7)}
    assert output.unsatisfiable_requests == {"grammar": NOTHING_ALLOWED}
    assert output.failed_requests == {"nan": NOT_FINITE}


def test_a_request_without_tokens_has_accepted_no_drafts() -> None:
    request = SimpleNamespace(
        request_id="a",
        num_drafts=0,
        num_last_accepted=0,
        on_processed=lambda *_: None,
    )
    result = ModelRunnerOutput(sampled_token_ids={"a": ()}, num_draft_tokens={"a": 2})
    verified = apply_counts(cast(Any, request), 3, 2, result)
    assert (verified.num_drafts, verified.num_accepted) == (2, 0)

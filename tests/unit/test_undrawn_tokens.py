"""A token that cannot be drawn, among drafts: those before it count."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from penstock.core.step_result import apply_counts
from penstock.messages.runner_output import ModelRunnerOutput
from penstock.runner.outputs import (
    NOT_FINITE,
    NOTHING_ALLOWED,
    SampledArrays,
    Verdict,
    check_chunks,
    make_output,
)


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


@pytest.mark.parametrize(
    ("spoiled", "failed"),
    [
        ((), ()),
        ((3, 4), ("chunk",)),
        ((0, 1, 2, 3, 4, 9, 10), ("chunk", "last chunk of another prompt but one")),
        # The last layer's output alone, of one token: its KV is finite.
        ((4,), ()),
        # Rows that sample, and chunks of one token: the next ones show whether their KV is finite.
        ((5, 6, 7, 8), ()),
    ],
)
def test_chunks_whose_kv_is_not_finite_fail(spoiled: tuple[int, ...], failed: tuple[str, ...]) -> None:
    names = ("chunk", "sampling", "one token", "last chunk of another prompt but one")
    query_lens = np.array([5, 3, 1, 2])
    host = SimpleNamespace(
        request_ids=names,
        query_lens=query_lens,
        sampling=np.array([1]),
        query_start_loc=np.array([0, *query_lens.cumsum()], np.int32),
    )
    hidden = torch.ones(11, 4)
    hidden[list(spoiled), 2] = torch.inf
    output = ModelRunnerOutput(failed_requests={"sampling": "another reason"})
    for part in check_chunks(cast(Any, host), hidden, lambda tensor: tensor.clone().numpy):
        output = part(output)
    assert output.failed_requests == {"sampling": "another reason", **dict.fromkeys(failed, NOT_FINITE)}

"""Converts a step's samples to the scheduler's output, at once or when the result is requested."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from msgspec.structs import replace

from penstock.messages.experts import NO_EXPERTS, ExpertsOutput
from penstock.messages.kv_transfer import NO_OUTPUT, KVConnectorOutput
from penstock.messages.runner_output import ModelRunnerOutput
from penstock.runner.buffers import HostCopy
from penstock.runner.host_batch import HostBatch

NOT_FINITE = "no token can be drawn: the logits are not finite"
NOTHING_ALLOWED = (
    "no token can be drawn: what the request allows (a grammar, allowed_token_ids, ...) excludes all of them"
)


class PendingOutput(Protocol):
    """The result of a launched step. It is independent of the runner."""

    def result(self) -> ModelRunnerOutput:
        """Waits for the step. Called once, from any thread."""
        ...


@dataclass(frozen=True, slots=True)
class ReadyOutput:
    output: ModelRunnerOutput

    def result(self) -> ModelRunnerOutput:
        return self.output


PendingPart = Callable[[ModelRunnerOutput], ModelRunnerOutput]
"""A part of a step's result besides its tokens: waits for it, and adds it. It is independent of the runner."""


@dataclass(frozen=True, slots=True)
class CopiedDrafts:
    """The scheduler's data of a step's new drafts, reduced to the minimum (`PendingPart`)."""

    request_ids: list[str]
    with_ids: list[int]  # the requests whose draft ids are reported, as indices
    with_counts: bool  # whether gaps are reported
    drafts: HostCopy  # [len(request_ids), num_drafts] int64, -1 for gaps

    def __call__(self, output: ModelRunnerOutput) -> ModelRunnerOutput:
        drafts = self.drafts()
        counts = (drafts >= 0).sum(1).tolist() if self.with_counts else []
        return replace(
            output,
            draft_token_ids={self.request_ids[i]: tuple(drafts[i].tolist()) for i in self.with_ids},
            num_proposed_tokens=dict(zip(self.request_ids, counts, strict=False)),
        )


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The sampled tokens, with the other parts of the step's result."""

    sampled: PendingOutput
    parts: tuple[PendingPart, ...] = ()
    is_replayed: bool = False
    kv_connector_output: KVConnectorOutput = NO_OUTPUT
    experts: ExpertsOutput = NO_EXPERTS

    def result(self) -> ModelRunnerOutput:
        output = self.sampled.result()
        for part in self.parts:
            output = part(output)
        return replace(
            output, is_replayed=self.is_replayed, kv_connector_output=self.kv_connector_output, experts=self.experts
        )


class Verdict(enum.IntEnum):
    """The reason why no token can be drawn."""

    FINE = 0
    NOT_FINITE = 1
    NOTHING_ALLOWED = 2


@dataclass(frozen=True, slots=True)
class SampledArrays:
    """The samples, on the CPU. In each window, the tokens up to the one after the accepted drafts count."""

    token_ids: np.ndarray  # [at least num_logits] int64
    verdicts: np.ndarray  # [at least num_logits] int8: `Verdict`
    num_accepted: np.ndarray  # [num_sampling] int64
    num_real_drafts: np.ndarray  # [num_sampling] int64


def make_output(host: HostBatch, sampled: SampledArrays) -> ModelRunnerOutput:
    """Returns the accepted drafts and the token after them of each request's window; none if nothing was sampled.

    Distinguishes a model that produced NaN from a request that allows no token. The tokens before it count: the request
    may end with one of them.
    """
    names, num_logits = host.sampling_request_ids, host.num_logits
    tokens: dict[str, tuple[int, ...]] = dict.fromkeys(host.request_ids, ())
    if not host.has_drafts and not sampled.verdicts[:num_logits].any():
        tokens.update(zip(names, zip(sampled.token_ids[:num_logits].tolist(), strict=True), strict=True))
        return ModelRunnerOutput(sampled_token_ids=tokens)
    num_draft_tokens: dict[str, int] = {}
    failed: dict[str, str] = {}
    unsatisfiable: dict[str, str] = {}
    token_ids, verdicts = sampled.token_ids.tolist(), sampled.verdicts.tolist()
    starts, num_drafts = host.window_starts.tolist(), host.num_drafts.tolist()
    accepted, real = sampled.num_accepted.tolist(), sampled.num_real_drafts.tolist()
    for index, (request_id, start, num_accepted) in enumerate(zip(names, starts, accepted, strict=True)):
        end = start + 1 + num_accepted
        undrawn = next((row for row in range(start, end) if verdicts[row]), end)
        tokens[request_id] = tuple(token_ids[start:undrawn])
        if num_drafts[index]:
            num_draft_tokens[request_id] = real[index]
        if undrawn < end and verdicts[undrawn] == Verdict.NOT_FINITE:
            failed[request_id] = NOT_FINITE
        elif undrawn < end:
            unsatisfiable[request_id] = NOTHING_ALLOWED
    return ModelRunnerOutput(
        sampled_token_ids=tokens,
        num_draft_tokens=num_draft_tokens,
        failed_requests=failed,
        unsatisfiable_requests=unsatisfiable,
    )


def make_empty_output(host: HostBatch) -> ModelRunnerOutput:
    """Returns the output of a step in which no request samples."""
    return ModelRunnerOutput(sampled_token_ids=dict.fromkeys(host.request_ids, ()))

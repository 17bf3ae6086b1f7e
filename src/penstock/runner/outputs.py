"""Converts a step's samples to the scheduler's output, at once or when the result is requested."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
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


def check_chunks(
    host: HostBatch, hidden: torch.Tensor, copy_to_host: Callable[[torch.Tensor], HostCopy], reason: str = NOT_FINITE
) -> tuple[PendingPart, ...]:
    """Fails requests with a number that is not finite in the KV of a prompt's chunk, from which nothing is sampled yet;
    `reason` is their error.

    The tokens after such a number have none that are finite; nor do those before it, if attention computes the two
    together. The blocks of these must not be published: other prompts may begin with the same tokens. A last layer's
    output, which is in no KV, fails nothing: the last two `hidden` states [num_tokens, hidden_size] must be alike.
    """
    is_chunk = host.query_lens > 1
    is_chunk[host.sampling] = False
    if not is_chunk.any():
        return ()
    # Slices, because indices would have to be copied to the device.
    ends = host.query_start_loc[1:][is_chunk].tolist()
    is_sound = copy_to_host(torch.stack([hidden[end - 2 : end] for end in ends]).isfinite().all(-1).any(-1))

    def fail(output: ModelRunnerOutput) -> ModelRunnerOutput:
        failed = dict.fromkeys((host.request_ids[i] for i in np.flatnonzero(is_chunk)[~is_sound()]), reason)
        return replace(output, failed_requests={**output.failed_requests, **failed})

    return (fail,)


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
        kv, experts = self.kv_connector_output, self.experts
        return replace(output, is_replayed=self.is_replayed, kv_connector_output=kv, experts=experts)


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

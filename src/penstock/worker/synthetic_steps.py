"""Synthetic steps on a runner without KV, for work that depends on a step's size and not on its tokens.

All blocks of a synthetic request are the null block, so a cache of one block is enough for any context; the written KV
and the results are meaningless. Discard a runner that has run such a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from penstock.config.engine import SchedulerConfig
from penstock.messages.kv_cache_spec import NULL_BLOCK
from penstock.messages.requests import RowRequest
from penstock.messages.sampling_params import SamplingParams
from penstock.messages.scheduler_output import NewRequestData, SchedulerOutput
from penstock.utils.math import cdiv

# The kinds of sampling for warm-up and profiling, as sampling parameters.
KINDS = (
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 2},
    {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0.8, "repetition_penalty": 1.1, "presence_penalty": 0.1, "min_tokens": 2, "logit_bias": {0: 1.0}},
    {"temperature": 0.8, "top_k": 5, "logit_bias": {0: 1.0}},
)


class SyntheticSteps:
    """Makes plans for one runner, in execution order."""

    def __init__(self, limits: SchedulerConfig, num_groups: int, block_size: int) -> None:
        self._limits = limits
        self._num_groups = num_groups
        self._block_size = block_size
        self._number = 0
        self._running: dict[str, int] = {}  # request id -> tokens computed

    def prefill(self, lengths: Sequence[int], kind: dict[str, Any]) -> SchedulerOutput:
        """One prompt of each length, computed whole; `kind` are their sampling parameters. Earlier requests end."""
        return self._start([(0, length) for length in lengths], kind)

    def decode(self, num_reqs: int, context: int, kind: dict[str, Any]) -> SchedulerOutput:
        """Decodes the last token of `num_reqs` requests with a context of `context` tokens. Earlier requests end."""
        return self._start([(context - 1, 1)] * num_reqs, kind)

    def verify(self, num_drafts: int) -> SchedulerOutput:
        """As many requests of the previous step as the budget allows verify `num_drafts` drafts each."""
        chosen = list(self._running)[: self._limits.max_num_batched_tokens // (1 + num_drafts)]
        plan = self._plan(
            dict.fromkeys(chosen, 1 + num_drafts),
            num_computed_tokens=tuple(self._running[name] for name in chosen),
            num_draft_tokens=dict.fromkeys(chosen, num_drafts),
        )
        for name in chosen:
            self._running[name] += 1
        return plan

    def _start(self, spans: Sequence[tuple[int, int]], kind: dict[str, Any]) -> SchedulerOutput:
        finished = frozenset(self._running)
        names = [f"synthetic-{self._number}-{index}" for index in range(len(spans))]
        self._running = {name: start + count for name, (start, count) in zip(names, spans, strict=True)}
        return self._plan(
            {name: count for name, (_, count) in zip(names, spans, strict=True)},
            num_computed_tokens=tuple(start for start, _ in spans),
            new_requests=tuple(self._request(name, *span, kind) for name, span in zip(names, spans, strict=True)),
            finished_request_ids=finished,
        )

    def _request(self, name: str, start: int, count: int, kind: dict[str, Any]) -> NewRequestData:
        # Drafts after the tokens have slots too.
        num_blocks = cdiv(start + count + self._limits.num_lookahead_tokens, self._block_size)
        request = RowRequest(request_id=name, num_prompt_tokens=count, sampling_params=SamplingParams(**kind), seed=0)
        return NewRequestData(
            request=request,
            token_ids=(0,) * count,
            block_ids=((NULL_BLOCK,) * num_blocks,) * self._num_groups,
            num_computed_tokens=start,
        )

    def _plan(self, counts: dict[str, int], **parts: Any) -> SchedulerOutput:
        self._number += 1
        return SchedulerOutput(
            step=self._number,
            num_scheduled_tokens=counts,
            total_num_scheduled_tokens=sum(counts.values()),
            num_drafts_to_propose=self._limits.max_num_drafts,
            is_warm_up=True,
            **parts,
        )


def largest_steps(
    steps: SyntheticSteps, limits: SchedulerConfig, kinds: Sequence[dict[str, Any]]
) -> Iterator[SchedulerOutput]:
    """Yields steps with the whole token budget in the maximum number of requests, of each kind; and with all drafts
    verified.
    """
    longest = max(1, limits.max_model_len - 1 - limits.max_num_drafts)
    num_reqs = min(limits.max_num_seqs, limits.max_num_batched_tokens)
    share, rest = divmod(limits.max_num_batched_tokens, num_reqs)
    lengths = [min(share + (index < rest), longest) for index in range(num_reqs)]
    for kind in kinds:
        yield steps.prefill(lengths, kind)
        if limits.max_num_drafts:
            yield steps.verify(limits.max_num_drafts)

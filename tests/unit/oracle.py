"""A runner without torch whose every token depends on every KV slot that it reads.

Each slot holds a digest of (token, position, digest of the slot before), in every group; the next token is a function
of the digests *read through the block table*. A wrong block, a stale slot, a bad rewind or a lost window therefore
changes the output, and the right output is `expected_tokens`, a pure function of the prompt. Its drafts are right as
often as it is told.
"""

from __future__ import annotations

import random
from concurrent.futures import Future
from dataclasses import dataclass, field

from penstock.messages.runner_output import ModelRunnerOutput
from penstock.messages.scheduler_output import GrammarOutput, NewRequestData, SchedulerOutput

VOCAB_SIZE = 97
POISON = -1


def slot_digest(token: int, position: int, before: int) -> int:
    return hash((token, position, before)) & 0xFFFFFFFF


def next_token(digests: list[int]) -> int:
    """From the digests of the slots that the last query sees, in order."""
    assert POISON not in digests, "read a slot that nobody wrote"
    return hash(tuple(digests)) % VOCAB_SIZE


def expected_tokens(prompt: list[int], count: int, window: int = 0) -> list[int]:
    """What a request must produce whatever else happens in the engine. `window` 0 is full attention."""
    tokens, digests, output = list(prompt), [], []
    for _ in range(count):
        for position in range(len(digests), len(tokens)):
            digests.append(slot_digest(tokens[position], position, digests[-1] if digests else 0))
        seen = digests[-window:] if window else digests
        output.append(next_token(seen))
        tokens.append(output[-1])
    return output


@dataclass
class _Row:
    tokens: list[int]  # what is known, then the drafts
    num_known: int  # at admission
    num_computed: int  # exact
    table: list[list[int]]
    num_drafts: int = 0


@dataclass
class OracleRunner:
    """Executes plans in order, as a device would. `windows[g]` is group g's sliding window, 0 for full attention.

    With several groups the last one decides the token; all of them are checked. A draft is right with probability
    `acceptance`. The drafter writes `num_lookahead` slots behind a request's last token, below `max_model_len`.
    """

    num_blocks: int
    block_size: int
    windows: tuple[int, ...]
    acceptance: float = 0.0
    num_lookahead: int = 0
    max_model_len: int = 0
    max_drafts_in_flight: int = 0
    tells_gaps: bool = False
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    rows: dict[str, _Row] = field(default_factory=dict)
    memory: dict[tuple[int, int], int] = field(default_factory=dict)
    num_in_flight: int = 0
    max_ahead: int = 0
    _pending: SchedulerOutput | None = None

    def execute_model(self, plan: SchedulerOutput) -> None:
        assert self._pending is None
        self._pending = plan

    def sample_tokens(self, grammars: GrammarOutput) -> Future[ModelRunnerOutput]:
        plan, self._pending = self._pending, None
        future: Future[ModelRunnerOutput] = Future()
        future.set_result(self._run(plan))
        return future

    def shutdown(self) -> None:
        pass

    def _run(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        for request_id in plan.finished_request_ids | plan.preempted_request_ids:
            self.rows.pop(request_id, None)
        for new in plan.new_requests:
            self._add(new)
        for cached in plan.cached_requests:
            row = self.rows[cached.request_id]
            ahead = cached.num_computed_tokens - row.num_computed
            assert 0 <= ahead <= self.max_drafts_in_flight, f"the scheduler's count is {ahead} ahead of the device's"
            self.max_ahead = max(self.max_ahead, ahead)
            for table, ids in zip(row.table, cached.new_block_ids, strict=True):
                table.extend(ids)
        sampled: dict[str, tuple[int, ...]] = {}
        num_draft_tokens: dict[str, int] = {}
        for request_id, num_tokens in plan.num_scheduled_tokens.items():
            num_drafts = plan.num_draft_tokens.get(request_id, 0)
            row = self.rows[request_id]
            drafts = row.tokens[len(row.tokens) - row.num_drafts :][:num_drafts]
            sampled[request_id] = self._compute(row, num_tokens, num_drafts)
            if num_drafts:
                num_draft_tokens[request_id] = [*drafts, -1].index(-1)
            if sampled[request_id]:
                self._propose(row, plan.num_drafts_to_propose)
        proposed = {
            request_id: ([*row.tokens[len(row.tokens) - row.num_drafts :], -1]).index(-1)
            for request_id, row in self.rows.items()
            if self.tells_gaps and sampled.get(request_id)
        }
        return ModelRunnerOutput(
            sampled_token_ids=sampled, num_draft_tokens=num_draft_tokens, num_proposed_tokens=proposed
        )

    def _add(self, new: NewRequestData) -> None:
        assert new.request_id not in self.rows, "a request was added twice"
        table = [list(ids) for ids in new.block_ids]
        self.rows[new.request_id] = _Row(list(new.token_ids), len(new.token_ids), new.num_computed_tokens, table)

    def _compute(self, row: _Row, num_tokens: int, num_drafts: int) -> tuple[int, ...]:
        known = len(row.tokens) - row.num_drafts
        end = row.num_computed + num_tokens
        assert num_drafts <= row.num_drafts, "scheduled a draft that does not exist"
        assert end <= known + num_drafts, "scheduled a token that does not exist"
        assert not num_drafts or end == known + num_drafts, "drafts that do not follow the last token"
        for group in range(len(self.windows)):
            for position in range(row.num_computed, end):
                before = self._read(row, group, position - 1) if position else 0
                self._write(row, group, position, slot_digest(row.tokens[position], position, before))
        if end < max(row.num_known, known):
            row.num_computed = end
            return ()
        sampled: list[int] = []
        for position in range(end - num_drafts, end + 1):
            sampled.append(self._sample(row, position))
            if position == end or row.tokens[position] != sampled[-1]:
                break
        row.num_computed = end - num_drafts + len(sampled) - 1
        row.tokens[known:] = sampled
        row.num_drafts = 0
        return tuple(sampled)

    def _sample(self, row: _Row, position: int) -> int:
        """The token at `position`, from what stands before it."""
        token = 0
        for group, window in enumerate(self.windows):
            first = max(0, position - window) if window else 0
            token = next_token([self._read(row, group, at) for at in range(first, position)])
        return token

    def _propose(self, row: _Row, num_drafts: int) -> None:
        if num_drafts:
            right = expected_tokens(row.tokens, num_drafts, self.windows[-1])
            wrong = [self.rng.choice([-1, self.rng.randrange(VOCAB_SIZE)]) for _ in right]
            drafts = [a if self.rng.random() < self.acceptance else b for a, b in zip(right, wrong, strict=True)]
            # A speculator that has run out proposes nothing more behind the gap.
            drafts = [-1 if -1 in drafts[:index] else draft for index, draft in enumerate(drafts)]
            row.tokens += drafts
            row.num_drafts = num_drafts
            for position in range(row.num_computed, row.num_computed + self.num_lookahead):
                if position < self.max_model_len:
                    self._slot(row, 0, position)

    def _slot(self, row: _Row, group: int, position: int) -> tuple[int, int]:
        block = row.table[group][position // self.block_size]
        assert 0 < block < self.num_blocks, f"position {position} has block {block}"
        return block, position % self.block_size

    def _read(self, row: _Row, group: int, position: int) -> int:
        return self.memory.get(self._slot(row, group, position), POISON)

    def _write(self, row: _Row, group: int, position: int, digest: int) -> None:
        self.memory[self._slot(row, group, position)] = digest

"""A runner without torch whose every token depends on every KV slot that it reads.

Each slot holds a digest of (token, position, digest of the slot before), in every group; the next token is a function
of the digests *read through the block table*. A wrong block, a stale slot, a bad rewind or a lost window therefore
changes the output, and the right output is `expected_tokens`, a pure function of the prompt.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

from penstock.messages.runner_output import ModelRunnerOutput
from penstock.messages.scheduler_output import NewRequestData, SchedulerOutput

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
    tokens: list[int]
    num_known: int
    num_computed: int
    table: list[list[int]]


@dataclass
class OracleRunner:
    """Executes plans in order, as a device would. `windows[g]` is group g's sliding window, 0 for full attention.

    With several groups the last one decides the token; all of them are checked.
    """

    num_blocks: int
    block_size: int
    windows: tuple[int, ...]
    rows: dict[str, _Row] = field(default_factory=dict)
    memory: dict[tuple[int, int], int] = field(default_factory=dict)
    num_in_flight: int = 0
    _pending: SchedulerOutput | None = None

    def execute_model(self, plan: SchedulerOutput) -> None:
        assert self._pending is None
        self._pending = plan

    def sample_tokens(self) -> Future[ModelRunnerOutput]:
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
            assert row.num_computed == cached.num_computed_tokens, "the counts of scheduler and device disagree"
            for table, ids in zip(row.table, cached.new_block_ids, strict=True):
                table.extend(ids)
        sampled = {request_id: self._compute(request_id, n) for request_id, n in plan.num_scheduled_tokens.items()}
        return ModelRunnerOutput(sampled_token_ids=sampled)

    def _add(self, new: NewRequestData) -> None:
        assert new.request_id not in self.rows, "a request was added twice"
        table = [list(ids) for ids in new.block_ids]
        self.rows[new.request_id] = _Row(list(new.token_ids), len(new.token_ids), new.num_computed_tokens, table)

    def _compute(self, request_id: str, num_tokens: int) -> tuple[int, ...]:
        row = self.rows[request_id]
        end = row.num_computed + num_tokens
        assert end <= len(row.tokens), "scheduled a token that does not exist"
        for group in range(len(self.windows)):
            for position in range(row.num_computed, end):
                before = self._read(row, group, position - 1) if position else 0
                self._write(row, group, position, slot_digest(row.tokens[position], position, before))
        row.num_computed = end
        if end < row.num_known:
            return ()
        token = 0
        for group, window in enumerate(self.windows):
            first = max(0, end - window) if window else 0
            token = next_token([self._read(row, group, position) for position in range(first, end)])
        row.tokens.append(token)
        return (token,)

    def _slot(self, row: _Row, group: int, position: int) -> tuple[int, int]:
        block = row.table[group][position // self.block_size]
        assert 0 < block < self.num_blocks, f"position {position} has block {block}"
        return block, position % self.block_size

    def _read(self, row: _Row, group: int, position: int) -> int:
        return self.memory.get(self._slot(row, group, position), POISON)

    def _write(self, row: _Row, group: int, position: int, digest: int) -> None:
        self.memory[self._slot(row, group, position)] = digest

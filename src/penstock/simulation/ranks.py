"""An executor whose ranks are memories with a connector each: pp stages of tp ranks, split as a model would be.

Layers lie on the stages in order, heads on a stage's ranks. A step passes the stages one after the other, and the first
stage may be a step ahead of the last; how far anything has come when the scheduler asks is up to chance, within what
the order of the steps allows.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import cast
from zlib import crc32

from msgspec.structs import replace

from penstock.kv_transfer.aggregate import aggregate
from penstock.kv_transfer.connector import WorkerConnector
from penstock.kv_transfer.forwarding import Forwarding
from penstock.kv_transfer.kv_step import KVStep
from penstock.messages.kv_cache_spec import NULL_BLOCK
from penstock.messages.kv_transfer import KVConnectorMetadata, KVConnectorOutput, ShardId
from penstock.messages.runner_output import ModelRunnerOutput
from penstock.messages.scheduler_output import GrammarOutput, NewRequestData, SchedulerOutput
from penstock.simulation.oracle import (
    NUM_HEADS,
    VOCAB_SIZE,
    WORD_BYTES,
    Answer,
    Answers,
    OracleLayer,
    OracleMemory,
    cache_config,
    layer_salts,
    slot_digest,
)

Table = tuple[tuple[int, ...], ...]


def _nothing() -> None: ...


class InjectedError(RuntimeError):
    """A worker dies because the scenario wants it to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankConfig:
    """`acceptance` is the share of drafts that are right. `tells_gaps`: the drafter reports where it had no idea.
    `runs_ahead`: the host ends a step, connector included, while the device may not have begun it.
    """

    layers: tuple[OracleLayer, ...]
    block_size: int
    num_blocks: int
    max_model_len: int
    pp: int = 1
    tp: int = 1
    acceptance: float = 0.0
    tells_gaps: bool = False
    max_drafts_in_flight: int = 0
    runs_ahead: bool = False

    @property
    def shards(self) -> list[ShardId]:
        return [(stage, number) for stage in range(self.pp) for number in range(self.tp)]

    def layers_of(self, stage: int) -> tuple[OracleLayer, ...]:
        """A stage's part of the target, and on the last one the drafter."""
        target = [layer for layer in self.layers if not layer.is_draft]
        size = len(target) // self.pp
        mine = target[stage * size : (stage + 1) * size]
        drafter = [layer for layer in self.layers if layer.is_draft]
        return (*mine, *(drafter if stage == self.pp - 1 else ()))

    def heads_of(self, number: int) -> range:
        size = NUM_HEADS // self.tp
        return range(number * size, (number + 1) * size)


class _Poisoning(Forwarding):
    """A connector's worker part, with the blocks that a step hands out poisoned before anything can be written."""

    def __init__(self, inner: WorkerConnector, memory: OracleMemory) -> None:
        super().__init__(inner)
        self._memory = memory
        self.fresh_block_ids: Sequence[int] = ()

    def begin_step(self, metadata: KVConnectorMetadata | None) -> None:
        self.inner.begin_step(metadata)
        self._memory.poison(self.fresh_block_ids)


class OracleRank:
    """One rank: its layers, its heads, its memory and its part of the connector."""

    def __init__(self, config: RankConfig, shard: ShardId, connector: WorkerConnector) -> None:
        stage, number = shard
        self.shard = shard
        self.heads = config.heads_of(number)
        self.layers = config.layers_of(stage)
        cache = cache_config(self.layers, config.num_blocks, config.block_size, len(self.heads))
        self.memory = OracleMemory(cache, shard, self.heads)
        self._block_size = config.block_size
        self._num_blocks = config.num_blocks
        self._poisoning = _Poisoning(connector, self.memory)
        self.kv_step = KVStep(cast(WorkerConnector, self._poisoning))
        connector.register_kv_caches(self.memory)

    def run_forward(self, plan: SchedulerOutput, fresh_block_ids: Sequence[int], forward: Callable[[], None]) -> None:
        self._poisoning.fresh_block_ids = fresh_block_ids
        self.kv_step.run_forward(plan, forward)

    def write(self, layer: OracleLayer, table: Sequence[int], start: int, tokens: Sequence[int]) -> None:
        """Computes the slots of tokens from position `start` on, each from the slot before it, as memory has it."""
        words = self.memory.words[layer.name]
        salts = layer_salts(layer.name)
        for head in self.heads:
            salt = salts[head]
            before = words[self._word(table, start - 1, head)] if start else 0
            for position, token in enumerate(tokens, start):
                before = slot_digest(token, position, salt, before)
                words[self._word(table, position, head)] = before

    def checksum(self, layer: OracleLayer, head: int, table: Sequence[int], position: int, before: int) -> int:
        """Of what a query at `position` sees behind it; continues the checksum `before`."""
        start = layer.first_seen(position)
        while start < position:
            index, offset = divmod(start, self._block_size)
            end = min(position, (index + 1) * self._block_size)
            block = self.memory.head_bytes(layer.name, self._check(table[index]), head)
            before = crc32(block[offset * WORD_BYTES : (offset + end - start) * WORD_BYTES], before)
            start = end
        return before

    def _word(self, table: Sequence[int], position: int, head: int) -> int:
        index, offset = divmod(position, self._block_size)
        row = self._check(table[index]) * len(self.heads) + head - self.heads.start
        return row * self._block_size + offset

    def _check(self, block_id: int) -> int:
        assert NULL_BLOCK < block_id < self._num_blocks, f"the step reads or writes block {block_id}"
        return block_id


@dataclass(slots=True, eq=False)
class _Row:
    answer: Answer
    tokens: list[int]  # what is known, then the drafts
    num_known: int  # at admission
    num_computed: int  # exact
    table: list[list[int]]
    num_drafts: int = 0
    is_sampling: bool = False


@dataclass(slots=True)
class _Item:
    """A request's part of a step, as every stage gets it."""

    request_id: str
    row: _Row
    table: Table
    start: int
    tokens: list[int]
    num_drafts: int
    num_real_drafts: int
    checksums: list[int]  # one per token to sample

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(slots=True, eq=False)
class _Step:
    plan: SchedulerOutput
    fresh_block_ids: tuple[int, ...]
    num_launched: int = 0  # stages
    num_computed: int = 0
    items: list[_Item] = field(default_factory=list["_Item"])
    outputs: list[KVConnectorOutput] = field(default_factory=list[KVConnectorOutput])
    result: ModelRunnerOutput = field(default_factory=ModelRunnerOutput)


class _Result(Future[ModelRunnerOutput]):
    """A step's result, which is worked out when it is asked for, at the latest."""

    def __init__(self, work_out: Callable[[], ModelRunnerOutput]) -> None:
        super().__init__()
        self._work_out = work_out

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        return self._work_out()


class RankExecutor:
    """Runs plans on all ranks (`Executor`).

    `take_fresh` says which blocks were handed out since it was last called; `before_step` may raise for a worker;
    `deliver` may delay or repeat what connectors report.
    """

    def __init__(
        self,
        config: RankConfig,
        answers: Answers,
        connectors: dict[ShardId, WorkerConnector],
        rng: random.Random,
        take_fresh: Callable[[], tuple[int, ...]],
    ) -> None:
        self._config = config
        self._answers = answers
        self._rng = rng
        self._take_fresh = take_fresh
        self.ranks = {shard: OracleRank(config, shard, connectors[shard]) for shard in config.shards}
        self.before_step: Callable[[int], None] = lambda step: None
        self.deliver: Callable[[SchedulerOutput, KVConnectorOutput], KVConnectorOutput] = lambda plan, output: output
        self.rows: dict[str, _Row] = {}
        self.wrong_drafts: dict[tuple[int, str], str] = {}
        self.max_ahead = 0
        self._steps: deque[_Step] = deque()
        self._applied_steps: list[int] = []

    @property
    def is_idle(self) -> bool:
        """Every plan has been run by every rank."""
        return not self._steps

    def execute_model(self, plan: SchedulerOutput) -> None:
        self._steps.append(_Step(plan, self._take_fresh()))

    def sample_tokens(self, grammars: GrammarOutput) -> Future[ModelRunnerOutput]:
        step = self._steps[-1]
        while (ready := self._ready()) and self._rng.random() < 0.5:
            self._rng.choice(ready)()
        return _Result(lambda: self._run_to_end(step))

    def shutdown(self) -> None:
        for rank in self.ranks.values():
            rank.kv_step.shutdown()

    def _ready(self) -> list[Callable[[], None]]:
        """What may happen next: a stage follows the step before it, and needs to know its tokens."""
        ready: list[Callable[[], None]] = []
        launched = computed = self._config.pp
        for step in self._steps:
            waits = step.num_computed == 0 and any(
                name in self.rows and self.rows[name].is_sampling for name in step.plan.num_scheduled_tokens
            )
            if step.num_launched < launched and (self._config.runs_ahead or not waits):
                ready.append(lambda step=step: self._launch(step))
            if step.num_computed < min(computed, step.num_launched) and not waits:
                ready.append(lambda step=step: self._compute(step))
            launched, computed = step.num_launched, step.num_computed
        return ready

    def _run_to_end(self, step: _Step) -> ModelRunnerOutput:
        while step in self._steps:
            first = self._steps[0]
            if first.num_launched < self._config.pp:
                self._launch(first)
            else:
                self._compute(first)
        self._applied_steps.append(step.plan.step)
        return step.result

    def take_applied_steps(self) -> list[int]:
        """The steps whose results were asked for since the last call."""
        applied, self._applied_steps = self._applied_steps, []
        return applied

    # ---- One stage of one step ----

    def _ranks_of(self, stage: int) -> list[OracleRank]:
        return [rank for shard, rank in self.ranks.items() if shard[0] == stage]

    def _launch(self, step: _Step) -> None:
        """The host's part of a stage. Where it does not run ahead, the device's part happens within it."""
        stage, ranks = step.num_launched, self._ranks_of(step.num_launched)
        if stage == 0:
            self.before_step(step.plan.step)
        runs_ahead = self._config.runs_ahead
        forward: Callable[[], None] = _nothing if runs_ahead else lambda: self._forward(step, stage)
        sample: Callable[[], None] = _nothing if runs_ahead else lambda: self._sample_and_draft(step, stage)
        for rank in reversed(ranks):
            forward = partial(rank.run_forward, step.plan, step.fresh_block_ids, forward)
            sample = partial(self._run_sampling, rank, step, sample)
        forward()
        sample()
        step.num_launched += 1
        if not self._config.runs_ahead:
            self._end_stage(step)

    def _run_sampling(self, rank: OracleRank, step: _Step, sample: Callable[[], None]) -> None:
        _, finished = rank.kv_step.run_sampling(sample)
        step.outputs.append(finished)

    def _compute(self, step: _Step) -> None:
        """The device's part of a stage that the host has launched some time ago."""
        self._forward(step, step.num_computed)
        self._sample_and_draft(step, step.num_computed)
        self._end_stage(step)

    def _forward(self, step: _Step, stage: int) -> None:
        plan = step.plan
        if stage == 0:
            self._update_rows(plan)
            step.items = [self._make_item(plan, name, count) for name, count in plan.num_scheduled_tokens.items()]
        self._run_layers(self._ranks_of(stage), step.items)

    def _sample_and_draft(self, step: _Step, stage: int) -> None:
        if stage == self._config.pp - 1:
            step.result = self._finish(self._ranks_of(stage), step)

    def _end_stage(self, step: _Step) -> None:
        step.num_computed += 1
        if step.num_computed == self._config.pp:
            assert len(step.outputs) == len(self.ranks), "a rank did not answer"
            moved = self.deliver(step.plan, aggregate(step.outputs))
            step.result = replace(step.result, kv_connector_output=moved)
            self._steps.remove(step)

    def _update_rows(self, plan: SchedulerOutput) -> None:
        for request_id in plan.finished_request_ids | plan.preempted_request_ids:
            self.rows.pop(request_id, None)
        for new in plan.new_requests:
            self._add(new)
        for cached in plan.cached_requests:
            row = self.rows[cached.request_id]
            ahead = cached.num_computed_tokens - row.num_computed
            most = self._config.max_drafts_in_flight
            assert 0 <= ahead <= most, f"{cached.request_id}: the scheduler's count is {ahead} ahead of the device's"
            self.max_ahead = max(self.max_ahead, ahead)
            for table, ids in zip(row.table, cached.new_block_ids, strict=True):
                table.extend(ids)

    def _add(self, new: NewRequestData) -> None:
        assert new.request_id not in self.rows, f"{new.request_id} enters a row while it has one"
        answer = self._answers.of(new.token_ids[: new.request.num_prompt_tokens])
        table = [list(ids) for ids in new.block_ids]
        known = list(new.token_ids)
        self.rows[new.request_id] = _Row(answer, known, len(known), new.num_computed_tokens, table)

    def _make_item(self, plan: SchedulerOutput, request_id: str, num_tokens: int) -> _Item:
        row = self.rows[request_id]
        num_drafts = plan.num_draft_tokens.get(request_id, 0)
        known = len(row.tokens) - row.num_drafts
        start, end = row.num_computed, row.num_computed + num_tokens
        assert num_drafts <= row.num_drafts, f"{request_id}: scheduled a draft that does not exist"
        assert end <= known + num_drafts, f"{request_id}: scheduled a token that does not exist"
        assert not num_drafts or end == known + num_drafts, f"{request_id}: drafts do not follow the last token"
        row.is_sampling = end >= max(row.num_known, known)
        if not row.is_sampling:
            row.num_computed = end
        tokens = row.tokens[start:end]
        return _Item(
            request_id,
            row,
            tuple(tuple(ids) for ids in row.table),
            start,
            tokens,
            num_drafts,
            [*tokens[num_tokens - num_drafts :], -1].index(-1) if num_drafts else 0,
            [0] * (1 + num_drafts if row.is_sampling else 0),
        )

    def _run_layers(self, ranks: list[OracleRank], items: list[_Item]) -> None:
        for layer in ranks[0].layers:
            if layer.is_draft:
                continue
            for rank in ranks:
                rank.kv_step.hooks.wait_for_layer_load(layer.name)
            for item in items:
                first = item.end - item.num_drafts
                self._write(ranks, layer, item.table, item.start, item.tokens)
                for index, before in enumerate(item.checksums):
                    item.checksums[index] = self._checksum(ranks, layer, item.table, first + index, before)
            for rank in ranks:
                rank.kv_step.hooks.save_kv_layer(layer.name)

    def _write(
        self, ranks: list[OracleRank], layer: OracleLayer, table: Table, start: int, tokens: Sequence[int]
    ) -> None:
        # A gap of the drafter is some token to the model.
        inputs = [max(0, token) for token in tokens]
        for rank in ranks:
            rank.write(layer, table[layer.group], start, inputs)

    def _checksum(self, ranks: list[OracleRank], layer: OracleLayer, table: Table, position: int, before: int) -> int:
        for rank in ranks:
            for head in rank.heads:
                before = rank.checksum(layer, head, table[layer.group], position, before)
        return before

    # ---- The last stage samples, and drafts ----

    def _finish(self, ranks: list[OracleRank], step: _Step) -> ModelRunnerOutput:
        sampled: dict[str, tuple[int, ...]] = {}
        num_draft_tokens: dict[str, int] = {}
        proposed: dict[str, int] = {}
        for item in step.items:
            sampled[item.request_id] = self._sample(item)
            for layer in ranks[0].layers:
                if layer.is_draft:
                    self._write(ranks, layer, item.table, item.start, item.tokens)
            if item.num_drafts:
                num_draft_tokens[item.request_id] = item.num_real_drafts
            if sampled[item.request_id]:
                drafts = self._propose(ranks, step.plan, item)
                if self._config.tells_gaps:
                    proposed[item.request_id] = [*drafts, -1].index(-1)
        return ModelRunnerOutput(
            sampled_token_ids=sampled,
            num_draft_tokens=num_draft_tokens,
            num_proposed_tokens=proposed,
        )

    def _sample(self, item: _Item) -> tuple[int, ...]:
        """The tokens behind the accepted drafts, and the row's new counts."""
        if not item.checksums:
            return ()
        row, first = item.row, item.end - item.num_drafts
        sampled: list[int] = []
        for index, checksum in enumerate(item.checksums):
            sampled.append(checksum % VOCAB_SIZE)
            if index == item.num_drafts or item.tokens[len(item.tokens) - item.num_drafts + index] != sampled[-1]:
                break
        row.num_computed = first + len(sampled) - 1
        row.tokens[first:] = sampled
        row.num_drafts = 0
        row.is_sampling = False
        return tuple(sampled)

    def _propose(self, ranks: list[OracleRank], plan: SchedulerOutput, item: _Item) -> list[int]:
        """Drafts behind the row's last token: right ones only if the drafter's own slots are the request's."""
        row, drafter = item.row, [layer for layer in ranks[0].layers if layer.is_draft]
        for layer in drafter:
            seen = self._checksum(ranks, layer, item.table, row.num_computed, 0)
            if seen != row.answer.draft_checksum(layer, row.num_computed):
                self.wrong_drafts[plan.step, item.request_id] = f"drafts behind position {row.num_computed}"
        drafts: list[int] = []
        for position in range(row.num_computed + 1, row.num_computed + 1 + plan.num_drafts_to_propose):
            right = row.answer.token(position)
            is_right = self._rng.random() < self._config.acceptance
            wrong = -1 if self._rng.random() < 0.5 else (right + 1) % VOCAB_SIZE
            # A speculator that has run out proposes nothing more behind the gap.
            drafts.append(-1 if -1 in drafts else right if is_right else wrong)
        inputs = [row.tokens[-1], *drafts[:-1]][: max(0, self._config.max_model_len - row.num_computed)]
        for layer in drafter:
            if drafts:
                self._write(ranks, layer, item.table, row.num_computed, inputs)
        row.tokens += drafts
        row.num_drafts = len(drafts)
        return drafts

"""Simulated ranks: workers behind the production executor whose device is a memory and the oracle's arithmetic.

A `SimWorker` counts its rows, reads its plans and drives its connector with the code of a real one. Layers lie on the
pipeline stages in order, heads on a stage's ranks. `Devices` computes: the ranks of a stage together, and the stages
one after the other, where the first may be a step ahead of the last. How far anything has come when the scheduler asks
is up to chance, within what the order of the steps allows.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from msgspec.structs import replace

from penstock.config.engine import SchedulerConfig
from penstock.executor.executor import Later, Pending
from penstock.kv_transfer.connector import WorkerConnector
from penstock.kv_transfer.forwarding import Forwarding
from penstock.kv_transfer.kv_step import KVStep
from penstock.messages.kv_transfer import KVConnectorMetadata, KVConnectorOutput, ShardId
from penstock.messages.memory_budget import MemoryBudget
from penstock.messages.runner_output import ModelRunnerOutput
from penstock.messages.scheduler_output import GrammarOutput, SchedulerOutput
from penstock.runner.host_batch import read_plan
from penstock.runner.rows import Rows
from penstock.simulation.oracle import (
    NUM_HEADS,
    VOCAB_SIZE,
    Answer,
    Answers,
    OracleLayer,
    OracleMemory,
    cache_config,
)
from penstock.worker.messages import InitializeWorker, WorkerFacts, WorkerReady

Kernel = Callable[[], None]
Outputs = dict[ShardId, KVConnectorOutput]

FOREIGN_KV = -1
"""Reported in place of the sampled tokens when the drafts behind them come from KV that is not the request's own."""


class InjectedError(RuntimeError):
    """A worker dies because the scenario wants it to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankConfig:
    """`acceptance` is the share of drafts that are right. `tells_gaps`: the drafter reports where it had no idea.
    `runs_ahead`: the host ends a step, connector included, while the device may not have begun it.
    """

    layers: tuple[OracleLayer, ...]
    pp: int = 1
    tp: int = 1
    acceptance: float = 0.0
    tells_gaps: bool = False
    runs_ahead: bool = False

    @property
    def shards(self) -> list[ShardId]:
        return [(stage, number) for stage in range(self.pp) for number in range(self.tp)]

    def layers_of(self, stage: int) -> tuple[OracleLayer, ...]:
        """A stage's part of the target, and on the last one the drafter."""
        target = [layer for layer in self.layers if not layer.is_draft]
        first, end = (len(target) * number // self.pp for number in (stage, stage + 1))
        drafter = [layer for layer in self.layers if layer.is_draft]
        return (*target[first:end], *(drafter if stage == self.pp - 1 else ()))

    def heads_of(self, number: int) -> range:
        size = NUM_HEADS // self.tp
        return range(number * size, (number + 1) * size)


@dataclass(slots=True, eq=False)
class _Row:
    """What a rank's device holds of a request."""

    request_id: str
    answer: Answer
    tokens: list[int]  # what is known, then the drafts
    num_computed: int  # exact
    table: list[list[int]]
    num_drafts: int = 0
    is_sampling: bool = False


@dataclass(slots=True, eq=False)
class _Item:
    """A request's part of a step on one rank, as its host launches it; the device knows where it really starts."""

    memory: OracleMemory
    row: _Row
    table: list[tuple[int, ...]]
    num_tokens: int
    num_computed_upper_bound: int
    is_sampling: bool
    num_drafts: int  # to verify
    start: int = 0

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    def begin(self) -> None:
        row, name = self.row, self.row.request_id
        self.start = row.num_computed
        known = len(row.tokens) - row.num_drafts
        assert self.num_drafts <= row.num_drafts, f"{name}: scheduled a draft that does not exist"
        assert self.end <= known + self.num_drafts, f"{name}: scheduled a token that does not exist"
        assert not self.num_drafts or self.end == known + self.num_drafts, f"{name}: drafts are not behind the last"
        assert self.is_sampling == (self.end >= known), f"{name}: samples elsewhere than behind its last token"
        row.is_sampling = self.is_sampling
        if not row.is_sampling:
            row.num_computed = self.end

    def take(self, sampled: Sequence[int]) -> None:
        """The accepted drafts, and the token behind them."""
        first = self.end - self.num_drafts
        self.row.num_computed = first + len(sampled) - 1
        self.row.tokens[first:] = sampled
        self.row.num_drafts = 0
        self.row.is_sampling = False

    def write(self, layer: OracleLayer, start: int, tokens: Sequence[int]) -> None:
        # A gap of the drafter is some token to the model.
        self.memory.write(layer, self.table[layer.group], start, [max(0, token) for token in tokens])


@dataclass(slots=True, eq=False)
class _Step:
    """`kernels` were launched on a stage and have not run; `checksums` is what one stage passes on to the next, one
    per request and token to sample; `drafts_read` is what a connector finds that reads the drafter's KV."""

    number: int
    fresh_block_ids: tuple[int, ...]
    num_launched: int = 0  # stages
    num_computed: int = 0
    plans: dict[ShardId, SchedulerOutput] = field(default_factory=dict[ShardId, SchedulerOutput])
    kernels: list[list[Kernel]] = field(default_factory=list[list[Kernel]])
    items: dict[ShardId, list[_Item]] = field(default_factory=dict[ShardId, list[_Item]])
    checksums: list[list[int]] = field(default_factory=list[list[int]])
    drafts_read: dict[ShardId, list[int]] = field(default_factory=dict[ShardId, list[int]])
    finished: Outputs = field(default_factory=Outputs)
    result: ModelRunnerOutput = field(default_factory=ModelRunnerOutput)


class _Watched(Forwarding):
    """A rank's connector, with a look at the memory where a step begins and where nothing of it may write any more."""

    def __init__(self, inner: WorkerConnector, rank: SimWorker) -> None:
        super().__init__(inner)
        self._rank = rank

    def begin_step(self, metadata: KVConnectorMetadata | None) -> None:
        self.inner.begin_step(metadata)
        self._rank.memory.poison(self._rank.step.fresh_block_ids)

    def wait_for_save(self) -> None:
        self.inner.wait_for_save()
        self._rank.read_drafts()


class SimWorker:
    """One rank (`WorkerHandle`): its layers, its heads, its rows, its memory and its part of the connector."""

    def __init__(self, devices: Devices, shard: ShardId, connector: WorkerConnector) -> None:
        self.shard = shard
        self.heads = devices.config.heads_of(shard[1])
        self.layers = devices.config.layers_of(shard[0])
        self.drafter = [layer for layer in self.layers if layer.is_draft]
        self.rows: dict[int, _Row] = {}  # by state row
        self._devices = devices
        self._connector = connector
        self.kv_step = KVStep(cast(WorkerConnector, _Watched(connector, self)))
        devices.ranks[shard] = self

    def load(self) -> Pending[WorkerFacts]:
        facts = WorkerFacts(
            shard=self.shard,
            device="simulated",
            kv_cache_specs={},  # the scenario plans the cache
            draft_kv_cache_specs={},
            num_tokens_ahead=0,
            memory=MemoryBudget(total=1, in_use=1),
            arithmetic="oracle",
            read=(),
            kernels="oracle",
            device_name="",
            num_threads=1,
        )
        return Later(lambda: facts)

    def initialize(self, plan: InitializeWorker) -> Pending[WorkerReady]:
        cache = cache_config(self.layers, plan.cache.num_blocks, plan.cache.block_size, len(self.heads))
        self.memory = OracleMemory(cache, self.shard, self.heads)
        self._host_rows = Rows(plan.limits.max_num_seqs)
        self._devices.limits = plan.limits
        self._connector.register_kv_caches(self.memory)
        handshake = self._connector.get_handshake_metadata()
        ready = WorkerReady(self.shard, handshake, self._devices.config.runs_ahead)
        return Later(lambda: ready)

    def execute_model(self, plan: SchedulerOutput) -> None:
        self._devices.enqueue(self.shard, plan)

    def sample_tokens(self, grammars: GrammarOutput | None) -> Pending[ModelRunnerOutput]:
        return self._devices.answer(self.shard)

    def watch(self, on_death: Callable[[], None]) -> None: ...

    def check(self) -> None: ...

    def shutdown(self) -> None:
        self.kv_step.shutdown()

    # ---- The host's part of a step ----

    def run_forward(self, step: _Step, forward: Kernel) -> None:
        self.step = step
        self.kv_step.run_forward(step.plans[self.shard], lambda: self._forward(forward))

    def run_sampling(self, step: _Step, sample: Kernel) -> None:
        _, step.finished[self.shard] = self.kv_step.run_sampling(sample)

    def _forward(self, forward: Kernel) -> None:
        plan = self.step.plans[self.shard]
        self._update_rows(plan)
        host = read_plan(plan, self._host_rows)
        num_drafts = dict(zip(host.sampling.tolist(), host.num_drafts.tolist(), strict=True))
        counts = zip(host.rows.tolist(), host.query_lens.tolist(), host.num_computed_upper_bound.tolist(), strict=True)
        items = self.step.items[self.shard] = []
        for index, (number, num_tokens, upper_bound) in enumerate(counts):
            row, samples = self.rows[number], index in num_drafts
            table = [tuple(ids) for ids in row.table]
            items.append(_Item(self.memory, row, table, num_tokens, upper_bound, samples, num_drafts.get(index, 0)))
        forward()

    def _update_rows(self, plan: SchedulerOutput) -> None:
        for row in self._host_rows.remove(plan.finished_request_ids | plan.preempted_request_ids):
            del self.rows[row]
        for new in plan.new_requests:
            row = self._host_rows.add(new.request_id, len(new.token_ids))
            assert row not in self.rows, f"{new.request_id} gets a row that another has"
            answer = self._devices.answers.of(new.token_ids[: new.request.num_prompt_tokens])
            table = [list(ids) for ids in new.block_ids]
            self.rows[row] = _Row(new.request_id, answer, list(new.token_ids), new.num_computed_tokens, table)
        for request_id, block_ids in plan.new_block_ids.items():
            for table, ids in zip(self.rows[self._host_rows.row(request_id)].table, block_ids, strict=True):
                table.extend(ids)

    def read_drafts(self) -> None:
        """As a connector does that saves the drafter's KV behind the step."""
        step = self.step
        self._devices.launch(step, lambda: step.drafts_read.update({self.shard: self.draft_words(step)}))

    def draft_words(self, step: _Step) -> list[int]:
        """What the drafter's slots of a step hold."""
        return [
            word
            for layer in self.drafter
            for item in step.items[self.shard]
            for word in self.memory.read(layer, item.table[layer.group], item.start, item.end)
        ]


class Devices:
    """What the ranks of an engine compute on.

    `take_fresh` says which blocks were handed out since it was last called; `before_step` may raise for a worker;
    `deliver` may delay or repeat what connectors report.
    """

    limits: SchedulerConfig

    def __init__(
        self,
        config: RankConfig,
        answers: Answers,
        rng: random.Random,
        take_fresh: Callable[[], tuple[int, ...]] = tuple,
    ) -> None:
        self.config = config
        self.answers = answers
        self.ranks: dict[ShardId, SimWorker] = {}
        self.before_step: Kernel = lambda: None
        self.deliver: Callable[[SchedulerOutput, Outputs], Outputs] = lambda plan, finished: finished
        self.max_ahead = 0
        self._rng = rng
        self._take_fresh = take_fresh
        self._steps: deque[_Step] = deque()

    @property
    def is_idle(self) -> bool:
        """Every plan has been run by every rank."""
        return not self._steps

    def enqueue(self, shard: ShardId, plan: SchedulerOutput) -> None:
        if not self._steps or self._steps[-1].number != plan.step:
            self._steps.append(_Step(plan.step, self._take_fresh()))
        self._steps[-1].plans[shard] = plan

    def answer(self, shard: ShardId) -> Pending[ModelRunnerOutput]:
        """A rank's answer to the step enqueued last."""
        step = self._steps[-1]
        if shard == self.config.shards[-1]:
            while (ready := self._ready()) and self._rng.random() < 0.5:
                self._rng.choice(ready)()
        return Later(lambda: self._run_to_end(step, shard))

    def _ready(self) -> list[Kernel]:
        """What may happen next: a stage follows the step before it, and needs to know its tokens."""
        ready: list[Kernel] = []
        launched = computed = self.config.pp
        for step in self._steps:
            if step.num_launched < launched and (self.config.runs_ahead or not self._waits(step)):
                ready.append(partial(self._launch, step))
            if step.num_computed < min(computed, step.num_launched) and not self._waits(step):
                ready.append(partial(self._compute, step))
            launched, computed = step.num_launched, step.num_computed
        return ready

    def _waits(self, step: _Step) -> bool:
        """Whether the first stage has still to compute it and does not know all its tokens."""
        if step.num_computed:
            return False
        if step.num_launched:
            return any(item.row.is_sampling for item in step.items[0, 0])
        names = step.plans[0, 0].num_scheduled_tokens
        return any(row.is_sampling and row.request_id in names for row in self.ranks[0, 0].rows.values())

    def _run_to_end(self, step: _Step, shard: ShardId) -> ModelRunnerOutput:
        while step in self._steps:
            first = self._steps[0]
            (self._launch if first.num_launched < self.config.pp else self._compute)(first)
        if shard == (self.config.pp - 1, 0):
            return replace(step.result, kv_connector_output=step.finished[shard])
        return ModelRunnerOutput.with_kv_conn_output_only(step.finished[shard])

    # ---- One stage of one step ----

    def _stage(self, stage: int) -> list[SimWorker]:
        return [self.ranks[stage, number] for number in range(self.config.tp)]

    def _launch(self, step: _Step) -> None:
        """The host's part of a stage. Where it does not run ahead, the device's part happens within it."""
        stage = step.num_launched
        if stage == 0:
            self.before_step()
        step.kernels.append([])
        forward = partial(self.launch, step, partial(self._forward, step, stage))
        sample = partial(self.launch, step, partial(self._sample_and_draft, step, stage))
        for rank in reversed(self._stage(stage)):
            forward = partial(rank.run_forward, step, forward)
            sample = partial(rank.run_sampling, step, sample)
        forward()
        sample()
        step.num_launched += 1
        if not self.config.runs_ahead:
            self._compute(step)

    def launch(self, step: _Step, kernel: Kernel) -> None:
        """Kernels of a stage run in the order of their launches."""
        if self.config.runs_ahead:
            step.kernels[-1].append(kernel)
        else:
            kernel()

    def _compute(self, step: _Step) -> None:
        """The device's part of a stage that the host has launched some time ago."""
        stage = step.num_computed
        for kernel in step.kernels[stage]:
            kernel()
        for rank in self._stage(stage):
            # Warm-up steps do not reach the connector.
            is_final = step.plans[rank.shard].is_warm_up or step.drafts_read[rank.shard] == rank.draft_words(step)
            assert is_final, f"rank {rank.shard} writes the drafter's KV behind wait_for_save"
        step.num_computed += 1
        if step.num_computed == self.config.pp:
            step.finished = self.deliver(step.plans[0, 0], step.finished)
            self._steps.remove(step)

    def _forward(self, step: _Step, stage: int) -> None:
        """Each layer writes the step's slots, then adds up what every query sees that a token is sampled from."""
        ranks = self._stage(stage)
        batch = list(zip(*(step.items[rank.shard] for rank in ranks), strict=True))
        for item in [item for items in batch for item in items]:
            ahead = item.num_computed_upper_bound - item.row.num_computed
            most = self.limits.max_num_drafts * (self.limits.max_num_in_flight - 1)
            assert 0 <= ahead <= most, f"{item.row.request_id}: the host's count is {ahead} ahead of the device's"
            self.max_ahead = max(self.max_ahead, ahead)
            item.begin()
        if stage == 0:
            step.checksums = [[0] * (1 + item.num_drafts if item.is_sampling else 0) for item, *_ in batch]
        for layer in [layer for layer in ranks[0].layers if not layer.is_draft]:
            for rank in ranks:
                rank.kv_step.hooks.wait_for_layer_load(layer.name)
            for items, checksums in zip(batch, step.checksums, strict=True):
                for item in items:
                    item.write(layer, item.start, item.row.tokens[item.start : item.end])
                for index, before in enumerate(checksums):
                    checksums[index] = _checksum(items, layer, items[0].end - items[0].num_drafts + index, before)
            for rank in ranks:
                rank.kv_step.hooks.save_kv_layer(layer.name)

    def _sample_and_draft(self, step: _Step, stage: int) -> None:
        """The last stage's part; all ranks hear of the tokens."""
        if stage < self.config.pp - 1:
            return
        result, num_drafts = step.result, step.plans[stage, 0].num_drafts_to_propose
        for items, checksums in zip(zip(*step.items.values(), strict=True), step.checksums, strict=True):
            mine, first = items[-self.config.tp :], items[-1]
            row = first.row
            verified = row.tokens[first.end - first.num_drafts : first.end]
            sampled = _accept(verified, checksums)
            if verified:
                result.num_draft_tokens[row.request_id] = [*verified, -1].index(-1)
            for item in items if sampled else ():
                item.take(sampled)
            is_foreign = self._follow(mine)
            result.sampled_token_ids[row.request_id] = (FOREIGN_KV,) * len(sampled) if is_foreign else sampled
            if sampled:
                drafts = self._propose(mine, num_drafts)
                for item in items:
                    item.row.tokens += drafts
                    item.row.num_drafts = num_drafts
                if self.config.tells_gaps:
                    result.num_proposed_tokens[row.request_id] = [*drafts, -1].index(-1)

    def _follow(self, items: Sequence[_Item]) -> bool:
        """The drafter computes the step's slots, each from the token behind it, as heads do that look one token ahead.

        Returns whether what it sees where it goes on is not the request's own.
        """
        row, is_foreign = items[0].row, False
        for layer in self.ranks[self.config.pp - 1, 0].drafter:
            for item in items:
                item.write(layer, item.start, item.row.tokens[item.start + 1 : row.num_computed + 1])
            seen = _checksum(items, layer, row.num_computed, 0) if items[0].is_sampling else None
            is_foreign |= seen is not None and seen != row.answer.draft_checksum(layer, row.num_computed)
        return is_foreign

    def _propose(self, items: Sequence[_Item], num_drafts: int) -> list[int]:
        """Drafts behind the row's last token."""
        row = items[0].row
        drafts: list[int] = []
        for position in range(row.num_computed + 1, row.num_computed + 1 + num_drafts):
            right = row.answer.token(position)
            is_right = self._rng.random() < self.config.acceptance
            wrong = -1 if self._rng.random() < 0.5 else (right + 1) % VOCAB_SIZE
            # A speculator that has run out proposes nothing more behind the gap.
            drafts.append(-1 if -1 in drafts else right if is_right else wrong)
        for layer in self.ranks[self.config.pp - 1, 0].drafter:
            for item in items:
                item.write(layer, row.num_computed, drafts[:-1][: self.limits.max_model_len - row.num_computed])
        return drafts


def _checksum(items: Sequence[_Item], layer: OracleLayer, position: int, before: int) -> int:
    """Of what a query at `position` sees behind it in all heads of a stage; continues the checksum `before`."""
    for item in items:
        before = item.memory.checksum(layer, item.table[layer.group], position, before)
    return before


def _accept(drafts: Sequence[int], checksums: Sequence[int]) -> tuple[int, ...]:
    """The accepted drafts and the token behind them; nothing where nothing is sampled."""
    sampled: list[int] = []
    for index, checksum in enumerate(checksums):
        sampled.append(checksum % VOCAB_SIZE)
        if index == len(drafts) or drafts[index] != sampled[-1]:
            break
    return tuple(sampled)

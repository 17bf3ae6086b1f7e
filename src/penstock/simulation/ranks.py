"""Simulated ranks: workers of the production executor whose device consists of a memory and the oracle's arithmetic.

A `SimWorker` manages its rows, reads its plans and calls its connector with the code of a real one. Layers lie on the
pipeline stages in order, heads on a stage's ranks. `Devices` computes the ranks of a stage together and the stages one
after the other; earlier stages may be steps ahead of the last. Sampling changes only the last stage's rows; the other
stages receive the results, and apply them when they need them. The progress when the scheduler polls is random, within
the order of the steps.
"""

from __future__ import annotations

import dataclasses
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
from penstock.messages.adapters import NO_SLOT
from penstock.messages.kv_transfer import KVConnectorMetadata, KVConnectorOutput, ShardId
from penstock.messages.memory_budget import MemoryBudget
from penstock.messages.runner_output import ModelRunnerOutput
from penstock.messages.scheduler_output import GrammarOutput, SchedulerOutput
from penstock.runner.awaited_results import AwaitedResults
from penstock.runner.host_batch import read_plan
from penstock.runner.rows import Rows
from penstock.simulation.device_rows import Item, Row, StageResult, accept, checksum
from penstock.simulation.oracle import (
    NUM_HEADS,
    VOCAB_SIZE,
    Answers,
    OracleLayer,
    OracleMemory,
    adapter_seed,
    cache_config,
)
from penstock.utils.math import interval
from penstock.worker.messages import InitializeWorker, WorkerFacts, WorkerReady

Kernel = Callable[[], object]
Outputs = dict[ShardId, KVConnectorOutput]

FOREIGN_KV = -1
"""Reported instead of the sampled tokens if the following drafts were computed from KV of another request."""


class InjectedError(RuntimeError):
    """A worker failure injected by the scenario."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankConfig:
    """`stage_layers` is the number of target layers of each stage; by default they are divided evenly. `acceptance` is
    the share of correct drafts. `tells_gaps`: the drafter reports where it has no draft. `runs_ahead`: the host ends a
    step, connector included, although the device may not have begun it.
    """

    layers: tuple[OracleLayer, ...]
    stage_layers: tuple[int, ...] = ()
    pp: int = 1
    tp: int = 1
    acceptance: float = 0.0
    tells_gaps: bool = False
    runs_ahead: bool = False

    @property
    def shards(self) -> list[ShardId]:
        return [(stage, number) for stage in range(self.pp) for number in range(self.tp)]

    def layers_of(self, stage: int) -> tuple[OracleLayer, ...]:
        """Returns a stage's layers of the target, and on the last stage also the drafter's."""
        target = [layer for layer in self.layers if not layer.is_draft]
        first, end = interval(len(target), stage, self.pp)
        if self.stage_layers:
            first, end = sum(self.stage_layers[:stage]), sum(self.stage_layers[: stage + 1])
        drafter = [layer for layer in self.layers if layer.is_draft]
        return (*target[first:end], *(drafter if stage == self.pp - 1 else ()))

    def heads_of(self, number: int) -> range:
        """Returns the heads of a rank within its stage. With more ranks than heads, several ranks have the same one."""
        if self.tp > NUM_HEADS:
            first, _ = interval(NUM_HEADS, number, self.tp)
            return range(first, first + 1)
        return range(*interval(NUM_HEADS, number, self.tp))


@dataclass(slots=True, eq=False)
class _Step:
    """`kernels` were launched on a stage and have not run; `checksums` is passed from one stage to the next, one per
    request and token to sample; `drafts_read` is what a connector reads from the drafter's KV.
    """

    number: int
    fresh_block_ids: tuple[int, ...]
    num_launched: int = 0  # stages
    num_computed: int = 0
    plans: dict[ShardId, SchedulerOutput] = field(default_factory=dict[ShardId, SchedulerOutput])
    kernels: list[list[Kernel]] = field(default_factory=list[list[Kernel]])
    items: dict[ShardId, list[Item]] = field(default_factory=dict[ShardId, list[Item]])
    checksums: list[list[int]] = field(default_factory=list[list[int]])
    drafts_read: dict[ShardId, list[int]] = field(default_factory=dict[ShardId, list[int]])
    finished: Outputs = field(default_factory=Outputs)
    result: ModelRunnerOutput = field(default_factory=ModelRunnerOutput)


class _Watched(Forwarding):
    """A rank's connector; checks the memory at the start of a step and at the point after which the step must not
    write.
    """

    def __init__(self, inner: WorkerConnector, rank: SimWorker) -> None:
        super().__init__(inner)
        self._rank = rank
        self._is_bound = False

    def begin_step(self, metadata: KVConnectorMetadata | None) -> None:
        self._is_bound = True
        self.inner.begin_step(metadata)
        self._rank.memory.poison(self._rank.step.fresh_block_ids)

    def wait_for_save(self) -> None:
        assert self._is_bound, f"rank {self._rank.shard} drops the step's metadata before it ends its saves"
        self.inner.wait_for_save()
        self._rank.read_drafts()

    def end_step(self) -> None:
        self._is_bound = False
        self.inner.end_step()


class SimWorker:
    """One rank (`WorkerHandle`): its layers, its heads, its rows, its memory and its part of the connector."""

    def __init__(self, devices: Devices, shard: ShardId, connector: WorkerConnector) -> None:
        self.shard = shard
        self.heads = devices.config.heads_of(shard[1])
        self.layers = devices.config.layers_of(shard[0])
        self.drafter = [layer for layer in self.layers if layer.is_draft]
        self.rows: dict[int, Row] = {}  # by state row
        self.adapters = {NO_SLOT: 0}  # the seeds of those in the slots
        self.results: deque[StageResult] = deque()  # sent by the last stage and not yet received
        self.num_foreign_results = 0
        self.is_last_stage = shard[0] == devices.config.pp - 1
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
        planned = plan.cache
        cache = cache_config(self.layers, planned.num_blocks, planned.block_size, len(self.heads))
        cache = dataclasses.replace(cache, num_states=planned.num_states)
        self.memory = OracleMemory(cache, self.shard, self.heads)
        self._host_rows = Rows(plan.limits.max_num_seqs)
        self._awaited = AwaitedResults(self._host_rows, plan.limits.max_num_in_flight)
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

    def kill(self) -> None: ...

    def hang_up(self) -> None: ...

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
        for _ in range(self._awaited.num_due(plan.step, host.rows)):
            self._receive()
        num_drafts = dict(zip(host.sampling.tolist(), host.num_drafts.tolist(), strict=True))
        counts = zip(host.rows.tolist(), host.query_lens.tolist(), host.num_computed_upper_bound.tolist(), strict=True)
        items = self.step.items[self.shard] = []
        for index, (number, num_tokens, upper_bound) in enumerate(counts):
            row, samples = self.rows[number], index in num_drafts
            table = [tuple(ids) for ids in row.table]
            items.append(Item(self.memory, row, table, num_tokens, upper_bound, samples, num_drafts.get(index, 0)))
        forward()
        if not self.is_last_stage:
            self._awaited.expect(plan.step, host)

    def lacks_results(self, plan: SchedulerOutput) -> bool:
        """Whether this step, the next one on this rank, needs results that the last stage has not sent yet."""
        new = {each.request_id for each in plan.new_requests}
        rows = self._host_rows.rows([each for each in plan.num_scheduled_tokens if each not in new])
        return self._awaited.num_due(plan.step, rows) > len(self.results)

    def _receive(self) -> None:
        """Applies the oldest result."""
        result, owned = self.results.popleft(), self._awaited.take()
        self.num_foreign_results += len(result) - len(owned.positions)
        for position, number in zip(owned.positions.tolist(), owned.rows.tolist(), strict=True):
            row = self.rows.get(number)
            if row is not None:
                sampled, drafts = result[position]
                row.take(sampled)
                row.hold(drafts)

    def _update_rows(self, plan: SchedulerOutput) -> None:
        for row in self._host_rows.remove(plan.finished_request_ids | plan.preempted_request_ids):
            del self.rows[row]
        self.adapters.update((load.slot, adapter_seed(load.adapter)) for load in plan.adapter_loads)
        for new in plan.new_requests:
            row = self._host_rows.add(new.request_id, len(new.token_ids))
            assert row not in self.rows, f"{new.request_id} gets a row that another has"
            answers, prompt = self._devices.answers, new.token_ids[: new.request.num_prompt_tokens]
            seed = self.adapters[new.request.adapter_slot]
            answer = answers.of(prompt) if plan.is_warm_up else answers.known(prompt, seed)
            table = [list(ids) for ids in new.block_ids]
            self.rows[row] = Row(new.request_id, answer, list(new.token_ids), new.num_computed_tokens, table, seed)
        for request_id, block_ids in plan.new_block_ids.items():
            for table, ids in zip(self.rows[self._host_rows.row(request_id)].table, block_ids, strict=True):
                table.extend(ids)

    def read_drafts(self) -> None:
        """Reads the drafter's KV after the step, as a connector does to save it."""
        step = self.step

        def read() -> None:
            step.drafts_read.setdefault(self.shard, self.draft_words(step))

        self._devices.launch(step, read)

    def draft_words(self, step: _Step) -> list[int]:
        """Returns the content of the drafter's slots of a step."""
        return [
            word
            for layer in self.drafter
            for item in step.items[self.shard]
            for word in self.memory.read(layer, item.table[layer.group], item.start, item.end)
        ]


class Devices:
    """The devices of an engine's ranks. `take_fresh` returns the blocks allocated since the last call; `before_stage`
    is called when a stage begins its part of a step, and may raise for one of its workers; `deliver` may delay or
    repeat the connectors' reports.
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
        self.before_stage: Callable[[int], None] = lambda stage: None
        self.deliver: Callable[[SchedulerOutput, Outputs], Outputs] = lambda plan, finished: finished
        self.max_ahead = 0
        self._rng = rng
        self._take_fresh = take_fresh
        self._steps: deque[_Step] = deque()

    @property
    def is_idle(self) -> bool:
        """Whether every rank has run every plan."""
        return not self._steps

    def enqueue(self, shard: ShardId, plan: SchedulerOutput) -> None:
        if not self._steps or self._steps[-1].number != plan.step:
            self._steps.append(_Step(plan.step, self._take_fresh()))
        self._steps[-1].plans[shard] = plan

    def answer(self, shard: ShardId) -> Pending[ModelRunnerOutput]:
        """Returns a rank's answer to the step enqueued last."""
        step = self._steps[-1]
        if shard == self.config.shards[-1]:
            while (ready := self._ready()) and self._rng.random() < 0.5:
                self._rng.choice(ready)()
        return Later(lambda: self._run_to_end(step, shard))

    def _ready(self) -> list[Kernel]:
        """Returns the possible next events: a stage runs after its previous step, and earlier stages must know their
        tokens.
        """
        ready: list[Kernel] = []
        launched = computed = self.config.pp
        for step in self._steps:
            if step.num_launched < launched and not self._lacks_results(step):
                ready.append(partial(self._launch, step))
            if step.num_computed < min(computed, step.num_launched):
                ready.append(partial(self._compute, step))
            launched, computed = step.num_launched, step.num_computed
        return ready

    def _lacks_results(self, step: _Step) -> bool:
        """Whether the stage that runs it next does not yet know all its tokens."""
        return any(rank.lacks_results(step.plans[rank.shard]) for rank in self._stage(step.num_launched))

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
        """Runs the host's part of a stage. If the host does not run ahead, this includes the device's part."""
        stage = step.num_launched
        self.before_stage(stage)
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
        """Launches a kernel; kernels of a stage run in launch order."""
        if self.config.runs_ahead:
            step.kernels[-1].append(kernel)
        else:
            kernel()

    def _compute(self, step: _Step) -> None:
        """Runs the device's part of a stage that the host has launched earlier."""
        stage = step.num_computed
        for kernel in step.kernels[stage]:
            kernel()
        for rank in self._stage(stage):
            # Warm-up steps do not reach the connector.
            is_final = step.plans[rank.shard].is_warm_up or step.drafts_read[rank.shard] == rank.draft_words(step)
            assert is_final, f"rank {rank.shard} writes the drafter's KV after wait_for_save"
        step.num_computed += 1
        if step.num_computed == self.config.pp:
            step.finished = self.deliver(step.plans[0, 0], step.finished)
            self._steps.remove(step)

    def _forward(self, step: _Step, stage: int) -> None:
        """Each layer writes the step's slots, then computes the checksum of what every sampling query reads."""
        ranks = self._stage(stage)
        batch = list(zip(*(step.items[rank.shard] for rank in ranks), strict=True))
        for item in [item for items in batch for item in items]:
            ahead = item.num_computed_upper_bound - item.row.num_computed
            most = self.limits.max_num_drafts * self.limits.max_steps_ahead
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
                    checksums[index] = checksum(items, layer, items[0].end - items[0].num_drafts + index, before)
            for rank in ranks:
                rank.kv_step.hooks.save_kv_layer(layer.name)

    def _sample_and_draft(self, step: _Step, stage: int) -> None:
        """Samples and drafts on the last stage, and sends the tokens to the earlier stages."""
        if stage < self.config.pp - 1:
            return
        result, num_drafts = step.result, step.plans[stage, 0].num_drafts_to_propose
        batch = zip(*(step.items[rank.shard] for rank in self._stage(stage)), strict=True)
        sent: StageResult = []
        for items, checksums in zip(batch, step.checksums, strict=True):
            first = items[0]
            row = first.row
            verified = row.tokens[first.end - first.num_drafts : first.end]
            sampled = accept(verified, checksums)
            if verified:
                result.num_draft_tokens[row.request_id] = [*verified, -1].index(-1)
            for item in items if sampled else ():
                item.row.take(sampled)
            is_foreign = self._follow(items)
            result.sampled_token_ids[row.request_id] = (FOREIGN_KV,) * len(sampled) if is_foreign else sampled
            if sampled:
                drafts = self._propose(items, num_drafts)
                for item in items:
                    item.row.hold(drafts)
                sent.append((sampled, drafts))
                if self.config.tells_gaps:
                    result.num_proposed_tokens[row.request_id] = [*drafts, -1].index(-1)
        for rank in self.ranks.values() if sent else ():
            if rank.shard[0] != stage:
                rank.results.append(sent)

    def _follow(self, items: Sequence[Item]) -> bool:
        """The drafter computes the step's slots, each from the following token, like heads that look one token ahead.
        Returns whether the content that it reads to continue is not the request's own.
        """
        row, is_foreign = items[0].row, False
        for layer in self.ranks[self.config.pp - 1, 0].drafter:
            for item in items:
                item.write(layer, item.start, item.row.tokens[item.start + 1 : row.num_computed + 1])
            seen = checksum(items, layer, row.num_computed, 0) if items[0].is_sampling else None
            is_foreign |= seen is not None and seen != row.answer.draft_checksum(layer, row.num_computed)
        return is_foreign

    def _propose(self, items: Sequence[Item], num_drafts: int) -> list[int]:
        """Proposes drafts after the row's last token."""
        row = items[0].row
        drafts: list[int] = []
        for position in range(row.num_computed + 1, row.num_computed + 1 + num_drafts):
            right = row.answer.token(position)
            is_right = self._rng.random() < self.config.acceptance
            wrong = -1 if self._rng.random() < 0.5 else (right + 1) % VOCAB_SIZE
            # A speculator that has run out proposes nothing after the gap.
            drafts.append(-1 if -1 in drafts else right if is_right else wrong)
        for layer in self.ranks[self.config.pp - 1, 0].drafter:
            for item in items:
                item.write(layer, row.num_computed, drafts[:-1][: self.limits.max_model_len - row.num_computed])
        return drafts

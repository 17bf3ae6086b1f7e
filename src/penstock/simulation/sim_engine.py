"""One life of one engine in a world: the real core, scheduler and cache manager over an executor of oracle ranks."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping

from msgspec.structs import replace

from penstock.core.adapter_slots import AdapterSlots
from penstock.core.block_pool import BlockKey, BlockPool
from penstock.core.kv_cache_manager import KVCacheManager
from penstock.core.remote_kv import KVTransfer
from penstock.core.request import Request, RequestStatus
from penstock.core.scheduler import Scheduler
from penstock.core.structured_output import StructuredOutputs
from penstock.engine.engine_core import EngineCore
from penstock.executor.executor import Executor, OverTheWire
from penstock.kv_transfer.connector import WorkerConnector
from penstock.messages.kv_cache_spec import KVCacheConfig
from penstock.messages.kv_transfer import KVConnectorOutput, ShardId, TransferId, TransferReport, TransferStatus
from penstock.messages.scheduler_output import SchedulerOutput
from penstock.simulation.backing import BackingContext, Parts, Site
from penstock.simulation.oracle import Answers
from penstock.simulation.ranks import Devices, Outputs, RankConfig, SimWorker
from penstock.simulation.setup import Faults, Setup
from penstock.simulation.trace import Trace, block_name, hash_name
from penstock.simulation.transcripts import Transcripts
from penstock.utils.clock import ManualClock
from penstock.worker.messages import InitializeWorker

_MAX_STEPS_LATE = 12


class WatchedPool(BlockPool):
    """The real pool of one engine, with a record of what it does."""

    def __init__(self, cache: KVCacheConfig, engine: str, trace: Trace) -> None:
        super().__init__(cache.num_blocks, num_states=cache.num_states)
        self._engine = engine
        self._trace = trace
        self._fresh: list[int] = []
        self.newly_published: list[tuple[int, BlockKey]] = []

    def allocate(self, num_blocks: int, for_states: bool = False) -> list[int]:
        block_ids = super().allocate(num_blocks, for_states)
        self._fresh += block_ids
        # A load may be published and evicted in one call of the scheduler.
        self.newly_published = [each for each in self.newly_published if each[0] not in block_ids]
        self._note("hands out", block_ids)
        return block_ids

    def take_fresh(self) -> tuple[int, ...]:
        """Returns the blocks allocated since the last call."""
        fresh, self._fresh = tuple(self._fresh), []
        return fresh

    def publish(self, block_id: int, key: BlockKey) -> bool:
        is_new = super().publish(block_id, key)
        self._note("publishes", [block_id], hash_name(key[1]))
        self.newly_published.append((block_id, key))
        return is_new

    def pin(self, transfer_id: TransferId, block_ids: Iterable[int], writes: bool) -> None:
        ids = list(block_ids)
        super().pin(transfer_id, ids, writes)
        self._note("writes into" if writes else "reads", ids, str(transfer_id), transfer_id.request)

    def unpin(self, transfer_id: TransferId) -> None:
        super().unpin(transfer_id)
        self._note("is done with", (), str(transfer_id), transfer_id.request)

    def _note(self, text: str, block_ids: Iterable[int], *subjects: str) -> None:
        names = [block_name(self._engine, block_id) for block_id in block_ids]
        if names or subjects:
            self._trace.note(self._engine, text, *subjects, *names)

    def published(self) -> Iterator[tuple[int, BlockKey]]:
        """Returns all blocks that the prefix cache can return."""
        return ((block_id, block.key) for block_id, block in enumerate(self._blocks) if block.key is not None)

    def is_available(self, block_id: int) -> bool:
        """Whether the block can be allocated at any moment."""
        block = self._blocks[block_id]
        return not block.num_owners and not block.num_pins


class ReportFaults:
    """Delays, repeats and reorders the ranks' reports; for a step with synchronous loads it only repeats them. `old`
    are reports of earlier lives, which are also delivered again. `count` is told what happens.
    """

    def __init__(
        self,
        context: BackingContext,
        rng: random.Random,
        old: deque[TransferReport],
        count: Callable[[str, float], None],
    ) -> None:
        self._context = context
        self._rng = rng
        self._old = old
        self._count = count
        self._held: list[tuple[int, TransferReport]] = []  # and the steps in which they are due
        self._reported_last: set[TransferId] = set()

    def deliver(self, plan: SchedulerOutput, finished: Outputs) -> Outputs:
        """Returns the ranks' reports for the step, given what their connectors have finished."""
        rng, faults, is_active = self._rng, self._context.setup.faults, self._context.has_faults
        metadata = plan.kv_connector_metadata
        may_delay = is_active and not (metadata is not None and metadata.has_sync_loads)
        ended = [report for output in finished.values() for report in output.reports]
        reports: list[TransferReport] = []
        for report in ended:
            if may_delay and rng.random() < faults.late:
                self._held.append((plan.step + rng.randrange(1, _MAX_STEPS_LATE), report))
            else:
                reports.append(report)
        late = [report for due, report in self._held if due <= plan.step or not is_active]
        reports += late
        self._count("late_reports", len(late))
        self._held = [(due, report) for due, report in self._held if due > plan.step and is_active]
        if is_active and faults.repeated:
            rng.shuffle(reports)
            old = [old for old in self._old if rng.random() < faults.repeated / 4]
            self._count("old_reports", len(old))
            reports += old
            reports += [report for report in reports if rng.random() < faults.repeated]
        self._old.extend(ended)
        if is_active and faults.contradicted:
            reports = [each for report in reports for each in self._contradict(report, max(finished), faults)]
        return {shard: KVConnectorOutput(tuple(each for each in reports if each.shard == shard)) for shard in finished}

    def _contradict(self, report: TransferReport, last: ShardId, faults: Faults) -> Iterator[TransferReport]:
        """Inserts a success before a failure, while the report of the last rank keeps the transfer open."""
        if report.shard == last:
            self._reported_last.add(report.transfer_id)
        is_open = report.transfer_id not in self._reported_last
        if is_open and report.status is TransferStatus.FAILED and self._rng.random() < faults.contradicted:
            yield replace(report, status=TransferStatus.DONE, bad_ranges=())
        yield report


class SimEngine:
    """`devices.deliver` may be replaced before the first step."""

    def __init__(
        self,
        site: Site,
        parts: Parts,
        setup: Setup,
        answers: Answers,
        clock: ManualClock,
        rng: random.Random,
        trace: Trace,
    ) -> None:
        self.name = site.name
        self.pool = WatchedPool(site.cache, site.name, trace)
        self.kv = KVCacheManager(site.cache, setup.prefix_caching)
        self.kv.pool = self.pool
        transfer = KVTransfer(parts.scheduler, setup.load_failure_policy, setup.load_timeout, clock)
        self.devices = Devices(site.ranks, answers, rng, self.pool.take_fresh)
        executor = make_executor(self.devices, parts.workers)
        executor.load()
        limits = setup.scheduler_config(site.ranks.pp)
        (handshakes,) = executor.initialize(InitializeWorker(cache=site.cache, limits=limits))
        self.scheduler = Scheduler(
            limits, self.kv, StructuredOutputs(Transcripts()), transfer, adapters=AdapterSlots(setup.lora)
        )
        if not parts.is_null:
            parts.scheduler.set_xfer_handshake_metadata_pp_aware(handshakes)
        self.core = EngineCore(self.scheduler, executor, limits.max_num_in_flight, debug=True, clock=clock)

    @property
    def has_work(self) -> bool:
        return self.core.has_work or self.core.has_rows_to_free or self.core.has_transfers

    @property
    def needs_step(self) -> bool:
        """Whether a step can do something now."""
        return self.core.patience == 0 or self.core.has_rows_to_free

    @property
    def is_idle(self) -> bool:
        """Whether there are no requests and no messages for the workers: only transfers could need a step."""
        return not (self.core.has_work or self.core.has_rows_to_free)

    @property
    def num_steps(self) -> int:
        """The number of executed steps."""
        return self.scheduler._step

    @property
    def num_foreign_results(self) -> int:
        """The number of results that reached an earlier stage after their request's row had been reassigned."""
        return sum(rank.num_foreign_results for rank in self.devices.ranks.values())

    @property
    def num_holds(self) -> int:
        """The number of finished requests whose blocks are held."""
        return self.scheduler._remote.num_holds

    def running_requests(self) -> list[Request]:
        """The requests that the scheduler has admitted."""
        return self.scheduler._running.snapshot()

    def is_waiting_for_kv(self, request_id: str) -> bool:
        request = self.scheduler._requests.get(request_id)
        return request is not None and request.status is RequestStatus.WAITING_FOR_REMOTE_KV


def make_executor(devices: Devices, connectors: Mapping[ShardId, WorkerConnector]) -> Executor:
    """Builds the production executor with a worker for every rank; all messages are encoded and decoded."""
    return Executor([OverTheWire(SimWorker(devices, shard, connectors[shard])) for shard in devices.config.shards])


def make_site(setup: Setup, name: str, life: int, engine: int) -> Site:
    """Describes a life of the engine of that number."""
    pp, tp = setup.topologies[engine]
    block_size = setup.block_size_of(engine)
    ranks = RankConfig(
        layers=setup.layers,
        stage_layers=setup.layers_of_stages(pp),
        pp=pp,
        tp=tp,
        acceptance=setup.acceptance,
        tells_gaps=setup.tells_gaps,
        runs_ahead=setup.runs_ahead,
    )
    return Site(name, life, setup.cache(block_size), ranks)

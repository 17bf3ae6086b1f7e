"""The real `P2PConnector`'s two sides in a world, over the simulated network and the faulty transport."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import accumulate

from penstock.kv_transfer.p2p.consumer import Consumer
from penstock.kv_transfer.p2p.exchange import Exchange, P2PSettings
from penstock.kv_transfer.p2p.messages import Hello, P2PSetup
from penstock.kv_transfer.p2p.peers import PeerList
from penstock.kv_transfer.p2p.producer import Producer, ProducerRules
from penstock.kv_transfer.p2p.scheduler import P2PScheduler
from penstock.kv_transfer.p2p.ticket import TicketOffice
from penstock.kv_transfer.p2p.worker import P2PWorker
from penstock.kv_transfer.transports.base import PeerId
from penstock.messages.kv_layout import KVLayout
from penstock.messages.kv_transfer import ShardId, TransferId
from penstock.messages.scheduler_output import BlockIds
from penstock.simulation.backing import Backing, BackingContext, Parts, Site, Touch
from penstock.simulation.memory_transport import MemoryFabric, MemoryTransport
from penstock.simulation.p2p_network import SimChannel, SimNetwork
from penstock.simulation.p2p_rogue import Rogue
from penstock.simulation.proxies import CLUSTER_KEY, ROGUE, address_of
from penstock.simulation.setup import TICK_SECONDS, Disaggregation, engine_name
from penstock.utils.errors import PeerError

_TRANSPORT = "memory"
# Short, because the clock is common to all engines, and they run at the same time.
_WAIT_SECONDS = 0.02 * TICK_SECONDS
_MAX_STOP_LEASES = 3.0


class _CountingExchange(Exchange):
    """The real one without waiting, which also notes how long the loads of a conversation's turns are."""

    loaded: Counter[str]

    def begin_load(self, name: TransferId, transfer_id: TransferId, block_ids: BlockIds, first: int, end: int) -> None:
        _, _, turn = transfer_id.request.partition(".")
        self.loaded[f"turn{turn[:1]}_asked_tokens"] += end - first
        super().begin_load(name, transfer_id, block_ids, first, end)

    def wait(self, seconds: float) -> None:
        """Returns at once: time passes between the steps."""


@dataclass(frozen=True, slots=True)
class _Life:
    """One life of one engine."""

    channel: SimChannel
    producer: Producer
    consumer: Consumer
    exchange: Exchange
    scheduler: P2PScheduler
    workers: Mapping[ShardId, P2PWorker]
    transports: Mapping[ShardId, MemoryTransport]

    def check_idle(self) -> None:
        """Checks that no table has an entry, except those of connections that stay open."""
        tables: dict[str, Collection[object]] = {
            "holds": self.producer._state.holds,
            "parked fetches": self.producer._state.parked,
            "loads": self.consumer._loads,
            "events": self.exchange._events,
            "jobs in progress": list(self.exchange._jobs._ledger),
            "requests": self.scheduler._remote,
            "requests of others": self.scheduler._prefills,
        }
        metadata = self.exchange.take_metadata(computes=False)
        for shard, worker in self.workers.items():
            worker.begin_step(metadata)
            worker.end_step()
            transport = self.transports[shard]
            known = {each.descriptor.decode() for table in worker._tables.values() for each in table.values()}
            tables |= {f"reads of {shard}": worker._mover.reads, f"digests of {shard}": worker._digesting}
            tables[f"connections of {shard} to engines that have gone"] = transport.peers - known
        topology = self.exchange._jobs._topology
        known = {name for name, _ in topology._stages} - {topology.engine_id}
        tables["engines that have gone"] = known - self.exchange._sessions.engines()
        for what, table in tables.items():
            assert not table, f"{self.channel.name} is idle and has {what}: {list(table)[:4]}"
        self.exchange.check_integrity()


class P2PBacking(Backing):
    """Engines that are connected to one another, each with its own address and a shared list of peers."""

    def __init__(self, context: BackingContext) -> None:
        setup = context.setup
        self._context = context
        self._pairs = setup.disaggregation or Disaggregation()
        self._rng = random.Random(context.pick(1 << 62))
        self._fabric = MemoryFabric(context.clock, context.fault_of, setup.drain)
        self._network = SimNetwork(context, self._rng)
        self._names = [engine_name(number) for number in range(len(setup.topologies))]
        self._peers = PeerList([f"{host}:{port}" for host, port in map(address_of, [*self._names, ROGUE])], None)
        self._lives: dict[str, _Life] = {}
        self._rogue = None
        if setup.faults.garbage:
            self._rogue = Rogue(setup, self._rng, self._network, self._fabric, self._some_hello)
        self._loaded = Counter[str]()

    def attach(self, site: Site) -> Parts:
        pairs, clock = self._pairs, self._context.clock
        channel = self._network.open(site.name, address_of(site.name))
        epoch, office = f"{site.name}.{site.life}", TicketOffice(CLUSTER_KEY)
        settings = P2PSettings(
            engine_id=site.name,
            epoch=epoch,
            role="kv_both",
            meaning={"weights": "oracle"},
            setup=P2PSetup(_TRANSPORT, channel.address[0], CLUSTER_KEY),
            num_groups=len(site.cache.groups),
            requires_digests=pairs.is_attested,
        )
        rules = ProducerRules(
            hold_seconds=pairs.hold_seconds,
            lease_seconds=pairs.lease_seconds,
            park_seconds=pairs.park_seconds,
            max_parked=pairs.max_parked,
            max_held_blocks=int(pairs.hold_share * site.cache.num_blocks),
            first_state=site.cache.num_blocks,
            max_held_states=int(pairs.hold_share * site.cache.num_states),
            is_attested=pairs.is_attested,
        )
        producer = Producer(site.name, epoch, rules, office)
        consumer = Consumer(office, self._peers.resolve, self._context.setup.load_timeout)
        exchange = _CountingExchange(settings, channel, producer, consumer, clock)
        exchange.loaded = self._loaded
        scheduler = P2PScheduler(
            settings,
            site.cache.block_size,
            exchange,
            digests_next_step=True,  # simulated devices compute later
        )
        transports = {shard: self._fabric.endpoint(f"{site.name}-{shard[0]}.{shard[1]}") for shard in site.ranks.shards}
        workers = {shard: self._make_worker(shard, transport) for shard, transport in transports.items()}
        self._lives[site.name] = _Life(channel, producer, consumer, exchange, scheduler, workers, transports)
        return Parts(scheduler, workers)

    def _make_worker(self, shard: ShardId, transport: MemoryTransport) -> P2PWorker:
        def make_transport(layout: KVLayout) -> MemoryTransport:
            return transport

        return P2PWorker(
            shard,
            make_transport,
            _at_once,
            digest_bytes=self._pairs.digest_bytes_per_tick / TICK_SECONDS,
            wait_seconds=_WAIT_SECONDS,
            clock=self._context.clock,
        )

    def crash(self, name: str) -> None:
        life = self._lives.pop(name)
        self._network.crash(life.channel)
        for transport in life.transports.values():
            self._fabric.crash(transport)

    def tick(self) -> None:
        if self._context.has_faults:
            self._strike()
        self._fabric.run()
        self._network.run()

    def _strike(self) -> None:
        rng, faults = self._rng, self._context.setup.faults
        if self._rogue is not None and self._lives:
            self._rogue.act(self._names)
        if rng.random() < faults.partition:
            one, other = rng.sample(self._names, 2)
            self._network.partition(one, other, rng.uniform(0.0, 2 * self._pairs.lease_seconds))
        if rng.random() < faults.stop:
            name = rng.choice(self._names)
            if not self._network.is_stopped(name):
                self._network.stop(name, self._pairs.lease_seconds * rng.uniform(0.2, _MAX_STOP_LEASES))

    def _some_hello(self) -> Hello:
        return self._rng.choice(list(self._lives.values())).exchange._sessions._hello

    def is_stopped(self, name: str) -> bool:
        return self._network.is_stopped(name)

    def has_news(self, name: str) -> bool:
        """True if loads have ended, blocks are released, or workers have jobs."""
        exchange = self._lives[name].exchange
        return bool(exchange._events) or not exchange._jobs.is_idle

    @property
    def is_settled(self) -> bool:
        return self._network.is_quiet and not any(
            life.producer.num_held or life.producer._state.parked or life.consumer.num_loads
            for life in self._lives.values()
        )

    def touching(self, name: str) -> Iterable[Touch]:
        life = self._lives[name]
        for shard, transport in life.transports.items():
            layout = life.workers[shard]._layout
            starts = list(accumulate((region.num_bytes for region in layout.regions), initial=0))
            layer_in = {layer.region: layer for layer in layout.layers}
            for offset, num_bytes in self._fabric.touched(transport):
                number = bisect_right(starts, offset) - 1
                layer, first = layer_in[layout.regions[number].name], offset - starts[number]
                for index in range(first // layer.block_bytes, (first + num_bytes - 1) // layer.block_bytes + 1):
                    yield Touch(layer.first_block + index, writes=True)

    def counters(self) -> Mapping[str, float]:
        said = {"garbage": self._rogue.num_said} if self._rogue is not None else {}
        return {**self._network.counts, **self._loaded, **said}

    def check_idle(self) -> None:
        for life in self._lives.values():
            life.check_idle()
            assert not self._pairs.expects_no_expiry or not life.producer.counts.num_expired, "a hold has expired"
            assert all(self._fabric.is_quiet(each) for each in life.transports.values()), "bytes still move"


def _at_once(connect: Callable[[], PeerId]) -> Future[PeerId]:
    """Connects synchronously instead of in a thread."""
    future: Future[PeerId] = Future()
    try:
        future.set_result(connect())
    except PeerError as error:
        future.set_exception(error)
    return future

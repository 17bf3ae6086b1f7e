"""Peers that have the cluster key and violate the protocol, and some that follow it but differ from the others.

The rogue sends well-formed messages that the codec accepts. Engines whose clients received its address connect to it,
and it connects to engines itself.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import msgspec

from penstock.kv_transfer.p2p.channel import Connected, Lost
from penstock.kv_transfer.p2p.digests import UnitDigests
from penstock.kv_transfer.p2p.messages import (
    Abort,
    Bye,
    Done,
    DoneAck,
    Fetch,
    Grant,
    Hello,
    Message,
    Reason,
    Refuse,
    Renew,
    Shard,
    ShardDigests,
)
from penstock.kv_transfer.p2p.session import PeerKey
from penstock.kv_transfer.topology.pieces import digest_unit
from penstock.kv_transfer.topology.planner import sources
from penstock.messages.kv_layout import KVLayout
from penstock.messages.kv_transfer import TransferId
from penstock.messages.scheduler_output import BlockIds
from penstock.simulation.memory_transport import MemoryFabric
from penstock.simulation.oracle import NUM_HEADS, OracleMemory
from penstock.simulation.p2p_network import SimNetwork
from penstock.simulation.proxies import ROGUE, address_of
from penstock.simulation.setup import Setup

_HUGE = 1 << 62
_STOLEN = "stolen"
_MANY = 5000
_NAN = float("nan")


def _grant(name: TransferId, lease: float, block_ids: BlockIds, digests: tuple[ShardDigests, ...] = ()) -> Grant:
    return Grant(transfer_id=name, lease=lease, block_ids=block_ids, digests=digests)


class Rogue:
    """`real_hello` returns an actual engine's hello. The rogue acts only while there are faults."""

    def __init__(
        self,
        setup: Setup,
        rng: random.Random,
        network: SimNetwork,
        fabric: MemoryFabric,
        real_hello: Callable[[], Hello],
    ) -> None:
        self._setup = setup
        self._rng = rng
        self._channel = network.open(ROGUE, address_of(ROGUE))
        self._real_hello = real_hello
        self._hellos: dict[PeerKey, Hello] = {}
        self._outgoing: list[PeerKey] = []
        self._strangers: set[PeerKey] = set()
        self._seen_ids = [TransferId("c1.1.d", 0), TransferId("c2.1.d", 1), TransferId("", -1)]
        self._seen_tickets = ["", "x", "A" * 3000]
        self._seen_fetches: list[Fetch] = []
        cache = setup.cache(setup.block_size)
        self._memory = OracleMemory(cache, (0, 0), range(NUM_HEADS))
        for region in self._memory.regions.values():
            region[:] = rng.randbytes(len(region))
        self._transport = fabric.endpoint(ROGUE)
        self._transport.register(self._memory.region_memory())
        self._shard = Shard((0, 0), self._memory.layout, self._transport.descriptor())
        self._digests = UnitDigests(self._memory.layout, self._memory.region_memory())
        self.num_said = 0

    def act(self, engines: Sequence[str]) -> None:
        """Answers received messages, and sends an unsolicited one."""
        for event in self._channel.take():
            match event:
                case Connected(peer, is_outgoing):
                    if is_outgoing:
                        self._outgoing.append(peer)
                        self._say(peer, self._hello())
                case Lost(peer, _):
                    self._forget(peer)
                case _:
                    self._answer(event.peer, event.message)
        rng = self._rng
        if rng.random() < self._setup.faults.garbage:
            if self._outgoing and rng.random() < 0.8:
                peer, message = rng.choice(self._outgoing), self._anything()
                self._say(peer, message)
                if isinstance(message, Fetch) and message.transfer_id.request == _STOLEN:
                    self._outgoing.remove(peer)  # nothing that follows ends its session
            else:
                self._channel.dial(address_of(rng.choice(engines)))

    def _forget(self, peer: PeerKey) -> None:
        self._hellos.pop(peer, None)
        self._strangers.discard(peer)
        self._outgoing = [each for each in self._outgoing if each != peer]

    def _say(self, peer: PeerKey, *messages: Message) -> None:
        self.num_said += len(messages)
        for message in messages:
            self._channel.send(peer, message)

    # ---- As a prefill engine ----

    def _answer(self, peer: PeerKey, message: Message) -> None:
        rng = self._rng
        match message:
            case Hello():
                self._hellos[peer] = message
                if peer in self._outgoing:
                    return
                if rng.random() < 0.3:
                    self._strangers.add(peer)
                    self._say(peer, rng.choice([self._own_hello({"weights": "others"}), self._odd_hello()]))
                else:
                    self._say(peer, self._hello())
            case Fetch():
                self._seen_ids.append(message.transfer_id)
                self._seen_tickets.append(message.ticket)
                self._seen_fetches.append(message)
                if peer in self._strangers:
                    self._say(peer, self._honest_grant(self._hellos[peer], message))
                else:
                    self._say(peer, *rng.choices(list(self._grants(message)), k=rng.choice([0, 1, 1, 2])))
            case Done():
                answer = DoneAck(message.transfer_id, True)
                self._say(peer, *[answer] * (1 if peer in self._strangers else rng.choice([0, 1, 1, 2])))
            case Renew() if rng.random() < 0.2:
                self._say(peer, self._anything())
            case _:
                pass

    def _grants(self, fetch: Fetch) -> Iterator[Message]:
        name, groups = fetch.transfer_id, len(self._setup.windows)
        blocks = tuple(range(1, 2 + fetch.end // self._setup.block_size))
        digests, many = self._false_digests()
        tables = {
            "whole": (blocks,) * groups,
            "negative": ((-1,) * len(blocks),) * groups,
            "beyond": ((_HUGE,) * len(blocks),) * groups,
            "none": ((),) * groups,
            "few": (blocks[:-1],) * groups,
            "many": (tuple(range(1, _MANY)),) * groups,
            "groups": (blocks,) * (groups + 1),
        }
        for table in tables.values():
            yield _grant(name, self._setup.load_timeout, table, self._rng.choice([(), digests, many]))
        for lease in (0.0, -1.0, 1e-9, 1e300, _NAN, float("inf")):
            yield _grant(name, lease, tables["whole"], self._rng.choice([(), digests]))
        yield DoneAck(name, True)
        yield Refuse(name, Reason.OVERLOADED, "x" * _MANY)

    def _false_digests(self) -> tuple[tuple[ShardDigests, ...], tuple[ShardDigests, ...]]:
        groups = len(self._setup.windows)
        digests = (ShardDigests((0, 0), (0, 0), ((b"0" * 16,) * 40,) * groups),)
        return digests, tuple(ShardDigests((i, -i), (i, i), ((b"",),)) for i in range(_MANY // 10))

    def _honest_grant(self, reader: Hello, fetch: Fetch) -> Grant:
        """Grants KV of another model, with its correct digests."""
        size = self._setup.block_size
        table = tuple(range(1, 1 + -(-fetch.end // size)))
        unit = digest_unit(size, reader.shards[0].layout.block_size)
        found: list[ShardDigests] = []
        for shard in reader.shards:
            slices = sources(shard.layout, {(0, 0): self._memory.layout}, shard.shard)[0, 0]
            axes = self._memory.layout.layers[0].axes
            by_group = tuple(
                tuple(each for _, each, _ in self._digests.of(slices, axes, table, group, fetch.first, fetch.end, unit))
                for group in range(len(self._setup.windows))
            )
            found.append(ShardDigests((0, 0), shard.shard, by_group))
        return _grant(fetch.transfer_id, 1.0, (table,) * len(self._setup.windows), tuple(found))

    # ---- Hellos and other messages ----

    def _own_hello(self, meaning: dict[str, str]) -> Hello:
        name = f"rogue{self._rng.randrange(3)}"
        return msgspec.structs.replace(
            self._real_hello(), engine_id=name, epoch="1", meaning=meaning, shards=(self._shard,)
        )

    def _odd_hello(self) -> Hello:
        """Adds a layer that no other engine has, whose axes are the order in which all layers would be digested."""
        layout = self._memory.layout
        layer = layout.layers[0]
        unknown = msgspec.structs.replace(
            layer,
            name="unknown",
            axes=layer.axes[::2],
            shape=layer.shape[::2],
            strides=layer.strides[::2],
            heads=(0, 1),
        )
        layout = msgspec.structs.replace(layout, layers=(unknown, *layout.layers))
        shard = msgspec.structs.replace(self._shard, layout=layout)
        return msgspec.structs.replace(self._own_hello(self._real_hello().meaning), epoch="odd", shards=(shard,))

    def _hello(self) -> Hello:
        """Returns the hello of an engine like the others, or an impossible one."""
        rng, real = self._rng, self._real_hello()
        good = self._own_hello(real.meaning)
        if rng.random() < 0.6:
            return rng.choice([good, msgspec.structs.replace(good, engine_id=real.engine_id, epoch="rogue")])
        layout = self._memory.layout
        layer = layout.layers[0]
        wrong: list[KVLayout] = [
            KVLayout(0, layout.regions, layout.layers),
            KVLayout(-4, layout.regions, layout.layers),
            KVLayout(_HUGE, layout.regions, layout.layers),
            KVLayout(1, (), ()),
            KVLayout(layout.block_size, layout.regions, layout.layers[:-1]),
            KVLayout(layout.block_size, layout.regions, layout.layers * 2),
            *(
                KVLayout(layout.block_size, layout.regions, (msgspec.structs.replace(layer, **change),))
                for change in (
                    {"heads": (0, _HUGE)},
                    {"shape": (), "strides": (), "axes": ()},
                    {"strides": (0,) * len(layer.strides)},
                    {"first_block": _HUGE},
                    {"is_recurrent": True},
                    {"group": -1},
                    {"group": 7},
                    {"offset": _HUGE},
                    {"dtype": "float7"},
                    {"shape": (_HUGE, *layer.shape[1:])},
                    {"axes": ("block",) * len(layer.axes)},
                )
            ),
        ]
        shards = [(Shard((0, 0), each, self._shard.descriptor),) for each in wrong]
        shards += [
            (),
            (self._shard, self._shard),
            (Shard((_HUGE, _HUGE), layout, b""),),
            (Shard((-1, 0), layout, b""), self._shard),
            tuple(Shard((0, number), layout, b"") for number in range(1100)),
            (Shard((0, 0), layout, b"no descriptor"),),
        ]
        return msgspec.structs.replace(good, epoch=str(rng.random()), shards=rng.choice(shards))

    def _anything(self) -> Message:
        """Returns a message of any kind, about a transfer that may exist."""
        rng = self._rng
        if self._seen_fetches and rng.random() < 0.3:
            # Requests KV that was not meant for it, and never reports that it is done.
            return msgspec.structs.replace(
                rng.choice(self._seen_fetches), transfer_id=TransferId(_STOLEN, rng.getrandbits(60))
            )
        name, ticket = rng.choice(self._seen_ids), rng.choice(self._seen_tickets)
        first, end = rng.choice([(0, 4), (0, 0), (0, _HUGE), (-4, 8), (8, 4), (1, 3), (-_HUGE, _HUGE), (0, 12)])
        rendezvous = rng.choice(["", "", f"xfer-{rng.randrange(1, 9)}", "never"])
        fetch = Fetch(
            transfer_id=msgspec.structs.replace(name, part=rng.randrange(4)),
            first=first,
            end=end,
            prompt_digest=b"0" * rng.choice([0, 16, 900]),
            ticket="" if rendezvous else ticket,
            rendezvous=rendezvous,
        )
        kinds: list[Message] = [
            fetch,
            fetch,
            fetch,
            fetch,
            Renew(name),
            Done(name),
            Abort(name),
            DoneAck(name, True),
            _grant(name, 1.0, (), ()),
            Refuse(name, Reason.OVERLOADED, ""),
            Bye("x" * _MANY),
            self._hello(),
        ]
        return rng.choice(kinds)

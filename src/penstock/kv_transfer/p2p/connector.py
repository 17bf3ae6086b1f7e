"""`P2PConnector`: one engine prefills, another decodes, and the KV moves over a transport.

`NixlConnector` and `MooncakeConnector` are the same connector under the names that users of other engines write; the
second also answers `GET /query` on its bootstrap port. Options, in `kv_connector_extra_config`:

    transport               "sockets" (TCP, the default), "shared_memory" (engines of one host), "nixl" or
                            "mooncake" (the library of that name, in helper processes)
    backends                of NIXL, ["UCX"] by default
    mooncake_protocol       "rdma", the default: RDMA where Mooncake finds devices, else TCP; or "tcp"
    peers                   addresses or names of engines, such as ["10.0.0.1:5600"]; not needed on one host
    cluster_key_file        a file with the key that all engines share; not needed on one host
    attestation             "all": received KV is compared with digests of the sender; "off"
    hold_seconds            how long the blocks of a prefilled request wait for a reader, 120 by default
    hold_share              the part of the KV cache that such blocks may take, 0.5 by default; a request beyond it is
                            answered without a ticket, and D computes its prompt
    lease_seconds           duration of a reader's lease, 15 by default; it renews the lease while it reads
    bootstrap_port          of MooncakeConnector, 8998 by default
    allow_other_arithmetic  true accepts KV from other kernels or another device, whose last bits differ
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from penstock.config.kv_transfer import DEFAULT_BOOTSTRAP_PORT, KVTransferConfig
from penstock.config.options import Limits, Must, Text, convert_options, one_of
from penstock.kv_transfer.factory import ConnectorContext
from penstock.kv_transfer.p2p.consumer import Consumer
from penstock.kv_transfer.p2p.dialler import threads
from penstock.kv_transfer.p2p.exchange import Exchange, P2PSettings
from penstock.kv_transfer.p2p.messages import P2PSetup
from penstock.kv_transfer.p2p.peers import LocalCluster, PeerList, check_host, is_loopback, read_cluster_key
from penstock.kv_transfer.p2p.producer import Producer, ProducerRules
from penstock.kv_transfer.p2p.scheduler import P2PScheduler
from penstock.kv_transfer.p2p.socket_channel import SocketChannel
from penstock.kv_transfer.p2p.ticket import TicketOffice
from penstock.kv_transfer.p2p.worker import P2PWorker
from penstock.kv_transfer.transports.agent_transport import AgentTransport
from penstock.kv_transfer.transports.agents import LIBRARIES, AgentSettings, check_installed
from penstock.kv_transfer.transports.base import DataTransport
from penstock.kv_transfer.transports.shared_memory import SharedMemoryTransport
from penstock.kv_transfer.transports.sockets import SocketsTransport
from penstock.messages.kv_layout import KVLayout
from penstock.messages.kv_transfer import ConnectorSetup, ShardId
from penstock.utils.clock import SystemClock
from penstock.utils.errors import ConfigError

TRANSPORTS: dict[str, type[DataTransport]] = {
    "sockets": SocketsTransport,
    "shared_memory": SharedMemoryTransport,
    **dict.fromkeys(LIBRARIES, AgentTransport),
}
_Names = Annotated[tuple[Text, ...], Limits(min_length=1), Must("a list of names")]
_Seconds = Annotated[float, Limits(gt=0, le=86400), Must("seconds above 0")]
_MAX_PARKED = 4096


@dataclass(frozen=True, slots=True)
class P2POptions:
    """The connector's options, as the module's docstring describes them."""

    transport: Annotated[str, one_of(*TRANSPORTS)] = "sockets"
    backends: _Names = ("UCX",)
    mooncake_protocol: Literal["rdma", "tcp"] = "rdma"
    peers: Annotated[tuple[Text, ...], Must("a list of addresses")] = ()
    cluster_key_file: Annotated[Text | None, Must("a file")] = None
    attestation: Literal["all", "off"] = "all"
    hold_seconds: _Seconds = 120.0
    hold_share: Annotated[float, Limits(gt=0, le=1), Must("a share above 0, at most 1")] = 0.5
    lease_seconds: _Seconds = 15.0
    bootstrap_port: Annotated[int, Limits(ge=0, lt=1 << 16), Must("a port")] = DEFAULT_BOOTSTRAP_PORT
    allow_other_arithmetic: bool = False


class P2PConnector:
    """See the module's docstring."""

    answers_requests = True
    has_bootstrap = False

    @classmethod
    def make_scheduler_connector(cls, context: ConnectorContext) -> P2PScheduler:
        """Listens on kv_ip and kv_port, unless it only loads. Raises ConfigError if a port is in use."""
        config = context.config
        options = convert_options(P2POptions, config.kv_connector_extra_config, f"of {config.kv_connector}")
        host = check_host(config.kv_ip)
        agent = _agent_settings(options, host)
        local = LocalCluster() if is_loopback(host) and options.cluster_key_file is None else None
        key = _key(config, options, local)
        peers = PeerList(options.peers, local)
        ports: dict[str, int] = {}
        if config.kv_role != "kv_consumer":  # which nothing dials
            ports["kv_port"] = config.kv_port
            if cls.has_bootstrap:
                ports["bootstrap_port"] = options.bootstrap_port
        channel = SocketChannel(host, ports, key, local)
        epoch, office, clock = uuid.uuid4().hex, TicketOffice(key), SystemClock()
        rules = ProducerRules(
            hold_seconds=options.hold_seconds,
            lease_seconds=options.lease_seconds,
            park_seconds=config.kv_load_timeout,
            max_parked=_MAX_PARKED,
            max_held_blocks=int(options.hold_share * context.cache.num_blocks),
            first_state=context.cache.num_blocks,
            max_held_states=int(options.hold_share * context.cache.num_states),
            is_attested=options.attestation == "all",
        )
        settings = P2PSettings(
            engine_id=config.engine_id,
            epoch=epoch,
            role=config.kv_role,
            meaning=context.meaning,
            setup=P2PSetup(options.transport, host, key, agent),
            num_groups=len(context.cache.groups),
            ignored=frozenset({"arithmetic"} if options.allow_other_arithmetic else ()),
            requires_digests=options.attestation == "all",
        )
        producer = Producer(config.engine_id, epoch, rules, office)
        consumer = Consumer(office, peers.resolve, config.kv_load_timeout)
        exchange = Exchange(settings, channel, producer, consumer, clock)
        # Memory that a transport can reach is that of a CPU, where a forward pass has ended when it returns.
        return P2PScheduler(
            settings, context.cache.block_size, exchange, digests_next_step=bool(context.cache.attached)
        )

    @staticmethod
    def make_worker_connector(context: ConnectorContext, shard: ShardId, setup: ConnectorSetup | None) -> P2PWorker:
        assert isinstance(setup, P2PSetup), setup
        is_shared = setup.transport != "sockets"
        return P2PWorker(shard, _transport_maker(setup), threads(), needs_shared_memory=is_shared)


class NixlConnector(P2PConnector):
    """`P2PConnector` under vLLM's name."""


class MooncakeConnector(P2PConnector):
    """`P2PConnector` under vLLM's name, with the bootstrap server that its proxies ask."""

    has_bootstrap = True


def _transport_maker(setup: P2PSetup) -> Callable[[KVLayout], DataTransport]:
    settings = setup.agent
    if settings is not None:
        return lambda layout: AgentTransport(settings, layout.regions, setup.key)
    if setup.transport == "shared_memory":
        return lambda layout: SharedMemoryTransport(layout.regions)
    return lambda layout: SocketsTransport(setup.host, setup.key)


def _agent_settings(options: P2POptions, host: str) -> AgentSettings | None:
    """Returns the settings of a library's transport, else None. Raises ConfigError if the library is not installed."""
    library = options.transport
    if library not in LIBRARIES:
        return None
    check_installed(library)
    return AgentSettings(
        library=library,
        host=host,
        is_local=is_loopback(host),
        backends=options.backends,
        protocol=options.mooncake_protocol,
    )


def _key(config: KVTransferConfig, options: P2POptions, local: LocalCluster | None) -> bytes:
    if options.cluster_key_file is not None:
        key = read_cluster_key(Path(options.cluster_key_file).expanduser())
    elif local is not None:
        return local.key()
    else:
        raise ConfigError(
            f"kv_ip {config.kv_ip} can be reached from other hosts: set cluster_key_file in kv_connector_extra_config "
            "to a file with a secret key, the same on all hosts"
        )
    if config.kv_role != "kv_producer" and not options.peers:
        raise ConfigError("set peers in kv_connector_extra_config to the addresses of the engines that prefill")
    return key

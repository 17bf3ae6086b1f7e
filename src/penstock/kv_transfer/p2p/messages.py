"""The messages between two engine cores, and from a core to its own workers.

Between cores, over one authenticated connection that the consumer D has opened to the producer P:

    D -> P   Hello                   P -> D   Hello, or Refuse
    D -> P   Fetch(what, tokens)     P -> D   Grant (once the blocks are digested), or Refuse
    D -> P   Renew                   every third of a lease while D reads
    D -> P   Done                    P -> D   DoneAck: whether the lease lasted through the whole read

At any time

    D -> P   Abort                   D no longer needs it; there is no answer
    either   Bye                     the sender shuts down

A lease is a duration from the receipt of the message that begins it, never a time of day of another host.
"""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec

from penstock.kv_transfer.transports.agents import AgentSettings
from penstock.messages.kv_layout import KVLayout
from penstock.messages.kv_transfer import ConnectorSetup, HandshakePayload, KVConnectorMetadata, ShardId, TransferId
from penstock.messages.scheduler_output import BlockIds
from penstock.utils.wire import Codec, register_kind

VERSION = 5
MAX_MESSAGE_BYTES = 32 << 20

_MAX_NAME = 16 << 10
"""Names of requests are kept while a reader waits, so they are limited: most come from clients, in a header."""
_Text = Annotated[str, msgspec.Meta(max_length=_MAX_NAME)]


class Shard(msgspec.Struct, frozen=True):
    """One rank of an engine: its memory, and the descriptor of its transport's endpoint."""

    shard: ShardId
    layout: KVLayout
    descriptor: bytes


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """`meaning` names everything that must be equal for KV to mean the same. A restart changes the `epoch`."""

    version: int
    engine_id: str
    epoch: str
    meaning: dict[str, str]
    transport: str
    shards: tuple[Shard, ...]


class Fetch(msgspec.Struct, frozen=True, kw_only=True):
    """Requests the KV of tokens [first, end) of a prompt, for all ranks of D. An empty range means that none is needed.

    The prompt's request is identified by `ticket`, or by `rendezvous`, a name that the proxy gave to both engines.
    """

    transfer_id: TransferId
    first: int
    end: int
    prompt_digest: Annotated[bytes, msgspec.Meta(max_length=64)]
    ticket: _Text = ""
    rendezvous: _Text = ""

    def __post_init__(self) -> None:
        name = self.transfer_id
        if max(len(name.request), len(name.epoch), len(name.child)) > _MAX_NAME:
            raise ValueError(f"the name of a transfer has more than {_MAX_NAME} characters")


class ShardDigests(msgspec.Struct, frozen=True):
    """Digests of what rank `consumer` of D gets from rank `producer` of P: per group, one for every unit of tokens.

    An empty digest stands for a unit that P does not have.
    """

    producer: ShardId
    consumer: ShardId
    digests: tuple[tuple[bytes, ...], ...]


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """The blocks do not change for `lease` seconds. Without `digests` nothing is compared."""

    transfer_id: TransferId
    lease: float
    block_ids: BlockIds
    digests: tuple[ShardDigests, ...] = ()


class Reason(enum.StrEnum):
    OTHER_MODEL = "other_model"
    OTHER_VERSION = "other_version"
    OTHER_TRANSPORT = "other_transport"
    OTHER_ENGINE = "other_engine"
    INVALID_TICKET = "invalid_ticket"
    OTHER_PROMPT = "other_prompt"
    UNKNOWN_REQUEST = "unknown_request"
    PREFILL_FAILED = "prefill_failed"
    OVERLOADED = "overloaded"
    INVALID_RANGE = "invalid_range"


class Refuse(msgspec.Struct, frozen=True):
    """`transfer_id` is None if the whole session is refused."""

    transfer_id: TransferId | None
    reason: Reason
    detail: str


class Renew(msgspec.Struct, frozen=True):
    transfer_id: TransferId


class Done(msgspec.Struct, frozen=True):
    transfer_id: TransferId


class DoneAck(msgspec.Struct, frozen=True):
    transfer_id: TransferId
    is_valid: bool


class Abort(msgspec.Struct, frozen=True):
    transfer_id: TransferId


class Bye(msgspec.Struct, frozen=True):
    reason: str = ""


Message = Hello | Fetch | Grant | Refuse | Renew | Done | DoneAck | Abort | Bye

CODEC = Codec(Hello, Fetch, Grant, Refuse, Renew, Done, DoneAck, Abort, Bye)


class DigestJob(msgspec.Struct, frozen=True, kw_only=True):
    """Requests digests of what engine `peer` gets of tokens [first, end) of own blocks, the request's block tables.

    `peer` is empty for an engine with the same ranks as this one.
    """

    job_id: TransferId
    peer: str
    block_ids: BlockIds
    first: int
    end: int


class ReadJob(msgspec.Struct, frozen=True, kw_only=True):
    """Reads tokens [first, end) from the blocks of engine `peer` into own ones."""

    job_id: TransferId
    peer: str
    block_ids: BlockIds
    remote_block_ids: BlockIds
    first: int
    end: int
    digests: tuple[ShardDigests, ...]


class PeerShards(msgspec.Struct, frozen=True):
    """All ranks of an engine. Sent to the workers once, before the first job that names it."""

    peer: str
    shards: tuple[Shard, ...]


@register_kind
class P2PMetadata(KVConnectorMetadata, msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """`own` are the ranks of this engine, sent once. `cancelled` reads end as soon as nothing of them moves any more;
    `dropped` digests are not needed any more, and are not reported.

    With `has_time` nothing is computed during the step, so that digests, and waiting for transfers, delay no token.
    """

    own: tuple[Shard, ...] = ()
    peers: tuple[PeerShards, ...] = ()
    forgotten: tuple[str, ...] = ()
    digests: tuple[DigestJob, ...] = ()
    reads: tuple[ReadJob, ...] = ()
    cancelled: tuple[TransferId, ...] = ()
    dropped: tuple[TransferId, ...] = ()
    has_time: bool = False


@register_kind
class P2PHandshake(HandshakePayload, msgspec.Struct, frozen=True, tag=True):
    """A rank's description of itself for its own core."""

    layout: KVLayout
    descriptor: bytes


@register_kind
class P2PSetup(ConnectorSetup, msgspec.Struct, frozen=True, tag=True):
    """The parameters of a rank's transport. `key` authenticates peers; `agent` is for transports over a library."""

    transport: str
    host: str
    key: bytes
    agent: AgentSettings | None = None

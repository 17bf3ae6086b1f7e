"""The optional abilities of a connector's scheduler part, resolved once when the engine is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from penstock.kv_transfer.connector import SchedulerConnector
from penstock.kv_transfer.null import NullSchedulerConnector
from penstock.messages.kv_events import KVEvent
from penstock.messages.kv_transfer import ConnectorSetup, HandshakePayload, ShardId


class Abilities:
    """Each ability as a function, with what stands in for it where the part lacks it."""

    def __init__(self, part: SchedulerConnector) -> None:
        refuse = NullSchedulerConnector().set_xfer_handshake_metadata_pp_aware
        self.worker_setup: Callable[[], ConnectorSetup | None] = getattr(part, "worker_setup", lambda: None)
        self.set_xfer_handshake_metadata_pp_aware: Callable[[Mapping[ShardId, HandshakePayload | None]], None] = (
            getattr(part, "set_xfer_handshake_metadata_pp_aware", refuse)
        )
        self.wait: Callable[[float], None] = getattr(part, "wait", lambda seconds: None)
        self.take_events: Callable[[], Sequence[KVEvent]] = getattr(part, "take_events", tuple)
        self.counters: Callable[[], Mapping[str, float]] = getattr(part, "counters", dict)
        self.reset_cache: Callable[[], bool] = getattr(part, "reset_cache", lambda: True)

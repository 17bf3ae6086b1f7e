"""What a connector's scheduler part may be able to do beyond its protocol: it is, if it has the method of that name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from penstock.kv_transfer.connector import SchedulerConnector
from penstock.kv_transfer.null import set_handshakes_of_one_stage
from penstock.messages.kv_events import KVEvent
from penstock.messages.kv_transfer import ConnectorSetup, HandshakePayload, ShardId


class Abilities:
    """Each ability as a function, with what stands in for it where the part lacks it. Resolved once."""

    worker_setup: Callable[[], ConnectorSetup | None]
    """What the workers' parts are told before they are built."""
    set_xfer_handshake_metadata_pp_aware: Callable[[Mapping[ShardId, HandshakePayload | None]], None]
    """Takes the payloads of all ranks, pp * tp of them, exactly once and before the first request. Raises ConfigError
    where there are pipeline ranks above 0 and the part does not know how to move their KV."""
    takes_waker: bool
    """Whether threads of the part may give it work while the engine is idle: it has `set_waker`, unless it says no."""
    set_waker: Callable[[Callable[[], None]], None]
    """Takes, once and before the first request, what the part calls whenever `has_pending_work` may have become True.
    It may be called from any thread and at any time; it never blocks, and many calls cost no more than one. An engine
    without requests takes no step unless it is called: a part that only waits, as for a peer that will fetch blocks,
    has no pending work."""
    wait: Callable[[float], None]
    """Returns as soon as the part has news, at the latest after so many seconds. Called between steps that can compute
    nothing, while requests wait for KV or transfers are under way; it must also see news that came before the call, and
    it returns at once where no news can come. Without it such steps follow one another without a pause."""
    take_events: Callable[[], Sequence[KVEvent]]
    """Which blocks its media have come to hold and have lost since the last call, oldest first."""
    counters: Callable[[], Mapping[str, float]]
    """Names to numbers."""
    reset_cache: Callable[[], bool]
    """False when it cannot forget, or not now."""

    def __init__(self, part: SchedulerConnector) -> None:
        self.worker_setup = getattr(part, "worker_setup", lambda: None)
        one_stage = partial(set_handshakes_of_one_stage, part)
        self.set_xfer_handshake_metadata_pp_aware = getattr(part, "set_xfer_handshake_metadata_pp_aware", one_stage)
        self.takes_waker = getattr(part, "takes_waker", hasattr(part, "set_waker"))
        self.set_waker = getattr(part, "set_waker", lambda waker: None)
        self.wait = getattr(part, "wait", lambda seconds: None)
        self.take_events = getattr(part, "take_events", tuple)
        self.counters = getattr(part, "counters", dict)
        self.reset_cache = getattr(part, "reset_cache", lambda: False)

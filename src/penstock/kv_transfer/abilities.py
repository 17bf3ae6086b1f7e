"""Optional abilities of a connector's scheduler part: it has an ability if it has the method of that name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from penstock.kv_transfer.connector import SchedulerConnector
from penstock.kv_transfer.null import set_handshakes_of_one_stage
from penstock.messages.kv_events import KVEvent
from penstock.messages.kv_transfer import ConnectorSetup, HandshakePayload, ShardId


class Abilities:
    """Provides each ability as a function, with a default if the part lacks it. Resolves them once."""

    worker_setup: Callable[[], ConnectorSetup | None]
    """Returns the data that the workers' parts are built with."""
    set_xfer_handshake_metadata_pp_aware: Callable[[Mapping[ShardId, HandshakePayload | None]], None]
    """Takes the payloads of all ranks, pp * tp of them, exactly once and before the first request. Raises ConfigError
    if there are pipeline ranks above 0 and the part cannot move their KV."""
    takes_waker: bool
    """Whether threads of the part may give it work while the engine is idle: by default, whether it has `set_waker`."""
    set_waker: Callable[[Callable[[], None]], None]
    """Takes, once and before the first request, the function that the part calls whenever `has_pending_work` may have
    become True. It may be called from any thread and at any time; it never blocks, and repeated calls are merged. An
    engine without requests takes no step unless it is called: a part that only waits, as for a peer that will fetch
    blocks, has no pending work."""
    wait: Callable[[float], None]
    """Returns as soon as the part has an event, at the latest after this many seconds. Called between steps that cannot
    compute, while requests wait for KV or transfers are in flight; it must also notice events before the call, and it
    returns at once if no event can occur. Without it such steps follow one another without a pause."""
    take_events: Callable[[], Sequence[KVEvent]]
    """Returns which blocks its media have stored and removed since the last call, oldest first."""
    counters: Callable[[], Mapping[str, float]]
    """Returns counters by name."""
    reset_cache: Callable[[], bool]
    """Returns False if the cache cannot be cleared, or not now."""

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

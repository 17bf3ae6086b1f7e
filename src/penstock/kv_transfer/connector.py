"""The two protocols of a KV connector.

A connector is built as two parts that exchange only data: the scheduler's part decides, in the engine core's thread;
the workers' parts move bytes, one per rank, in the worker's thread. Messages to the workers travel with the step's plan
(`KVConnectorMetadata`), and messages from them with the step's result (`KVConnectorOutput`); both for every step, with
tokens or without.

Failure: a part never raises for external errors (a lost file, a full disk, bytes that do not match their digest): it
reports the transfer as failed, and the scheduler recomputes or fails the request. An exception from a part is a bug. If
`on_new_request`, `get_num_new_matched_tokens` or `update_state_after_alloc` raises it, the one request that was passed
ends with an error; from any other method it ends the engine.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.kv_transfer.view import KVCacheView
from penstock.messages.kv_events import KVEvent
from penstock.messages.kv_transfer import (
    BadRange,
    ConnectorSetup,
    HandshakePayload,
    KVConnectorMetadata,
    KVConnectorOutput,
    ShardId,
    TransferId,
)
from penstock.messages.outputs import FinishReason
from penstock.messages.scheduler_output import BlockIds, BlockTable, SchedulerOutput
from penstock.utils.layer_hooks import LayerHooks


class RequestView(Protocol):
    """The part of a request that a connector may read; it belongs to the scheduler."""

    @property
    def request_id(self) -> str: ...
    @property
    def hold_id(self) -> TransferId:
        """The name under which `request_finished` holds its blocks; unlike the request id, it is never reused."""
        ...

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """One hash per block whose tokens are known, chained from the start of the prompt (`core.block_hash`)."""
        ...

    @property
    def num_tokens(self) -> int: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def prompt_token_ids(self) -> Sequence[int]: ...
    @property
    def kv_scope(self) -> bytes:
        """The salt and the adapter, which `block_hashes` include: only requests with equal ones share KV."""
        ...

    @property
    def kv_transfer_params(self) -> Mapping[str, Any]:
        """The request's parameters for connectors, limited in size but not yet validated. A connector reads the keys it
        knows and ignores all others: routers send the same parameters to every connector.
        """
        ...


@dataclass(frozen=True, slots=True)
class Match:
    """The number of tokens that a connector can load beyond those that the engine has.

    `is_async`: the request waits while they are loaded; otherwise they are loaded in the step that first computes the
    tokens after them. `is_pending`: the connector cannot tell yet and will be asked again.
    """

    num_tokens: int = 0
    is_async: bool = False
    is_pending: bool = False


NO_MATCH = Match()
PENDING = Match(is_pending=True)


@dataclass(frozen=True, slots=True)
class LoadEnded:
    """The load has ended on every shard. Its KV is in place except `bad_ranges`; `reason` is the cause, if known."""

    transfer_id: TransferId
    bad_ranges: tuple[BadRange, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Released:
    """The blocks that `request_finished` held under this name, the request's `hold_id`, are no longer read."""

    transfer_id: TransferId


ConnectorEvent = LoadEnded | Released


class FinishAction(enum.Enum):
    """The fate of a finished request's blocks. HOLD keeps them until `Released(request.hold_id)`."""

    FREE = "free"
    HOLD = "hold"


@dataclass(frozen=True, slots=True)
class FinishResult:
    """The fate of a finished request's blocks, and the parameters in its response for the next engine.

    `kv_transfer_params` goes to the client with the response: plain JSON values, and no secrets.
    """

    action: FinishAction
    kv_transfer_params: Mapping[str, Any] | None = None


FREED = FinishResult(FinishAction.FREE)
"""The blocks are freed, and the response has no parameters."""


class SchedulerConnector(Protocol):
    """The scheduler's part. Lifecycle: built with the engine; the methods below in the scheduler's order; `shutdown`.

    Everything is bounded and no method blocks: work that waits for a disk or a peer runs in a separate thread.
    `NullSchedulerConnector`, the base class of all parts, has the defaults.
    """

    # ---- Start ----

    def worker_setup(self) -> ConnectorSetup | None:
        """Returns the data that the workers' parts are built with; by default none."""
        ...

    def set_xfer_handshake_metadata_pp_aware(self, payloads: Mapping[ShardId, HandshakePayload | None]) -> None:
        """Takes the payloads of all ranks, pp * tp of them, exactly once and before the first request. Raises
        ConfigError if there are pipeline ranks above 0 and the part cannot move their KV, as by default.
        """
        ...

    @property
    def takes_waker(self) -> bool:
        """Returns whether threads of the part may give it work while the engine is idle: whether it has a `set_waker`
        of its own.
        """
        ...

    def set_waker(self, callback: Callable[[], None]) -> None:
        """Takes, once and before the first request, the function that the part calls whenever `has_pending_work` may
        have become True. It may be called from any thread and at any time; it never blocks, and repeated calls are
        merged. An engine without requests takes no step unless it is called: a part that only waits, as for a peer that
        will fetch blocks, has no pending work.
        """
        ...

    # ---- Requests and steps ----

    def on_new_request(self, request: RequestView) -> None:
        """Called before a request is queued. Chooses its policy; raises RequestError if its parameters are invalid.

        A request for which it raises is not mentioned again.
        """
        ...

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> Match:
        """Returns what could be loaded after the first `num_computed_tokens` tokens, which the engine has.

        Pure: it may be called many times. The last prompt token is never loaded; a full block is the unit.
        """
        ...

    def update_state_after_alloc(
        self, request: RequestView, transfer_id: TransferId, block_ids: BlockIds, num_computed_tokens: int, end: int
    ) -> None:
        """Starts the load of tokens [num_computed_tokens, end): exactly once per load, and it must end in an event.

        `block_ids[group]` is the request's block table from its first token on, the null block where the group needs no
        KV; from here until the event the other blocks after `num_computed_tokens` belong to the transfer.

        If it raises, the load has not begun: `request_finished` follows at once, and from then on nothing may be
        written into the blocks. An event for the transfer is ignored.
        """
        ...

    def cancel_load(self, request: RequestView) -> None:
        """Called when the request no longer waits for the load that has begun: it has ended, or waited too long. The
        load still ends in an event, when nothing is written into its blocks any more: soon, if it can be cancelled.
        Also called for a request whose match was pending for too long, and which therefore loads nothing.
        """
        ...

    def on_blocks_complete(self, request: RequestView, block_ids: BlockTable, first: int, end: int) -> None:
        """Reports that blocks [first, end) of the request's table hold final KV of final tokens in all layers.

        Blocks before `first` were reported earlier or found in the engine's cache. Of recurrent layers, the table has
        only the states that other requests may begin with; the last one becomes one of them at the request's end, so
        that its block is reported again then. The table is valid during the call only. Reads that the next step's
        metadata requests happen before that step writes anything. The layers include a speculator's.
        """
        ...

    def build_connector_meta(self, plan: SchedulerOutput) -> KVConnectorMetadata | None:
        """Returns the workers' tasks for this step. Called exactly once for every plan, also an empty one."""
        ...

    def poll(self) -> Sequence[ConnectorEvent]:
        """Returns the transfers that have ended since the last call, and for whose end no report of the workers is
        needed, such as those that a peer ends. Called before every plan, so that no step is needed to notice them.
        """
        ...

    def update_connector_output(self, output: KVConnectorOutput) -> Sequence[ConnectorEvent]:
        """Applies the reports of all ranks. Duplicate, late and unknown reports are counted, and are never an error."""
        ...

    def request_finished(self, request: RequestView, block_ids: BlockIds, reason: FinishReason) -> FinishResult:
        """Called exactly once per request, however it ended, before its blocks are freed.

        `block_ids` is empty for a request that has none, such as one that ends in the queue. `reason` is ERROR also for
        a request that another connector refused after this one's `on_new_request`.
        """
        ...

    @property
    def has_pending_work(self) -> bool:
        """Returns whether transfers need steps now, even without tokens.

        While it is True, the engine executes step after step. Blocks that are merely held for a peer need none. A
        change to True while the engine is idle is noticed through `set_waker`.
        """
        ...

    def wait(self, seconds: float) -> None:
        """Returns as soon as the part has an event, at the latest after this many seconds. Called between steps that
        cannot compute, while requests wait for KV or transfers are in flight; it must also notice events before the
        call, and it returns at once if no event can occur. By default such steps follow one another without a pause.
        """
        ...

    # ---- Media ----

    def take_events(self) -> Sequence[KVEvent]:
        """Returns which blocks its media have stored and removed since the last call, oldest first; by default none."""
        ...

    def reset_cache(self) -> bool:
        """Returns False if the cache cannot be cleared, or not now: by default there is none."""
        ...

    def counters(self) -> Mapping[str, float]:
        """Returns counters by name, for metrics; by default none."""
        ...

    def check_integrity(self) -> None:
        """Recomputes derived state; raises AssertionError if it is inconsistent."""
        ...

    def shutdown(self) -> None: ...


class WorkerConnector(Protocol):
    """A worker's part. Lifecycle: `register_kv_caches` once, then `get_handshake_metadata`; then for every step
    `begin_step`, `start_load_kv` (after the layer hooks if nothing is loaded synchronously), the layer hooks,
    `get_finished`, `wait_for_save`, `end_step`; `shutdown`. A step that fails ends early with `end_step`.
    """

    @property
    def needs_shared_memory(self) -> bool:
        """Whether other processes must be able to map the KV cache: its regions then have a `path`. It is read before
        `register_kv_caches`; a device whose memory has no path raises ConfigError.
        """
        ...

    @property
    def layer_hooks(self) -> LayerHooks | None:
        """The hooks to call around every layer, which exclude CUDA graphs of whole steps; None if there are none."""
        ...

    def register_kv_caches(self, view: KVCacheView) -> None: ...

    def get_handshake_metadata(self) -> HandshakePayload | None: ...

    def begin_step(self, metadata: KVConnectorMetadata | None) -> None:
        """Called before the step writes anything: binds the metadata, and completes or orders all reads of blocks that
        the step may overwrite.
        """
        ...

    def start_load_kv(self) -> None:
        """Called before the forward pass if the metadata has synchronous loads, else after its launch."""
        ...

    def get_finished(self, finished_request_ids: frozenset[str]) -> KVConnectorOutput:
        """Returns ended transfers, including saves of the previous step: each transfer exactly once per rank."""
        ...

    def wait_for_save(self) -> None:
        """Called after the last kernel of the step that writes KV, including the speculator's."""
        ...

    def end_step(self) -> None:
        """Drops the metadata."""
        ...

    def shutdown(self) -> None: ...

"""The two protocols of a KV connector, and the parts that stand in where there is none.

A connector is built as two parts that meet only in data: the scheduler's part decides, in the engine core's thread; the
workers' parts move bytes, one per rank, in the worker's thread. What the first tells the second rides with the step's
plan (`KVConnectorMetadata`), and what the second tells the first comes back with the step's result
(`KVConnectorOutput`); both for every step, with tokens or without.

Failure: a part never raises for what the world does (a lost file, a full disk, bytes that do not match their digest):
it reports the transfer as failed, and the scheduler recomputes or fails the request. An exception out of a part is a
bug and ends the engine.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.kv_transfer.view import KVCacheView
from penstock.messages.kv_transfer import (
    BadRange,
    HandshakePayload,
    KVConnectorMetadata,
    KVConnectorOutput,
    TransferId,
)
from penstock.messages.outputs import FinishReason
from penstock.messages.scheduler_output import BlockIds, BlockTable, SchedulerOutput


class RequestView(Protocol):
    """What a connector may read of a request; it belongs to the scheduler."""

    @property
    def request_id(self) -> str: ...
    @property
    def hold_id(self) -> TransferId:
        """Names what `request_finished` holds of it. Clients give a request id again; this comes only once."""
        ...

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """One per block whose tokens are known, chained from the start of the prompt (`core.block_hash`)."""
        ...

    @property
    def num_tokens(self) -> int: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def prompt_token_ids(self) -> Sequence[int]: ...
    @property
    def cache_salt(self) -> str | None:
        """KV is shared only between requests of one salt; `block_hashes` cover it."""
        ...

    @property
    def kv_transfer_params(self) -> Mapping[str, Any]:
        """What the request itself says to connectors, bounded but not validated yet. A connector reads the keys that it
        knows and leaves all others alone: routers send the same parameters to every connector."""
        ...


@dataclass(frozen=True, slots=True)
class Match:
    """How many tokens a connector can bring beyond those that the engine has.

    `is_async`: the request waits while they come; otherwise they are loaded in the step that first computes behind
    them. `is_pending`: the connector cannot tell yet and will be asked again.
    """

    num_tokens: int = 0
    is_async: bool = False
    is_pending: bool = False


NO_MATCH = Match()
PENDING = Match(is_pending=True)


@dataclass(frozen=True, slots=True)
class LoadEnded:
    """The load has ended on every shard. Its KV is in place but for `bad_ranges`; `reason` says why, if it is known."""

    transfer_id: TransferId
    bad_ranges: tuple[BadRange, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Released:
    """The blocks that `request_finished` held under this name, the request's `hold_id`, are no longer read."""

    transfer_id: TransferId


ConnectorEvent = LoadEnded | Released


class FinishAction(enum.Enum):
    """What happens to a finished request's blocks. HOLD keeps them until `Released(request.hold_id)`."""

    FREE = "free"
    HOLD = "hold"


@dataclass(frozen=True, slots=True)
class FinishResult:
    """What happens to a finished request's blocks, and what its answer says to the next engine.

    `kv_transfer_params` goes to the client with the answer: plain JSON values, and nothing that is secret.
    """

    action: FinishAction
    kv_transfer_params: Mapping[str, Any] | None = None


FREED = FinishResult(FinishAction.FREE)
"""The blocks are freed, and there is nothing to say."""


class SchedulerConnector(Protocol):
    """The scheduler's part. Lifecycle: built with the engine; the methods below in the scheduler's order; `shutdown`.

    Everything is bounded and nothing blocks: what has to wait for a disk or a peer has a thread of its own.
    """

    def on_new_request(self, request: RequestView) -> None:
        """A request is about to be queued. Chooses its policy; raises RequestError when it asks for what cannot be."""
        ...

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> Match:
        """What could be loaded behind the first `num_computed_tokens` tokens, which the engine has.

        Pure: it may be called many times. The last prompt token is never loaded; a full block is the unit.
        """
        ...

    def update_state_after_alloc(
        self, request: RequestView, transfer_id: TransferId, block_ids: BlockIds, num_computed_tokens: int, end: int
    ) -> None:
        """The load of tokens [num_computed_tokens, end) begins: exactly once per load, and it must end in an event.

        `block_ids[group]` is the request's block table from its first token on, the null block where the group needs no
        KV; from here until the event the other blocks behind `num_computed_tokens` belong to the transfer.
        """
        ...

    def on_blocks_complete(self, request: RequestView, block_ids: BlockTable, first: int, end: int) -> None:
        """Blocks [first, end) of the request's table hold final KV of final tokens, a speculator's layers included.

        Blocks before `first` were reported earlier or found in the engine's cache. The table is valid during the call
        only. What the next step's metadata asks to be read is read before anything of that step is written.
        """
        ...

    def build_connector_meta(self, plan: SchedulerOutput) -> KVConnectorMetadata | None:
        """What the workers' parts shall do in this step: called exactly once for every plan, also an empty one."""
        ...

    def update_connector_output(self, output: KVConnectorOutput) -> Sequence[ConnectorEvent]:
        """Takes over the reports of all ranks. Duplicates, late ones and unknown ones are counted, never an error."""
        ...

    def request_finished(self, request: RequestView, block_ids: BlockIds, reason: FinishReason) -> FinishResult:
        """Exactly once per request, however it ended, before its blocks are freed.

        `block_ids` is empty for a request that has none, as one that ends in the queue. `reason` is ERROR also for a
        request that another connector refused behind this one's `on_new_request`.
        """
        ...

    @property
    def has_pending_work(self) -> bool:
        """Whether steps are needed now, even without tokens, for transfers to go on.

        Steps follow one another while it is True. Blocks that are merely held for a peer need none. What becomes True
        while the engine is idle is noticed through `set_waker` (`abilities`).
        """
        ...

    def check_integrity(self) -> None:
        """Recomputes derived state; AssertionError when it disagrees."""
        ...

    def shutdown(self) -> None: ...


class LayerHooks(Protocol):
    """What is called around every attention layer of the target model."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Before the layer stores and reads."""
        ...

    def save_kv_layer(self, layer_name: str) -> None:
        """When the layer has stored the step's keys and values.

        A speculator's layers, which run over the step several times, are complete at `wait_for_save`.
        """
        ...


class WorkerConnector(Protocol):
    """A worker's part. Lifecycle: `register_kv_caches` once, then `get_handshake_metadata`; then for every step
    `begin_step`, `start_load_kv` (behind the layer hooks where nothing is loaded synchronously), the layer hooks,
    `get_finished`, `wait_for_save`, `end_step`; `shutdown`. A step that fails ends early with `end_step`.
    """

    @property
    def needs_shared_memory(self) -> bool:
        """Whether other processes must be able to map the KV cache: its regions then have a `path`. It is read before
        `register_kv_caches`; a device whose memory has no path refuses it with ConfigError."""
        ...

    @property
    def layer_hooks(self) -> LayerHooks | None:
        """What it needs called around every layer, which CUDA graphs of whole steps exclude; None for nothing."""
        ...

    def register_kv_caches(self, view: KVCacheView) -> None: ...

    def get_handshake_metadata(self) -> HandshakePayload | None: ...

    def begin_step(self, metadata: KVConnectorMetadata | None) -> None:
        """Before anything of the step is written: binds the metadata, and finishes or orders all reads of blocks that
        the step may overwrite."""
        ...

    def start_load_kv(self) -> None:
        """Before the forward pass if the metadata has synchronous loads, else behind its launch."""
        ...

    def get_finished(self, finished_request_ids: frozenset[str]) -> KVConnectorOutput:
        """What has ended, saves of the step before included: each transfer exactly once per rank."""
        ...

    def wait_for_save(self) -> None:
        """Behind the last kernel of the step that writes KV, the speculator's included."""
        ...

    def end_step(self) -> None:
        """Forgets the metadata."""
        ...

    def shutdown(self) -> None: ...

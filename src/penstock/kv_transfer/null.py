"""The connector parts of an engine whose KV never leaves it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from penstock.kv_transfer.connector import FREED, NO_MATCH, ConnectorEvent, FinishResult, Match, RequestView
from penstock.kv_transfer.view import KVCacheView
from penstock.messages.kv_events import KVEvent
from penstock.messages.kv_transfer import (
    NO_OUTPUT,
    ConnectorSetup,
    HandshakePayload,
    KVConnectorMetadata,
    KVConnectorOutput,
    ShardId,
    TransferId,
)
from penstock.messages.outputs import FinishReason
from penstock.messages.scheduler_output import BlockIds, BlockTable, SchedulerOutput
from penstock.utils.errors import ConfigError
from penstock.utils.layer_hooks import LayerHooks


class NullSchedulerConnector:
    """Moves nothing. Also the base class of parts that do not use every method."""

    has_pending_work = False

    def worker_setup(self) -> ConnectorSetup | None:
        return None

    def set_xfer_handshake_metadata_pp_aware(self, payloads: Mapping[ShardId, HandshakePayload | None]) -> None:
        """Passes the payloads on by tensor rank. Raises ConfigError if there are pipeline ranks above 0."""
        if any(pp_rank > 0 for pp_rank, _ in payloads):
            raise ConfigError(f"{type(self).__name__} does not support pipeline ranks: set pipeline_parallel_size to 1")
        self.set_xfer_handshake_metadata({tp_rank: payload for (_, tp_rank), payload in payloads.items()})

    def set_xfer_handshake_metadata(self, payloads: Mapping[int, HandshakePayload | None]) -> None:
        """Takes the payloads of an engine without pipeline stages, by tensor rank."""

    @property
    def takes_waker(self) -> bool:
        return type(self).set_waker is not NullSchedulerConnector.set_waker

    def set_waker(self, callback: Callable[[], None]) -> None: ...

    def on_new_request(self, request: RequestView) -> None: ...

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> Match:
        return NO_MATCH

    def update_state_after_alloc(
        self, request: RequestView, transfer_id: TransferId, block_ids: BlockIds, num_computed_tokens: int, end: int
    ) -> None:
        raise AssertionError("a load without a match")

    def cancel_load(self, request: RequestView) -> None: ...

    def on_blocks_complete(self, request: RequestView, block_ids: BlockTable, first: int, end: int) -> None: ...

    def build_connector_meta(self, plan: SchedulerOutput) -> KVConnectorMetadata | None:
        return None

    def poll(self) -> Sequence[ConnectorEvent]:
        return ()

    def update_connector_output(self, output: KVConnectorOutput) -> Sequence[ConnectorEvent]:
        return ()

    def request_finished(self, request: RequestView, block_ids: BlockIds, reason: FinishReason) -> FinishResult:
        return FREED

    def wait(self, seconds: float) -> None: ...

    def take_events(self) -> Sequence[KVEvent]:
        return ()

    def reset_cache(self) -> bool:
        return False

    def counters(self) -> Mapping[str, float]:
        return {}

    def check_integrity(self) -> None: ...

    def shutdown(self) -> None: ...


class NullWorkerConnector:
    """Moves nothing. Also the base class of parts that do not use every method."""

    needs_shared_memory = False
    layer_hooks: LayerHooks | None = None

    def register_kv_caches(self, view: KVCacheView) -> None: ...

    def get_handshake_metadata(self) -> HandshakePayload | None:
        return None

    def begin_step(self, metadata: KVConnectorMetadata | None) -> None: ...

    def start_load_kv(self) -> None: ...

    def get_finished(self, finished_request_ids: frozenset[str]) -> KVConnectorOutput:
        return NO_OUTPUT

    def wait_for_save(self) -> None: ...

    def end_step(self) -> None: ...

    def shutdown(self) -> None: ...

"""The parts of an engine whose KV stays where it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.kv_transfer.connector import NO_MATCH, ConnectorEvent, FinishAction, Match, RequestView
from penstock.kv_transfer.view import KVCacheView
from penstock.messages.kv_events import KVEvent
from penstock.messages.kv_transfer import (
    NO_OUTPUT,
    HandshakePayload,
    KVConnectorMetadata,
    KVConnectorOutput,
    ShardId,
    TransferId,
)
from penstock.messages.scheduler_output import BlockIds, SchedulerOutput


class NullSchedulerConnector:
    """Moves nothing. Also the base of parts that have no use for every method."""

    has_pending_work = False

    def on_new_request(self, request: RequestView) -> None: ...

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> Match:
        return NO_MATCH

    def update_state_after_alloc(
        self, request: RequestView, transfer_id: TransferId, block_ids: BlockIds, num_computed_tokens: int, end: int
    ) -> None:
        raise AssertionError("a load without a match")

    def on_blocks_complete(self, request: RequestView, block_ids: BlockIds, first: int, end: int) -> None: ...

    def build_connector_meta(self, plan: SchedulerOutput) -> KVConnectorMetadata | None:
        return None

    def update_connector_output(self, output: KVConnectorOutput) -> Sequence[ConnectorEvent]:
        return ()

    def request_finished(self, request: RequestView, block_ids: BlockIds) -> FinishAction:
        return FinishAction.FREE

    def set_xfer_handshake_metadata_pp_aware(self, payloads: Mapping[ShardId, HandshakePayload | None]) -> None: ...

    def wait(self, seconds: float) -> None: ...

    def take_events(self) -> Sequence[KVEvent]:
        return ()

    def counters(self) -> Mapping[str, float]:
        return {}

    def reset_cache(self) -> bool:
        return True

    def check_integrity(self) -> None: ...

    def shutdown(self) -> None: ...


class NullWorkerConnector:
    """Moves nothing. Also the base of parts that have no use for every method."""

    layerwise = False

    def register_kv_caches(self, view: KVCacheView) -> None: ...

    def get_handshake_metadata(self) -> HandshakePayload | None:
        return None

    def begin_step(self, metadata: KVConnectorMetadata | None) -> None: ...

    def start_load_kv(self) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str) -> None: ...

    def get_finished(self, finished_request_ids: frozenset[str]) -> KVConnectorOutput:
        return NO_OUTPUT

    def wait_for_save(self) -> None: ...

    def end_step(self) -> None: ...

    def shutdown(self) -> None: ...

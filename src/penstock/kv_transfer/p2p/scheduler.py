"""The scheduler side of the `P2PConnector`: the parameters of requests and of their responses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.kv_transfer.connector import (
    FREED,
    NO_MATCH,
    ConnectorEvent,
    FinishAction,
    FinishResult,
    Match,
    RequestView,
)
from penstock.kv_transfer.null import NullSchedulerConnector
from penstock.kv_transfer.p2p.exchange import Exchange, P2PSettings
from penstock.kv_transfer.p2p.messages import P2PMetadata, P2PSetup
from penstock.kv_transfer.p2p.params import RemoteDecode, RemotePrefill, read_params
from penstock.kv_transfer.p2p.producer import Offer
from penstock.kv_transfer.p2p.ticket import digest_prompt
from penstock.messages.kv_transfer import HandshakePayload, KVConnectorOutput, ShardId, TransferId
from penstock.messages.outputs import FinishReason
from penstock.messages.scheduler_output import BlockIds, BlockTable, SchedulerOutput
from penstock.utils.errors import RequestError

_HELD = (FinishReason.LENGTH, FinishReason.STOP)


@dataclass(slots=True)
class _Prefill:
    """A prompt that another engine will read. Up to `num_digested` tokens, digests have been requested; `tables` are
    the block tables, by KV group."""

    hold_id: TransferId
    num_prompt_tokens: int
    num_digested: int = 0
    tables: list[list[int]] = field(default_factory=list[list[int]])


class P2PScheduler(NullSchedulerConnector):
    """Blocks are digested by the step that completes them, so that a reader does not wait for the next one. With
    `digests_next_step` they are digested by the next one: if a step's KV may be incomplete when its results are
    collected, as that of a drafter, or of a device that computes later.
    """

    def __init__(
        self, settings: P2PSettings, block_size: int, exchange: Exchange, *, digests_next_step: bool = False
    ) -> None:
        self._settings = settings
        self._block_size = block_size
        self._exchange = exchange
        self._digests_next_step = digests_next_step
        self._remote: dict[str, TransferId] = {}  # requests whose prompt another engine computes
        self._prefills: dict[str, _Prefill] = {}
        self._num_stages = self._num_tensor_ranks = 1

    # ---- Start and end ----

    def worker_setup(self) -> P2PSetup:
        return self._settings.setup

    def set_xfer_handshake_metadata_pp_aware(self, payloads: Mapping[ShardId, HandshakePayload | None]) -> None:
        self._exchange.introduce_as(payloads)
        self._num_stages = 1 + max(pp for pp, _ in payloads)
        self._num_tensor_ranks = 1 + max(tp for _, tp in payloads)

    def set_waker(self, callback: Callable[[], None]) -> None:
        self._exchange.set_waker(callback)

    def shutdown(self) -> None:
        self._exchange.shutdown()

    # ---- New requests ----

    def on_new_request(self, request: RequestView) -> None:
        asked, role = read_params(request.kv_transfer_params), self._settings.role
        match asked:
            case RemoteDecode(rendezvous):
                if role == "kv_consumer":
                    raise RequestError("this engine has kv_role kv_consumer: send do_remote_decode to a kv_producer")
                self._exchange.expect(request.hold_id, rendezvous)
                self._prefills[request.request_id] = _Prefill(request.hold_id, request.num_prompt_tokens)
            case RemotePrefill():
                if role == "kv_producer":
                    raise RequestError("this engine has kv_role kv_producer: send do_remote_prefill to a kv_consumer")
                # The other engine may have computed the beginning of the prompt alone.
                digest = digest_prompt(request.prompt_token_ids[: asked.num_tokens], request.kv_scope)
                self._remote[request.request_id] = request.hold_id
                self._exchange.want(request.hold_id, asked, digest)
            case None:
                pass

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> Match:
        source = self._exchange.wanted(request.hold_id) if request.request_id in self._remote else None
        if source is None:
            return NO_MATCH
        # The other engine has whole blocks of the prompt, whose last token is computed here.
        num_tokens, size = request.num_prompt_tokens, self._block_size
        if source.num_tokens is not None:
            num_tokens = min(num_tokens, source.num_tokens)
        num_tokens = max(0, num_tokens - 1) // size * size - num_computed_tokens
        return Match(num_tokens, is_async=True) if num_tokens > 0 else NO_MATCH

    def update_state_after_alloc(
        self, request: RequestView, transfer_id: TransferId, block_ids: BlockIds, num_computed_tokens: int, end: int
    ) -> None:
        self._exchange.begin_load(request.hold_id, transfer_id, block_ids, num_computed_tokens, end)

    def cancel_load(self, request: RequestView) -> None:
        self._exchange.cancel(request.hold_id)

    # ---- Finished requests ----

    def request_finished(self, request: RequestView, block_ids: BlockIds, reason: FinishReason) -> FinishResult:
        if self._remote.pop(request.request_id, None) is not None:
            self._exchange.cancel(request.hold_id)
        if self._prefills.pop(request.request_id, None) is None:
            return FREED
        if reason not in _HELD or not block_ids:
            self._exchange.withdraw(request.hold_id)
            return FREED
        params = self._hold(request, block_ids)
        return FREED if params is None else FinishResult(FinishAction.HOLD, params)

    def _hold(self, request: RequestView, block_ids: BlockIds) -> dict[str, object] | None:
        """Holds the blocks for another engine. Returns the parameters of the response, None if there is no room."""
        ticket = self._exchange.offer(
            Offer(
                hold_id=request.hold_id,
                prompt_digest=digest_prompt(request.prompt_token_ids, request.kv_scope),
                num_tokens=request.num_prompt_tokens,
                block_ids=block_ids,
            )
        )
        if not ticket:
            return None
        host, port = self._exchange.address
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._settings.engine_id,
            "remote_request_id": request.request_id,
            "remote_block_ids": [],  # this engine looks them up itself
            "remote_host": host,
            "remote_port": port,
            "pp_size": self._num_stages,
            "tp_size": self._num_tensor_ranks,
            "remote_num_tokens": request.num_prompt_tokens,
            "ticket": ticket,
        }

    # ---- Steps ----

    def on_blocks_complete(self, request: RequestView, block_ids: BlockTable, first: int, end: int) -> None:
        prefill = self._prefills.get(request.request_id)
        if prefill is not None and self._digests_next_step:
            self._digest(prefill, block_ids, end * self._block_size)

    def build_connector_meta(self, plan: SchedulerOutput) -> P2PMetadata:
        if self._prefills:
            self._follow(plan)
        for new in plan.new_requests:
            if (name := self._remote.pop(new.request_id, None)) is not None:
                self._exchange.cancel(name)
        return self._exchange.take_metadata(computes=bool(plan.total_num_scheduled_tokens))

    def _follow(self, plan: SchedulerOutput) -> None:
        """Requests digests of the prompts' blocks that this step completes."""
        for new in plan.new_requests:
            if (prefill := self._prefills.get(new.request_id)) is not None:
                prefill.tables = [list(table) for table in new.block_ids]
                prefill.num_digested = new.num_computed_tokens // self._block_size * self._block_size
                self._exchange.restart(prefill.hold_id)
        counts = zip(plan.num_scheduled_tokens.items(), plan.num_computed_tokens, strict=True)
        for (request_id, num_tokens), num_computed_tokens in counts:
            if (prefill := self._prefills.get(request_id)) is None:
                continue
            for table, new_ids in zip(prefill.tables, plan.new_block_ids.get(request_id, ()), strict=False):
                table.extend(new_ids)
            if not self._digests_next_step:
                self._digest(prefill, prefill.tables, num_computed_tokens + num_tokens)

    def _digest(self, prefill: _Prefill, tables: BlockTable, end: int) -> None:
        """Requests digests of the prompt's tokens up to `end` that are in whole blocks."""
        first, end = prefill.num_digested, min(end, prefill.num_prompt_tokens) // self._block_size * self._block_size
        if first < end:
            prefill.num_digested = end
            self._exchange.on_computed(prefill.hold_id, tables, first, end)

    def poll(self) -> Sequence[ConnectorEvent]:
        return self._exchange.poll()

    def update_connector_output(self, output: KVConnectorOutput) -> Sequence[ConnectorEvent]:
        return self._exchange.apply(output)

    @property
    def has_pending_work(self) -> bool:
        return self._exchange.has_pending_work

    def wait(self, seconds: float) -> None:
        self._exchange.wait(seconds)

    def reset_cache(self) -> bool:
        """Does nothing: no KV is kept outside the engines. So a MultiConnector's tiers can be cleared beside it."""
        return True

    def counters(self) -> Mapping[str, float]:
        return self._exchange.counters()

    def check_integrity(self) -> None:
        self._exchange.check_integrity()

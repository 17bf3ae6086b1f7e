"""One engine core behind the front end, and the requests that run on it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from penstock.engine.core_messages import Ready, Refusal, Refused
from penstock.frontend.core_restarts import RestartingCore
from penstock.frontend.input_processor import ProcessedRequest
from penstock.frontend.output_processor import OutputProcessor
from penstock.messages.kv_events import MEDIUM_GPU, AllBlocksCleared, BlockRemoved, KVEvent
from penstock.messages.outputs import FinishReason, RequestOutput
from penstock.messages.stats import BlockMap, ExpertMap, SchedulerStats, StepReport
from penstock.metrics.request_log import EngineObserver, RequestLog, RequestRecord
from penstock.tokenizer.tokenizer import Tokenizer
from penstock.utils.clock import SystemClock
from penstock.utils.errors import EngineDeadError, OverloadedError, PenstockError, RequestError, RequestFailedError
from penstock.utils.held_blocks import HeldBlocks, PromptKeys
from penstock.utils.placement import load

_IDLE = SchedulerStats(0, 0, 0.0, 0, 0, 0)


class RequestStream:
    """A submitted request: iterate over its output, then always `close` it.

    The output is updated in place, so that nothing accumulates: a slow reader skips states, never tokens. Iterating
    raises EngineDeadError if the core dies, RequestError or OverloadedError if it refuses the request.
    """

    def __init__(
        self,
        output: RequestOutput,
        child_ids: Sequence[str],
        abandon: Callable[[RequestStream], None],
        load_of_child: int = 0,
    ) -> None:
        self.output = output
        self.load_of_child = load_of_child
        self.running = set(child_ids)
        self.error: PenstockError | None = None
        self._abandon = abandon
        self._changed = asyncio.Event()
        self._is_over = False

    def wake(self, error: PenstockError | None = None) -> None:
        """Called when the output has changed, or has ended with an error."""
        self.error = error or self.error
        self._changed.set()

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._is_over:
            raise StopAsyncIteration
        await self._changed.wait()
        self._changed.clear()
        self._is_over = self.error is not None or self.output.finished
        if self.error is not None:
            raise self.error
        return self.output

    def close(self) -> None:
        """Aborts the request if it has not ended. Idempotent."""
        self._is_over = True
        self._abandon(self)


class Replica:
    """An engine core and its successors, their requests, and their reports.

    The front end has one for every rank of data parallelism, with its own KV cache. Those that share experts have one
    core. Belongs to the event loop on which it was started. `died` is set when the last core will not be restarted.
    """

    def __init__(
        self,
        core: RestartingCore,
        ready: Ready,
        tokenizer: Tokenizer | None,
        observers: Sequence[EngineObserver],
        on_restart: Callable[[], None],
    ) -> None:
        """`on_restart` is called when a new core serves: its `limits` may differ."""
        self.info = ready.info
        self.limits = ready.limits
        self._dp_rank = ready.dp_rank
        self.log = RequestLog(observers)
        self.stats = _IDLE  # the scheduler's counters and gauges as of the last step or abort
        self.died = core.died
        self.idle = asyncio.Event()
        self.idle.set()
        self._has_less = asyncio.Event()
        self.last_chosen = 0  # for `Placement`
        self._core = core
        self._on_restart = on_restart
        self._outputs = OutputProcessor(tokenizer)
        self._streams: dict[str, RequestStream] = {}
        # Running engine request -> its stream.
        self._owners: dict[str, RequestStream] = {}
        # Engine request that has ended here and may still be in the core -> its load, which counts until it is gone.
        self._ended: dict[str, int] = {}
        self._load = 0
        self._held = HeldBlocks()
        self._clock = SystemClock()
        self._last_progress = self._clock.now()
        core.add_handler(self._on_message)

    async def reset_prefix_cache(self, reset_connector: bool) -> bool:
        """See `EngineCore.reset_prefix_cache`. This and the next four raise OverloadedError during a restart, and
        EngineDeadError after the last death.
        """
        return await self._core.client.reset_prefix_cache(reset_connector, self._dp_rank)

    async def forget_adapter(self, digest: bytes) -> bool:
        """See `EngineCore.forget_adapter`."""
        return await self._core.client.forget_adapter(digest, self._dp_rank)

    async def block_map(self, max_cells: int) -> BlockMap:
        """See `EngineCore.block_map`."""
        return await self._core.client.block_map(max_cells, self._dp_rank)

    async def expert_map(self) -> ExpertMap:
        """See `EngineCore.expert_map`; it is that of all engines that share experts."""
        return await self._core.client.expert_map()

    async def check_integrity(self) -> None:
        """Raises AssertionError if the engine's derived state is inconsistent."""
        await self._core.client.check_integrity(self._dp_rank)

    @property
    def death(self) -> EngineDeadError | None:
        """The reason why the engine core is dead for good; None while one serves or is being restarted."""
        return self._core.death

    @property
    def outage(self) -> EngineDeadError | None:
        """The reason why there is no engine core now; None while one serves."""
        return self._core.outage

    @property
    def num_restarts(self) -> int:
        """The number of engine cores that have replaced dead ones."""
        return self._core.num_restarts

    @property
    def num_unfinished(self) -> int:
        """The number of completions that have not ended."""
        return len(self._owners)

    @property
    def load(self) -> int:
        """The amount of work that has been submitted and has not ended (`utils.placement`)."""
        return self._load

    def num_cached(self, prompt: PromptKeys) -> int:
        """Returns how many tokens at the prompt's beginning the core has cached, as far as it reports that."""
        return self._held.num_cached(prompt)

    @property
    def seconds_without_progress(self) -> float:
        """The time since it last computed a token, while it has work; 0 otherwise."""
        return self._clock.now() - self._last_progress if self._owners or self._ended else 0.0

    def has(self, request: ProcessedRequest) -> bool:
        """Returns whether a request with this id, or with one of its completions' ids, is here."""
        is_taken = any(child.request_id in self._owners for child in request.children)
        return is_taken or request.request_id in self._streams

    async def until_gone(self, request: ProcessedRequest) -> None:
        """Waits until the core has aborted an earlier request with this id."""
        while any(child.request_id in self._ended for child in request.children):
            await self._has_less.wait()

    def submit(
        self, request: ProcessedRequest, arrived: float, trace: str | None, num_cached: int = 0
    ) -> RequestStream:
        """Submits a request to the engine core. `trace` is a W3C traceparent, `arrived` on the monotonic clock; the
        `num_cached` first tokens of its prompt do not count as work.

        Raises OverloadedError if there is no room or during a restart, and EngineDeadError after the last death.
        """
        core, limit, held = self._core.client, self.limits.max_num_queued_requests, len(self._owners)
        if held + len(request.children) > limit:
            raise OverloadedError(f"the engine already holds {held} of max_num_queued_requests={limit} requests")
        for child in request.children:
            # Before anything is recorded: a request that cannot be sent must leave nothing behind.
            core.add_request(replace(child, dp_rank=self._dp_rank) if self._dp_rank else child)
        if not self._owners and not self._ended:
            self._last_progress = arrived
        child_ids = [child.request_id for child in request.children]
        self.idle.clear()
        load_of_child = load(len(request.prompt_token_ids) - num_cached)
        stream = RequestStream(self._outputs.add_request(request), child_ids, self._abandon, load_of_child)
        self._streams[request.request_id] = stream
        for child in request.children:
            self._owners[child.request_id] = stream
            self._load += load_of_child
            self.log.add(
                RequestRecord(
                    request_id=child.request_id,
                    arrived=arrived,
                    num_prompt_tokens=len(request.prompt_token_ids),
                    n=request.params.n,
                    max_tokens=request.params.max_tokens,
                    trace=trace,
                    adapter=None if child.adapter is None else child.adapter.name,
                )
            )
        return stream

    async def shutdown(self) -> None:
        """Stops the engine core; requests that still wait for tokens raise EngineDeadError. Idempotent."""
        await self._core.shutdown()

    def _abandon(self, stream: RequestStream) -> None:
        """Forgets a request, and aborts its unfinished completions."""
        self._streams.pop(stream.output.request_id, None)
        if stream.running:
            self._core.abort_requests(self._end(stream))

    def _end(self, stream: RequestStream) -> tuple[str, ...]:
        """Ends the running completions of a request here; the core may still have them."""
        running = tuple(stream.running)
        stream.running.clear()
        for child_id in running:
            self._disown(child_id)
        reason = FinishReason.ABORT if stream.error is None else FinishReason.ERROR
        self._outputs.discard(running)
        self.log.end(running, reason, self._clock.now())
        return running

    def _disown(self, child_id: str) -> RequestStream:
        stream = self._owners.pop(child_id)
        self._ended[child_id] = stream.load_of_child
        if not self._owners:
            self.idle.set()
        return stream

    def _on_gone(self, child_ids: Iterable[str]) -> None:
        self._load -= sum(self._ended.pop(child_id, 0) for child_id in child_ids)
        self._has_less.set()  # wakes all current waiters
        self._has_less.clear()

    def _on_message(self, message: StepReport | Refused | EngineDeadError | Ready) -> None:
        match message:
            case StepReport(dp_rank=dp_rank) | Ready(dp_rank=dp_rank) if dp_rank != self._dp_rank:
                pass  # It concerns another engine of this core.
            case StepReport():
                self._on_report(message)
            case Refused(request_id):
                stream = self._owners.get(request_id)
                if stream is not None:
                    stream.wake(_error_of(message))
            case EngineDeadError():
                self.stats = _IDLE
                self._held.clear()
                # Ended requests are complete, even if their reader is slow.
                for stream in [stream for stream in self._streams.values() if stream.running]:
                    stream.wake(EngineDeadError(str(message)))
                    self._end(stream)
                self._on_gone(tuple(self._ended))
            case Ready():
                self.info, self.limits = message.info, message.limits
                self._on_restart()

    def _on_report(self, report: StepReport) -> None:
        now = self._clock.now()
        self.stats = report.stats
        for event in report.kv_events:
            self._on_kv_event(event)
        if report.num_tokens:
            self._last_progress = now
        processed = self._outputs.process(report.outputs)
        self.log.on_report(report, now)
        for request_id, reason in processed.ended:
            self._disown(request_id).running.discard(request_id)
            self.log.end((request_id,), reason, now)
        ended = {request_id for request_id, _ in processed.ended}
        self._on_gone((*ended.difference(processed.aborts), *report.aborted))
        if processed.aborts:
            self._core.abort_requests(tuple(processed.aborts))
        for output in processed.request_outputs:
            self._streams[output.request_id].wake()

    def _on_kv_event(self, event: KVEvent) -> None:
        if isinstance(event, AllBlocksCleared):
            self._held.clear()
        elif event.medium != MEDIUM_GPU:
            return
        elif isinstance(event, BlockRemoved):
            self._held.remove(event.block_hashes, event.group_idx)
        else:
            self._held.store(event)


def _error_of(refused: Refused) -> PenstockError:
    match refused.reason:
        case Refusal.INVALID:
            return RequestError(refused.message, refused.field)
        case Refusal.OVERLOADED:
            return OverloadedError(refused.message)
        case Refusal.FAILED:
            return RequestFailedError(refused.message)

"""The engine for programs with an event loop: the server's front end, and anyone's who embeds it."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from penstock.config.engine import EngineArgs, EngineConfig, resolve
from penstock.config.model_path import localise
from penstock.engine.core_messages import Ready, Refused
from penstock.frontend.core_client import CoreClient
from penstock.frontend.core_restarts import RestartingCore
from penstock.frontend.front_end import FrontEnd, build_front_end, make_grammar_checker
from penstock.frontend.input_processor import ProcessedRequest, Prompt
from penstock.frontend.output_processor import OutputProcessor
from penstock.frontend.text_work import TextWork
from penstock.messages.outputs import FinishReason, RequestOutput
from penstock.messages.sampling_params import SamplingParams
from penstock.messages.stats import BlockMap, SchedulerStats, StepReport
from penstock.metrics.request_log import EngineObserver, RequestLog, RequestRecord
from penstock.tokenizer.tokenizer import Tokenizer
from penstock.utils.clock import SystemClock
from penstock.utils.errors import EngineDeadError, OverloadedError, PenstockError, RequestError

_IDLE = SchedulerStats(0, 0, 0.0, 0, 0, 0)


class RequestStream:
    """A submitted request: iterate over its output, then `close` it, whatever has happened in between.

    The output is brought up to date in place, so that nothing piles up: a slow reader skips states, never tokens.
    Iterating raises EngineDeadError when the core goes, RequestError or OverloadedError when it refuses the request.
    """

    def __init__(
        self, output: RequestOutput, child_ids: Sequence[str], abandon: Callable[[RequestStream], None]
    ) -> None:
        self.output = output
        self.running = set(child_ids)
        self.error: PenstockError | None = None
        self._abandon = abandon
        self._changed = asyncio.Event()
        self._is_over = False

    def wake(self, error: PenstockError | None = None) -> None:
        """The output has changed, or there will be none."""
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
        """Aborts what has not ended. Idempotent."""
        self._is_over = True
        self._abandon(self)


class AsyncLLM:
    """An engine whose core runs in a process of its own; any number of `generate` at once. `died` is set when it goes.

        llm = await AsyncLLM.start("path/or/model-id", max_model_len=4096)
        async for output in llm.generate("Once upon a time", SamplingParams(max_tokens=32)):
            print(output.outputs[0].text)
        await llm.shutdown()

    With `restart_on_failure=N` a core that dies is started again, at most N times in a row; what ran on it has failed,
    and until the new one serves, `submit` raises OverloadedError. `died` is then set when no restart is left.

    The same front end serves HTTP (`penstock serve`). Belongs to the event loop on which it was started.
    """

    def __init__(
        self, core: RestartingCore, config: EngineConfig, ready: Ready, observers: Sequence[EngineObserver]
    ) -> None:
        self.config = config
        self.log = RequestLog(observers)
        self.info = ready.info
        self._core = core
        self._limits = ready.limits
        self._front_end: FrontEnd = build_front_end(config, ready.limits)
        self._outputs = OutputProcessor(self._front_end.tokenizer)
        self.text_work = TextWork()
        self._grammars = make_grammar_checker(config, self._front_end.tokenizer)
        self._streams: dict[str, RequestStream] = {}
        # Engine request -> the stream that it is a part of, while it runs.
        self._owners: dict[str, RequestStream] = {}
        self._clock = SystemClock()
        self._last_progress = self._clock.now()
        self._stats = _IDLE
        self._idle = asyncio.Event()
        self._idle.set()
        self.died = core.died
        core.set_handler(self._on_message)

    @classmethod
    async def start(
        cls,
        model: str | None = None,
        observers: Sequence[EngineObserver] = (),
        restart_on_failure: int = 0,
        **engine_args: Any,
    ) -> AsyncLLM:
        """Starts the engine core and waits until it is ready. The arguments are `LLM`'s.

        Raises ConfigError when the engine cannot be built as asked, EngineDeadError when its process breaks.
        """
        args = EngineArgs.from_kwargs(**engine_args, **({} if model is None else {"model": model}))
        args = await asyncio.to_thread(localise, args)
        core = await CoreClient.start(args)
        try:
            ready = await core.ready
            restarting = RestartingCore(args, core, restart_on_failure)
            return cls(restarting, resolve(args, ready.info.device), ready, observers)
        except BaseException:
            await core.shutdown()
            raise

    @property
    def max_model_len(self) -> int:
        """The longest prompt plus output, in tokens, that this engine takes."""
        return self._limits.max_model_len

    @property
    def death(self) -> EngineDeadError | None:
        """Why the engine core is gone for good; None while one serves or is being started again."""
        return self._core.death

    @property
    def outage(self) -> EngineDeadError | None:
        """Why there is no engine core now; None while one serves."""
        return self._core.outage

    @property
    def num_restarts(self) -> int:
        """How often an engine core has replaced one that died."""
        return self._core.num_restarts

    @property
    def num_unfinished(self) -> int:
        """Completions that have not ended."""
        return len(self._owners)

    @property
    def stats(self) -> SchedulerStats:
        """The scheduler's counters and gauges as of the last step or abort."""
        return self._stats

    @property
    def seconds_without_progress(self) -> float:
        """How long the engine has had work and computed no token; 0 while it has none."""
        return self._clock.now() - self._last_progress if self._owners else 0.0

    @property
    def has_tokenizer(self) -> bool:
        return self._front_end.tokenizer is not None

    async def wait_until_idle(self) -> None:
        """Returns when no request is unfinished."""
        await self._idle.wait()

    def get_tokenizer(self) -> Tokenizer:
        """Raises RequestError when the engine was built with skip_tokenizer_init."""
        return self._front_end.get_tokenizer()

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The tokens that end a sequence."""
        return self._front_end.input_processor.eos_token_ids

    def check_prompt(self, token_ids: Sequence[int]) -> None:
        """Raises RequestError for a prompt that `submit` would refuse."""
        self._front_end.input_processor.check_prompt(token_ids)

    def get_default_sampling_params(self) -> SamplingParams:
        """What the checkpoint's generation_config.json recommends."""
        return self._front_end.default_sampling_params

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        trace: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Completes one prompt; yields its output, updated in place, when it has changed.

        Closing the generator aborts the request. The arguments and the errors are those of `submit` and of the stream
        that it returns.
        """
        stream = await self.submit(prompt, sampling_params, request_id, priority=priority, trace=trace)
        try:
            async for output in stream:
                yield output
        finally:
            stream.close()

    async def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        trace: str | None = None,
    ) -> RequestStream:
        """Hands a request to the engine core. `trace` is a W3C traceparent.

        Raises RequestError when it is invalid, OverloadedError when there is no room, EngineDeadError.
        """
        arrived = self._clock.now()
        params = sampling_params or self.get_default_sampling_params()
        request = await self._process(request_id or secrets.token_hex(16), prompt, params, priority)
        if params.structured_outputs is not None:
            await self._grammars.check(params.structured_outputs.spec())
        client = self._core.client
        is_taken = any(child.request_id in self._owners for child in request.children)
        if is_taken or request.request_id in self._streams:
            raise RequestError(f"request id {request.request_id!r} is already in use", "request_id")
        limit = self._limits.max_num_queued_requests
        if len(self._owners) + len(request.children) > limit:
            held = len(self._owners)
            raise OverloadedError(f"the engine already holds {held} of max_num_queued_requests={limit} requests")
        return self._submit(client, request, arrived, trace)

    async def reset_prefix_cache(self, reset_connector: bool = False) -> bool:
        """Forgets all cached prefixes, with `reset_connector` also what the KV connector keeps outside the engine.

        False while requests run, and when there is no connector that can forget although that is wanted.
        """
        return await self._core.client.reset_prefix_cache(reset_connector)

    async def block_map(self, max_cells: int) -> BlockMap:
        """The block pool as at most `max_cells` letters. The core spends about 0.3 µs per block on it."""
        return await self._core.client.block_map(max_cells)

    async def check_integrity(self) -> None:
        """Recomputes all derived state of the scheduler and the block pool; AssertionError when they disagree."""
        await self._core.client.check_integrity()

    async def shutdown(self) -> None:
        """Ends the engine core; requests that still wait for tokens raise EngineDeadError. Idempotent."""
        await self._core.shutdown()
        await self._grammars.shutdown()

    async def _process(
        self, request_id: str, prompt: Prompt, params: SamplingParams, priority: int
    ) -> ProcessedRequest:
        process = self._front_end.input_processor.process
        text = prompt if isinstance(prompt, str) else prompt.get("prompt") if isinstance(prompt, dict) else None
        size = len(text) if isinstance(text, str) else 0
        return await self.text_work.run(size, process, request_id, prompt, params, priority)

    def _submit(
        self, client: CoreClient, request: ProcessedRequest, arrived: float, trace: str | None
    ) -> RequestStream:
        if not self._owners:
            self._last_progress = arrived
        child_ids = [child.request_id for child in request.children]
        self._idle.clear()
        stream = RequestStream(self._outputs.add_request(request), child_ids, self._abandon)
        self._streams[request.request_id] = stream
        for child in request.children:
            self._owners[child.request_id] = stream
            self.log.add(
                RequestRecord(
                    request_id=child.request_id,
                    arrived=arrived,
                    num_prompt_tokens=len(request.prompt_token_ids),
                    n=request.params.n,
                    max_tokens=request.params.max_tokens,
                    trace=trace,
                )
            )
            client.add_request(child)
        return stream

    def _abandon(self, stream: RequestStream) -> None:
        """Forgets a request; what has not ended of it is aborted."""
        self._streams.pop(stream.output.request_id, None)
        if stream.running:
            self._core.abort_requests(self._end(stream))

    def _end(self, stream: RequestStream) -> tuple[str, ...]:
        """Ends here what is running of a request, which the core may still have."""
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
        if not self._owners:
            self._idle.set()
        return stream

    def _on_message(self, message: StepReport | Refused | EngineDeadError | Ready) -> None:
        match message:
            case StepReport():
                self._on_report(message)
            case Refused(request_id):
                error = OverloadedError(message.message) if message.is_overload else None
                stream = self._owners.get(request_id)
                if stream is not None:
                    stream.wake(error or RequestError(message.message, message.field))
            case EngineDeadError():
                self._stats = _IDLE
                # What has ended is whole; its reader may be slow.
                for stream in [stream for stream in self._streams.values() if stream.running]:
                    stream.wake(EngineDeadError(str(message)))
                    self._end(stream)
            case Ready():
                self._on_restart(message)

    def _on_restart(self, ready: Ready) -> None:
        """Another core serves. Its KV cache may have another size than the first one's."""
        self.info = ready.info
        if ready.limits != self._limits:
            self._limits = ready.limits
            self._front_end = build_front_end(self.config, ready.limits)

    def _on_report(self, report: StepReport) -> None:
        now = self._clock.now()
        self._stats = report.stats
        if report.num_tokens:
            self._last_progress = now
        processed = self._outputs.process(report.outputs)
        self.log.on_report(report, now)
        for request_id, reason in processed.ended:
            self._disown(request_id).running.discard(request_id)
            self.log.end((request_id,), reason, now)
        if processed.aborts:
            self._core.abort_requests(tuple(processed.aborts))
        for output in processed.request_outputs:
            self._streams[output.request_id].wake()

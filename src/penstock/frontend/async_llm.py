"""The engine for programs with an event loop: used by the server, and by programs that embed it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from typing import Any

from penstock.config import env
from penstock.config.engine import EngineArgs, EngineConfig, SchedulerConfig, resolve
from penstock.config.replicas import core_plans
from penstock.engine.core_messages import Ready
from penstock.frontend.adapters import AdapterStore, LoRARequest
from penstock.frontend.core_client import CoreClient
from penstock.frontend.core_restarts import RestartingCore
from penstock.frontend.front_end import FrontEnd, build_front_end, make_grammar_checker
from penstock.frontend.input_processor import SECOND_TEXT, ProcessedRequest, Prompt
from penstock.frontend.placement import Placement
from penstock.frontend.pooling import PoolingProcessor, Task
from penstock.frontend.replica import Replica, RequestStream
from penstock.frontend.scoring import Texts, plan_scores
from penstock.frontend.text_work import TextWork
from penstock.messages.adapters import Adapter
from penstock.messages.engine_info import EngineInfo
from penstock.messages.outputs import RequestOutput
from penstock.messages.pooling_outputs import PoolingOutput, PoolingRequestOutput, ScoringRequestOutput
from penstock.messages.pooling_params import PoolingParams
from penstock.messages.sampling_params import SamplingParams
from penstock.metrics.request_log import EngineObserver
from penstock.tokenizer.tokenizer import Tokenizer, load_tokenizer
from penstock.utils.clock import SystemClock
from penstock.utils.errors import EngineDeadError, OverloadedError, RequestError
from penstock.utils.machine import count_gpus, numa_nodes

_CLEANING_SECONDS = 1.0
# Names of transfers, which other engines read, are made of request ids.
_MOST_ID_CHARACTERS = 1024

ReplicaObservers = Callable[[int], Sequence[EngineObserver]]
"""Makes the observers of one data parallel rank."""


class AsyncLLM:
    """An engine whose core runs in a separate process; any number of `generate` calls may run at once.

        llm = await AsyncLLM.start("path/or/model-id", max_model_len=4096)
        async for output in llm.generate("Once upon a time", SamplingParams(max_tokens=32)):
            print(output.outputs[0].text)
        await llm.shutdown()

    With `restart_on_failure=N` a core that dies is restarted, at most N times in a row; its requests fail, and until
    the new core serves, `submit` raises OverloadedError. With `data_parallel_size=N` there are N such engines, the
    `replicas`, and each request runs on one of them; those that share experts have one core.

    The same front end serves HTTP (`penstock serve`). Belongs to the event loop on which it was started.
    """

    def __init__(
        self,
        config: EngineConfig,
        cores: list[RestartingCore],
        ready: Sequence[Ready],
        tokenizer: Tokenizer | None,
        observers: ReplicaObservers,
    ) -> None:
        """`cores` and what their engines have reported, in the order of the ranks: one core each, or one for all."""
        self.config = config
        self._limits = _narrowest(each.limits for each in ready)
        self._front_end: FrontEnd = build_front_end(config, self._limits, tokenizer)
        self.text_work = TextWork()
        self._grammars = make_grammar_checker(config, self._front_end.tokenizer)
        self._clock = SystemClock()
        self._adapters = AdapterStore(config.lora, ready[0].info.lora_targets)
        self._adapter_change = asyncio.Lock()
        self._cleaning: asyncio.Task[None] | None = None
        self._is_closing = asyncio.Event()
        self.replicas = tuple(
            Replica(core, each, tokenizer, observers(rank), self._on_restart)
            for rank, (core, each) in enumerate(zip(cores * config.parallel.num_joint_engines, ready, strict=True))
        )
        self._placement = Placement(self.replicas, config.is_prefix_aware)

    @classmethod
    async def start(
        cls,
        model: str | None = None,
        observers: ReplicaObservers = lambda rank: (),
        restart_on_failure: int = 0,
        **engine_args: Any,
    ) -> AsyncLLM:
        """Starts the engine cores and waits until they are ready. The arguments are `LLM`'s.

        `observers` makes those of each data parallel rank. Raises ConfigError if the arguments cannot work, and
        EngineDeadError if a core's process fails.
        """
        args = EngineArgs.from_kwargs(**engine_args, **({} if model is None else {"model": model}))
        config = await asyncio.to_thread(resolve, args)
        is_on_cpu = config.device == "cpu" or (config.device == "auto" and count_gpus() == 0)
        plans = core_plans(config, env.visible_gpus(), numa_nodes() if is_on_cpu else ())
        clients: list[CoreClient] = []
        try:
            for plan in plans:
                clients.append(await CoreClient.start(plan))
            # A large vocabulary takes seconds, in which the cores load.
            loading = asyncio.gather(*(client.ready for client in clients))
            tokenizer, loaded = await asyncio.gather(asyncio.to_thread(load_tokenizer, config), loading)
            ready = [each for core in loaded for each in core]
            cores = [RestartingCore(plan, each, restart_on_failure) for plan, each in zip(plans, clients, strict=True)]
            return cls(config.on_device(ready[0].info.device), cores, ready, tokenizer, observers)
        except BaseException:
            await asyncio.gather(*(client.shutdown() for client in clients))
            raise

    @property
    def info(self) -> EngineInfo:
        """The first replica's model and hardware; the others differ only in the size of the KV cache."""
        return self.replicas[0].info

    @property
    def max_model_len(self) -> int:
        """The maximum length of prompt plus output, in tokens."""
        return self._limits.max_model_len

    @property
    def death(self) -> EngineDeadError | None:
        """The reason why all engine cores are dead for good; None while one serves or is being restarted."""
        deaths = [replica.death for replica in self.replicas]
        return deaths[0] if all(deaths) else None

    @property
    def outage(self) -> EngineDeadError | None:
        """The reason why no engine core serves now; None while one serves."""
        outages = [replica.outage for replica in self.replicas]
        return outages[0] if all(outages) else None

    @property
    def _living(self) -> Sequence[Replica]:
        """The replicas that are not permanently dead; all replicas if each of them is."""
        return [replica for replica in self.replicas if replica.death is None] or self.replicas

    @property
    def num_unfinished(self) -> int:
        """The number of completions that have not ended."""
        return sum(replica.num_unfinished for replica in self.replicas)

    @property
    def seconds_without_progress(self) -> float:
        """The longest time for which a replica has had work without computing a token; 0 while none has work."""
        return max(replica.seconds_without_progress for replica in self.replicas)

    @property
    def has_tokenizer(self) -> bool:
        return self._front_end.tokenizer is not None

    async def wait_until_idle(self) -> None:
        """Returns when no request is unfinished."""
        while self.num_unfinished:
            await asyncio.gather(*(replica.idle.wait() for replica in self.replicas))

    async def wait_until_dead(self) -> None:
        """Returns when no engine core serves or will be restarted."""
        await asyncio.gather(*(replica.died.wait() for replica in self.replicas))

    def get_tokenizer(self) -> Tokenizer:
        """Returns the tokenizer. Raises RequestError if the engine was built with skip_tokenizer_init."""
        return self._front_end.get_tokenizer()

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The tokens that end a sequence."""
        return self._front_end.input_processor.eos_token_ids

    def check_prompt(self, token_ids: Sequence[int]) -> None:
        """Raises RequestError for a prompt that `submit` would refuse."""
        self._front_end.input_processor.check_prompt(token_ids)

    def check_count(self, count: int, data_parallel_rank: int | None = None) -> None:
        """Raises RequestError if the engine can never hold `count` completions or inputs of one caller at once."""
        limit = self._limits.max_num_queued_requests
        if count > limit * (len(self.replicas) if data_parallel_rank is None else 1):
            raise RequestError(f"{count} inputs exceed max_num_queued_requests={limit}: send fewer at a time")

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the recommendations of the checkpoint's generation_config.json."""
        return self._front_end.default_sampling_params

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        trace: str | None = None,
        data_parallel_rank: int | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Completes one prompt; yields its output, updated in place, when it has changed.

        Closing the generator aborts the request. The arguments and the errors are those of `submit` and of the stream
        that it returns.
        """
        stream = await self.submit(
            prompt,
            sampling_params,
            request_id,
            priority=priority,
            trace=trace,
            data_parallel_rank=data_parallel_rank,
            lora_request=lora_request,
        )
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
        data_parallel_rank: int | None = None,
        lora_request: LoRARequest | Adapter | None = None,
    ) -> RequestStream:
        """Submits a request to an engine core, that of `data_parallel_rank` if given. `trace` is a W3C traceparent.

        An adapter that is not loaded is. Raises RequestError if the request is invalid, ConfigError if its adapter is
        unsuitable, OverloadedError if there is no room, EngineDeadError.
        """
        arrived = self._clock.now()
        params = sampling_params or self.get_default_sampling_params()
        adapter = lora_request if isinstance(lora_request, Adapter | None) else await self._resolve(lora_request)
        request = await self._process(request_id or secrets.token_hex(16), prompt, params, priority, adapter)
        if params.structured_outputs is not None:
            await self._grammars.check(params.structured_outputs.spec())
        return await self._take(request, arrived, trace, data_parallel_rank)

    @property
    def pooling(self) -> PoolingProcessor:
        """Knows the kinds and forms of results, besides tokens, that the engine can compute."""
        return self._front_end.pooling

    async def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        trace: str | None = None,
        data_parallel_rank: int | None = None,
    ) -> PoolingRequestOutput[PoolingOutput]:
        """Returns the result for a prompt as an array `outputs.data`: a vector, or a number per label.

        Cancelling the call aborts the request. Raises the errors of `submit` and its stream, and RequestError if the
        engine generates.
        """
        prompts = [(prompt, pooling_params or PoolingParams())]
        options: dict[str, Any] = {"priority": priority, "trace": trace, "data_parallel_rank": data_parallel_rank}
        return (await self.encode_all(prompts, request_id, **options))[0]

    async def encode_all(
        self,
        prompts: Sequence[tuple[Prompt, PoolingParams]],
        request_id: str | None = None,
        *,
        priority: int = 0,
        trace: str | None = None,
        data_parallel_rank: int | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Does the same as `encode` for many prompts, in order. If one of them fails, so does the call. While the
        engine has no room for the next one, it waits for those before it.
        """
        self.check_count(len(prompts), data_parallel_rank)
        process, name = self._front_end.input_processor.process_pooling, request_id or secrets.token_hex(16)
        submitted: deque[RequestStream] = deque()
        results: list[PoolingRequestOutput[PoolingOutput]] = []

        async def finish_first() -> None:
            async for _ in submitted[0]:
                pass
            results.append(self.pooling.make(submitted[0].output, prompts[len(results)][1]))
            submitted.popleft().close()

        try:
            for number, (prompt, params) in enumerate(prompts):
                arrived, own_name = self._clock.now(), f"{name}-{number}" if len(prompts) > 1 else name
                self.pooling.check(Task.ENCODE, params)
                work = self.text_work.run(_num_characters(prompt), process, own_name, prompt, params, priority)
                # As a task of its own: between two prompts other clients have their turn.
                request = await asyncio.create_task(work)
                while len(results) + len(submitted) == number:
                    try:
                        submitted.append(await self._take(request, arrived, trace, data_parallel_rank))
                    except OverloadedError:
                        if not submitted:
                            raise
                        await finish_first()
            while submitted:
                await finish_first()
            return results
        finally:
            for stream in submitted:
                stream.close()

    async def score(
        self,
        queries: Texts,
        documents: Texts,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> list[ScoringRequestOutput]:
        """See `LLM.score`. Cancelling the call aborts its requests."""
        plan = plan_scores(self.pooling, queries, documents, pooling_params or PoolingParams())
        return plan.results(await self.encode_all(plan.prompts, request_id, priority=priority))

    async def _take(
        self, request: ProcessedRequest, arrived: float, trace: str | None, data_parallel_rank: int | None
    ) -> RequestStream:
        """Raises the errors of `submit`."""
        if len(request.request_id) > _MOST_ID_CHARACTERS:
            raise RequestError(f"a request id may have {_MOST_ID_CHARACTERS:,} characters at most", "request_id")
        for replica in self.replicas:
            await replica.until_gone(request)
        if any(replica.has(request) for replica in self.replicas):
            raise RequestError(f"request id {request.request_id!r} is already in use", "request_id")
        place = self._placement.choose(request, data_parallel_rank)
        return place.replica.submit(request, arrived, trace, place.num_cached)

    @property
    def loras(self) -> dict[str, str]:
        """The loaded adapters: name -> the folder that it was read from."""
        return {name: self._adapters.path(name) for name in self._adapters.names}

    def lora(self, lora_name: str) -> Adapter | None:
        """Returns a loaded adapter, which `submit` takes as it is, whatever its name stands for later."""
        return self._adapters.get(lora_name)

    async def load_lora(self, lora_name: str, lora_path: str) -> None:
        """Loads an adapter, to the end even if the caller is cancelled. Raises RequestError and ConfigError as
        `AdapterStore.load` does.
        """
        await self._load(lora_name, lora_path, lambda: None)

    async def unload_lora(self, lora_name: str) -> None:
        """Removes an adapter; requests that have it continue. Raises RequestError for an unknown name."""
        self._adapters.unload(lora_name)
        self._clean_later()

    def _clean_later(self) -> None:
        if self._cleaning is None or self._cleaning.done():
            self._cleaning = asyncio.create_task(self._clean_up())

    async def _resolve(self, request: LoRARequest) -> Adapter:
        """Returns the adapter of a request; only one that must be loaded waits for other changes."""
        known = functools.partial(self._adapters.known, request)
        return known() or await self._load(request.lora_name, request.lora_path, known)

    async def _load(self, name: str, path: str, known: Callable[[], Adapter | None]) -> Adapter:
        """Loads an adapter, unless it is `known` when its turn comes: others may have waited for the same one."""

        async def load() -> Adapter:
            try:
                async with self._adapter_change:
                    return known() or self._adapters.add(path, await asyncio.to_thread(self._adapters.copy, name, path))
            finally:
                self._clean_later()

        # A thread cannot be cancelled: the next change must not begin before it has ended, and its copy must be known.
        return await asyncio.shield(load())

    async def _has_forgotten(self, replica: Replica, digest: bytes) -> bool:
        # A core that is restarted or dead has no adapters.
        try:
            return await replica.forget_adapter(digest)
        except (OverloadedError, EngineDeadError):
            return True

    async def _clean_up(self) -> None:
        """Removes the files of unloaded adapters when nothing reads them any more."""
        while self._adapters.has_unserved:
            for digest, token in self._adapters.unused():
                if all(await asyncio.gather(*(self._has_forgotten(each, digest) for each in self.replicas))):
                    async with self._adapter_change:
                        self._adapters.remove(digest, token)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_closing.wait(), _CLEANING_SECONDS)
                return

    async def reset_prefix_cache(self, reset_connector: bool = False) -> bool:
        """Removes all cached prefixes; with `reset_connector` also the KV that the connector keeps elsewhere.

        Returns False while requests run, and with `reset_connector` if no connector can be reset.
        """
        return all(await asyncio.gather(*(each.reset_prefix_cache(reset_connector) for each in self._living)))

    async def check_integrity(self) -> None:
        """Recomputes all derived state of the schedulers and block pools; AssertionError if it is inconsistent."""
        await asyncio.gather(*(replica.check_integrity() for replica in self._living))

    async def shutdown(self) -> None:
        """Stops the engine cores; requests that still wait for tokens raise EngineDeadError. Idempotent."""
        self._is_closing.set()
        await asyncio.gather(*(replica.shutdown() for replica in self.replicas))
        await self._grammars.shutdown()
        self._adapters.close()

    async def _process(
        self, request_id: str, prompt: Prompt, params: SamplingParams, priority: int, adapter: Adapter | None
    ) -> ProcessedRequest:
        process = self._front_end.input_processor.process
        return await self.text_work.run(_num_characters(prompt), process, request_id, prompt, params, priority, adapter)

    def _on_restart(self) -> None:
        """Called when a new core serves. Its KV cache may have another size than the first one's."""
        limits = _narrowest(replica.limits for replica in self.replicas)
        if limits != self._limits:
            self._limits = limits
            self._front_end = build_front_end(self.config, limits, self._front_end.tokenizer)


def _narrowest(limits: Iterable[SchedulerConfig]) -> SchedulerConfig:
    """Returns the limits of the replica that accepts the shortest requests: every replica accepts such requests."""
    return min(limits, key=lambda each: each.max_model_len)


def _num_characters(prompt: Prompt) -> int:
    """Returns the length of the prompt's texts; 0 if it is token ids."""
    texts = [prompt.get("prompt"), prompt.get(SECOND_TEXT)] if isinstance(prompt, Mapping) else [prompt]
    return sum(len(text) for text in texts if isinstance(text, str))

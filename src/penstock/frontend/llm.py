"""The engine inside a program: converts prompts to completions or vectors."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any

from tqdm import tqdm

from penstock.config.engine import EngineArgs, resolve
from penstock.engine.build import build_engine
from penstock.frontend.adapters import AdapterStore, LoRARequest
from penstock.frontend.front_end import build_front_end
from penstock.frontend.idle_transfers import IdleTransfers
from penstock.frontend.input_processor import ProcessedRequest, Prompt
from penstock.frontend.output_processor import OutputProcessor
from penstock.frontend.pooling import Task, as_embedding
from penstock.frontend.scoring import Texts, plan_scores
from penstock.messages.outputs import RequestOutput
from penstock.messages.pooling_outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from penstock.messages.pooling_params import PoolingParams
from penstock.messages.sampling_params import SamplingParams
from penstock.messages.stats import SchedulerStats
from penstock.tokenizer.tokenizer import Message, Tokenizer
from penstock.utils.errors import ConfigError, RequestError
from penstock.utils.interrupts import interrupts_held


class LLM:
    """An engine for offline use, with the arguments and results of vLLM's `LLM`.

        llm = LLM("path/or/model-id", max_model_len=4096)
        llm.generate(["Once upon a time"], SamplingParams(temperature=0, max_tokens=32))[0].outputs[0].text

    Without a model the built-in one is used. Keyword arguments are the engine arguments (`config.engine.EngineArgs`).
    Not thread-safe, and one `generate`, `chat` or `stream` at a time. Raises ConfigError if the arguments cannot work,
    and EngineDeadError from every call after a worker has failed.

    If the KV connector serves other engines, it does so between the calls too, on a separate thread.
    """

    def __init__(self, model: str | None = None, **engine_args: Any) -> None:
        if model is not None:
            engine_args["model"] = model
        args = EngineArgs.from_kwargs(**engine_args)
        if args.data_parallel_size > 1:
            raise ConfigError("LLM runs one engine: with data_parallel_size use AsyncLLM or penstock serve")
        engine = build_engine(resolve(args))
        self.config, self.info = engine.config, engine.info
        self._core, self._limits = engine.core, engine.limits
        with ExitStack() as on_failure:
            on_failure.callback(self._core.shutdown)
            self._front_end = build_front_end(self.config, self._limits)
            on_failure.pop_all()
        self._outputs = OutputProcessor(self._front_end.tokenizer)
        self._adapters = AdapterStore(self.config.lora, self.info.lora_targets)
        self._is_running = False
        self._transfers = IdleTransfers(engine)
        # Also called when the program exits, because no step may run then. Afterwards it keeps nothing alive.
        self._close_transfers = weakref.finalize(self, self._transfers.close)
        self._request_counter = itertools.count()

    @property
    def max_model_len(self) -> int:
        """The maximum length of prompt plus output, in tokens."""
        return self._limits.max_model_len

    def get_tokenizer(self) -> Tokenizer:
        """Returns the tokenizer. Raises RequestError if the engine was built with skip_tokenizer_init."""
        return self._front_end.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the recommendations of the checkpoint's generation_config.json."""
        return self._front_end.default_sampling_params

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Completes one prompt or many; results are in the order of the prompts.

        A prompt is text, token ids, or a dictionary with `prompt` or `prompt_token_ids` (and `cache_salt`, and
        `output_token_ids` to continue). An adapter is for all prompts, or there is one or None for each. Raises
        RequestError, before anything runs, if one of them is invalid, and ConfigError for an unsuitable adapter. An
        interrupt aborts the running requests and leaves the engine usable.
        """
        return self._finish(self._process(prompts, sampling_params, priority, lora_request), use_tqdm)

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Returns the results for one prompt or many, as arrays `outputs.data`: vectors, or numbers per label.

        Otherwise like `generate`. Raises RequestError if the engine generates.
        """
        return self._encode(Task.ENCODE, prompts, pooling_params, use_tqdm, priority)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Like `encode`, with vectors as lists `outputs.embedding`. Raises RequestError for a classifier."""
        return [as_embedding(each) for each in self._encode(Task.EMBED, prompts, pooling_params, use_tqdm, priority)]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """Like `encode`, with probabilities `outputs.probs`. Raises RequestError for a model without a classifier."""
        encoded = self._encode(Task.CLASSIFY, prompts, pooling_params, use_tqdm, priority)
        return [self._front_end.pooling.as_classification(each) for each in encoded]

    def score(
        self, queries: Texts, documents: Texts, pooling_params: PoolingParams | None = None, *, use_tqdm: bool = True
    ) -> list[ScoringRequestOutput]:
        """Scores the match of a query with each document, or of queries with documents pair by pair: `outputs.score`.

        A classifier with one label reads each pair; with a model that makes vectors the score is their cosine. Raises
        RequestError for other engines.
        """
        plan = plan_scores(self._front_end.pooling, queries, documents, pooling_params or PoolingParams())
        return plan.results(self._pool(plan.prompts, use_tqdm))

    def _encode(
        self,
        task: Task,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None,
        use_tqdm: bool,
        priority: Sequence[int] | None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        params = pooling_params or PoolingParams()
        self._front_end.pooling.check(task, params)
        each_prompt, each_priority = _aligned(prompts, priority)
        return self._pool([(prompt, params) for prompt in each_prompt], use_tqdm, each_priority)

    def _pool(
        self, prompts: Sequence[tuple[Prompt, PoolingParams]], use_tqdm: bool, priority: Sequence[int] | None = None
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        process = self._front_end.input_processor.process_pooling
        requests = [
            process(str(next(self._request_counter)), prompt, params, rank)
            for (prompt, params), rank in zip(prompts, priority or [0] * len(prompts), strict=True)
        ]
        outputs = zip(self._finish(requests, use_tqdm), prompts, strict=True)
        return [self._front_end.pooling.make(output, params) for output, (_, params) in outputs]

    def _finish(self, requests: Sequence[ProcessedRequest], use_tqdm: bool) -> list[RequestOutput]:
        """Runs the requests to their end; results are in the same order."""
        results: dict[str, RequestOutput] = {}
        progress = tqdm(total=len(requests), desc="prompts", unit="prompt", delay=2.0, disable=not use_tqdm)
        # Closed explicitly, because a traceback that is kept would keep the run open. Interrupts are held back once for
        # all steps: doing so in each step takes as long as scheduling it.
        with progress, interrupts_held() as let_interrupts_through, closing(self._run(requests)) as run:
            for changed in run:
                results.update((output.request_id, output) for output in changed if output.finished)
                progress.update(len(results) - progress.n)
                let_interrupts_through()
        return [results[request.request_id] for request in requests]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation or many, each a list of `{"role": ..., "content": ...}`."""
        conversations: Sequence[Any] = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        options = {"tools": tools, "add_generation_prompt": add_generation_prompt, **(chat_template_kwargs or {})}
        tokenizer = self.get_tokenizer()
        prompts = [{"prompt_token_ids": tokenizer.apply_chat_template(each, **options)} for each in conversations]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, lora_request: LoRARequest | None = None
    ) -> Generator[RequestOutput, None, None]:
        """Completes one prompt; yields its result, updated in place, after every step that changed it.

        Closing the iterator aborts the request.
        """
        with closing(self._run(self._process([prompt], sampling_params, None, lora_request))) as run:
            while True:
                with interrupts_held():
                    changed = next(run, None)
                if changed is None:
                    return
                yield from changed

    def stats(self) -> SchedulerStats:
        """Counters and gauges of the scheduler."""
        with self._transfers.paused():
            return self._core.stats()

    def reset_prefix_cache(self, reset_connector: bool = False) -> bool:
        """Removes all cached prefixes; with `reset_connector` also the KV that the connector keeps elsewhere.

        Returns False while requests run, and with `reset_connector` if no connector can be reset.
        """
        with self._transfers.paused():
            return self._core.reset_prefix_cache(reset_connector)

    def unload_lora(self, lora_name: str) -> None:
        """Removes an adapter. Raises RequestError for an unknown name."""
        self._adapters.unload(lora_name)
        with self._transfers.paused():
            for digest, token in self._adapters.unused():
                if self._core.forget_adapter(digest):
                    self._adapters.remove(digest, token)

    def check_integrity(self) -> None:
        """Recomputes all derived state of the scheduler and block pool; AssertionError if it is inconsistent."""
        with self._transfers.paused():
            self._core.check_integrity()

    def shutdown(self) -> None:
        """Frees the worker; the engine cannot be used afterwards."""
        self._close_transfers()
        self._core.shutdown()
        self._adapters.close()

    def _process(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[ProcessedRequest]:
        each_prompt, each_priority = _aligned(prompts, priority)
        count = len(each_prompt)
        each_lora = list(lora_request) if isinstance(lora_request, Sequence) else [lora_request] * count
        if len(each_lora) != count:
            raise RequestError(f"{count} prompts but {len(each_lora)} lora_request", "lora_request")
        if params is None:
            params = self.get_default_sampling_params()
        each_params = [params] * count if isinstance(params, SamplingParams) else list(params)
        if len(each_params) != count:
            raise RequestError(f"{count} prompts but {len(each_params)} sampling_params", "sampling_params")
        requests = [
            self._front_end.input_processor.process(
                str(next(self._request_counter)), prompt, each, rank, self._adapters.resolve(lora)
            )
            for prompt, each, rank, lora in zip(each_prompt, each_params, each_priority, each_lora, strict=True)
        ]
        limit = self._limits.max_num_queued_requests
        if any(request.params.n > limit for request in requests):
            raise RequestError(f"n must be at most max_num_queued_requests={limit}", "n")
        return requests

    def _run(self, requests: Sequence[ProcessedRequest]) -> Generator[list[RequestOutput], None, None]:
        """Executes steps until all requests have ended; if it is interrupted, it aborts them.

        The caller holds interrupts back meanwhile: an interrupt within a step would leave the engine inconsistent.
        """
        if self._is_running:
            raise RequestError("this LLM is still running another generate or stream: finish or close that first")
        self._is_running = True
        pending = deque(requests)
        try:
            self._transfers.pause()
            while pending or self._outputs.num_unfinished:
                self._submit(pending)
                yield self._step()
        finally:
            with interrupts_held():
                self._abandon([child.request_id for request in requests for child in request.children])
                self._is_running = False
                self._transfers.resume()

    def _submit(self, pending: deque[ProcessedRequest]) -> None:
        """Submits as many requests as fit into the engine's queue; the rest wait here, in order."""
        limit = self._limits.max_num_queued_requests
        while pending and self._outputs.num_unfinished + pending[0].params.n <= limit:
            request = pending.popleft()
            self._outputs.add_request(request)
            for child in request.children:
                self._core.add_request(child)

    def _step(self) -> list[RequestOutput]:
        processed = self._outputs.process(self._core.step().outputs)
        if processed.aborts:
            self._core.abort_requests(processed.aborts)
        return processed.request_outputs

    def _abandon(self, request_ids: list[str]) -> None:
        """Aborts unfinished requests, and waits for the steps in flight."""
        self._outputs.discard(request_ids)
        self._core.abort_requests(request_ids)
        while self._core.has_work:
            self._core.step()
        if self._core.has_transfers:
            # The connector's saves are sent with a step, and the next one may be far off.
            self._core.step()


def _aligned(prompts: Prompt | Sequence[Prompt], priority: Sequence[int] | None) -> tuple[list[Any], list[int]]:
    """Returns all prompts, and a priority for each."""
    each_prompt: list[Any] = [prompts] if _is_one_prompt(prompts) else list(prompts)
    each_priority = [0] * len(each_prompt) if priority is None else list(priority)
    if len(each_priority) != len(each_prompt):
        raise RequestError(f"{len(each_prompt)} prompts but {len(each_priority)} priority", "priority")
    return each_prompt, each_priority


def _is_one_prompt(prompts: Any) -> bool:
    if isinstance(prompts, str | Mapping) or not isinstance(prompts, Iterable):
        return True
    return isinstance(prompts, Sequence) and len(prompts) > 0 and isinstance(prompts[0], int)

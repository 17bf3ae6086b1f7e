"""Executes every path once before the first request, so that the first request is not slow.

The steps are those of the real scheduler, on the real runner, with lookahead blocks reserved by the scheduler's own
rule: prompts of 2 + K tokens are prefills even where K drafts make a decode row of 1 + K. The scheduler, its block pool
and its counters are temporary, so that warming up leaves no other state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from penstock.config.engine import SchedulerConfig
from penstock.core.kv_cache_manager import KVCacheManager
from penstock.core.scheduler import Scheduler
from penstock.engine.engine_core import EngineCore, step_together
from penstock.executor.executor import Executor
from penstock.messages.kv_cache_spec import KVCacheConfig
from penstock.messages.requests import EngineRequest
from penstock.messages.sampling_params import SamplingParams
from penstock.utils.errors import ConfigError, EngineDeadError
from penstock.worker.synthetic_steps import KINDS

_MAX_BLOCKS = 256


def warm_up(executor: Executor, engines: Sequence[tuple[SchedulerConfig, KVCacheConfig]], compiles: bool) -> None:
    """Runs a few requests on each engine, one at a time if that `compiles` kernels, and then as many together as
    possible. Raises ConfigError if a kernel refuses the model on first use, and EngineDeadError for other failures.
    """
    try:
        _run(executor, engines, compiles)
    except EngineDeadError as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        raise


def _run(executor: Executor, engines: Sequence[tuple[SchedulerConfig, KVCacheConfig]], compiles: bool) -> None:
    cores: list[EngineCore] = []
    for limits, cache in engines:
        # A few blocks are enough, and a full pool would take longer to create than the steps. The ids of states follow.
        small = cache if cache.has_states else replace(cache, num_blocks=min(cache.num_blocks, _MAX_BLOCKS))
        scheduler = Scheduler(limits, KVCacheManager(small, False), is_warm_up=True)
        cores.append(EngineCore(scheduler, executor, limits.max_num_in_flight))
    # The engines differ at most in the lengths that their memory permits.
    limits, _ = engines[0]
    for together in (*([1] if compiles else []), min(limits.max_num_seqs, limits.max_num_queued_requests)):
        # On a CPU every step takes at least as long as reading the weights.
        waiting = [list(_requests(limits, 3 if compiles else 2)) for limits, _ in engines]
        while waiting[0]:
            for core, requests in zip(cores, waiting, strict=True):
                for request in requests[:together]:
                    core.add_request(request)
                del requests[:together]
            while any(core.has_work or core.has_rows_to_free for core in cores):
                step_together(cores, waits=True)


def _requests(limits: SchedulerConfig, most: int) -> Iterator[EngineRequest]:
    """Yields one of each kind, of at most so many tokens that are not drafts."""
    num_prompt_tokens = min(2 + limits.max_num_drafts, limits.max_model_len - 1)
    # A pooling request ends with its prompt.
    max_tokens = 1 if limits.is_pooling else min(most + limits.max_num_drafts, limits.max_model_len - num_prompt_tokens)
    for number, kind in enumerate(KINDS):
        yield EngineRequest(
            request_id=f"warm-up-{number}",
            prompt_token_ids=(0,) * num_prompt_tokens,
            sampling_params=SamplingParams(**{**kind, "min_tokens": min(kind.get("min_tokens", 0), max_tokens)}),
            max_tokens=max_tokens,
            seed=number,
        )

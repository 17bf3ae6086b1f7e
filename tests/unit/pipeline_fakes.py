"""Pipeline stages that take time and compute nothing, behind the real scheduler and engine core."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from penstock.config.engine import SchedulerConfig
from penstock.core.kv_cache_manager import KVCacheManager
from penstock.core.scheduler import Scheduler
from penstock.core.structured_output import StructuredOutputs
from penstock.engine.engine_core import EngineCore
from penstock.executor.executor import Later
from penstock.messages.kv_cache_spec import KVCacheConfig, KVCacheGroup, KVCacheSpec
from penstock.messages.requests import EngineRequest
from penstock.messages.runner_output import ModelRunnerOutput
from penstock.messages.sampling_params import SamplingParams
from penstock.messages.scheduler_output import SchedulerOutput
from penstock.messages.structured_outputs import GrammarSpec
from penstock.runner.host_batch import read_plan
from penstock.runner.rows import Rows

BLOCK_SIZE = 16


class TimedStages:
    """An executor whose stages take `seconds[stage](num_tokens)`; launching a step costs the host `host_seconds`.

    An earlier stage begins a step when the tokens of its requests are known, and every stage takes steps in order.
    """

    def __init__(self, seconds: Sequence[Callable[[int], float]], limits: SchedulerConfig, host_seconds: float) -> None:
        self.now = 0.0
        self.plans: list[SchedulerOutput] = []
        self.busy = [0.0] * len(seconds)
        self._seconds = seconds
        self._host_seconds = host_seconds
        self._free_at = [0.0] * len(seconds)
        self._known_at: dict[str, float] = {}
        self._rows = Rows(limits.max_num_seqs)

    def execute_model(self, plan: SchedulerOutput, engine: int) -> None:
        self.plans.append(plan)
        self.now += self._host_seconds
        self._rows.remove(plan.finished_request_ids | plan.preempted_request_ids)
        for new in plan.new_requests:
            self._rows.add(new.request_id, len(new.token_ids))
            self._known_at[new.request_id] = 0.0

    def sample_tokens(self, masks: object, engine: int) -> Later[ModelRunnerOutput]:
        plan = self.plans[-1]
        host = read_plan(plan, self._rows)
        begin = max([self.now, *(self._known_at[name] for name in plan.num_scheduled_tokens)])
        for stage, seconds in enumerate(self._seconds):
            begin = max(begin, self._free_at[stage])
            taken = seconds(host.num_tokens) if host.num_tokens else 0.0
            self.busy[stage] += taken
            begin = self._free_at[stage] = begin + taken
        sampling = set(host.sampling_request_ids)
        self._known_at.update(dict.fromkeys(sampling, begin))
        sampled = {name: (7,) if name in sampling else () for name in plan.num_scheduled_tokens}
        return Later(lambda: self._result(begin, sampled))

    def _result(self, end: float, sampled: dict[str, tuple[int, ...]]) -> ModelRunnerOutput:
        self.now = max(self.now, end)
        return ModelRunnerOutput(sampled_token_ids=sampled)


def make_config(num_stages: int, is_async: bool = False, **limits: Any) -> SchedulerConfig:
    defaults = {"max_num_batched_tokens": 64, "max_num_seqs": 64, "max_model_len": 2048}
    return SchedulerConfig(**{**defaults, **limits}, num_stages=num_stages, max_num_in_flight=num_stages + is_async)


def make_core(
    config: SchedulerConfig,
    seconds: Sequence[Callable[[int], float]] = (),
    host_seconds: float = 0.0,
    grammars: StructuredOutputs | None = None,
    debug: bool = True,
) -> tuple[EngineCore, Scheduler, TimedStages]:
    group = KVCacheGroup(("layer",), KVCacheSpec.keys_and_values(1, 1, "float32"))
    kv = KVCacheManager(KVCacheConfig(1200, BLOCK_SIZE, (group,)), enable_prefix_caching=False)
    scheduler = Scheduler(config, kv, grammars)
    stages = TimedStages(seconds or [lambda _: 1.0] * config.num_stages, config, host_seconds)
    core = EngineCore(scheduler, stages, config.max_num_in_flight, debug=debug)  # pyright: ignore[reportArgumentType]
    return core, scheduler, stages


def make_request(
    request_id: str, num_prompt_tokens: int = 4, max_tokens: int = 50, grammar: GrammarSpec | None = None
) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=tuple(range(num_prompt_tokens)),
        sampling_params=SamplingParams(),
        max_tokens=max_tokens,
        seed=0,
        priority=len(request_id) % 3,
        grammar=grammar,
    )

"""What the engine core costs the processor per step: a scheduler, real in all parts, over a model that takes no time.

    python bench/host_cost.py [--steps 300]

Microseconds of one step of decoding requests, and of each request in it. On a GPU a step must take longer than this, or
the GPU waits.
"""

from __future__ import annotations

import argparse
import statistics
import time
from concurrent.futures import Future

from penstock.config.engine import SchedulerConfig
from penstock.core.kv_cache_manager import KVCacheManager
from penstock.core.scheduler import Scheduler
from penstock.engine.engine_core import EngineCore
from penstock.messages.kv_cache_spec import KVCacheConfig, KVCacheGroup, KVCacheSpec
from penstock.messages.requests import EngineRequest
from penstock.messages.runner_output import ModelRunnerOutput
from penstock.messages.sampling_params import SamplingParams
from penstock.messages.scheduler_output import GrammarOutput, SchedulerOutput

BLOCK_SIZE = 16
PROMPT_LEN = 128
ROUNDS = 5


class InstantExecutor:
    """Every request gets the same token."""

    def execute_model(self, plan: SchedulerOutput) -> None:
        self._plan = plan

    def sample_tokens(self, grammars: GrammarOutput) -> Future[ModelRunnerOutput]:
        future: Future[ModelRunnerOutput] = Future()
        future.set_result(ModelRunnerOutput(sampled_token_ids=dict.fromkeys(self._plan.num_scheduled_tokens, (5,))))
        return future

    def shutdown(self) -> None: ...


def make_core(depth: int, batch: int, max_tokens: int) -> EngineCore:
    group = KVCacheGroup(("layer",), KVCacheSpec(1, 1, "float32"))
    num_blocks = batch * ((PROMPT_LEN + max_tokens) // BLOCK_SIZE + 2)
    config = SchedulerConfig(
        max_num_batched_tokens=batch * PROMPT_LEN,
        max_num_seqs=batch,
        max_model_len=PROMPT_LEN + max_tokens,
        max_num_in_flight=depth,
    )
    kv = KVCacheManager(KVCacheConfig(num_blocks, BLOCK_SIZE, (group,)), enable_prefix_caching=True)
    core = EngineCore(Scheduler(config, kv), InstantExecutor(), depth)
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    for number in range(batch):
        prompt = tuple(range(number, number + PROMPT_LEN))
        core.add_request(
            EngineRequest(
                request_id=f"request-{number}",
                prompt_token_ids=prompt,
                sampling_params=params,
                max_tokens=max_tokens,
                seed=0,
            )
        )
    return core


def microseconds_per_step(depth: int, batch: int, num_steps: int) -> float:
    core = make_core(depth, batch, ROUNDS * num_steps + 32)
    for _ in range(8):
        core.step()
    times: list[float] = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        for _ in range(num_steps):
            core.step()
        times.append(1e6 * (time.perf_counter() - started) / num_steps)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    print("| steps in flight | batch | us per step | us per request |\n|---|---|---|---|")
    for depth in (1, 2):
        for batch in (1, 8, 64, 256):
            cost = microseconds_per_step(depth, batch, args.steps)
            print(f"| {depth} | {batch} | {cost:.0f} | {cost / batch:.1f} |", flush=True)


if __name__ == "__main__":
    main()

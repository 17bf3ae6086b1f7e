"""The engine's processor time per step: all parts are real except the model, which takes no time.

    python bench/host_cost.py [--rounds 20] [--only core seam offline report]

Microseconds of a step of decoding requests: of the engine core alone, with its worker in another process, and then with
the processing of its outputs. On a GPU a step must take longer than this, or the GPU waits. The minimum of the rounds
is the cost; its distance to the median shows how quiet the machine was.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import time
from collections.abc import Callable
from functools import partial

from penstock import LLM
from penstock.config.engine import EngineArgs, SchedulerConfig, resolve
from penstock.core.kv_cache_manager import KVCacheManager
from penstock.core.scheduler import Scheduler
from penstock.engine.core_messages import CODEC
from penstock.engine.engine_core import EngineCore
from penstock.executor.executor import Executor, Later, Pending, WorkerHandle
from penstock.executor.remote import start_worker
from penstock.messages.kv_cache_spec import KVCacheConfig, KVCacheGroup, KVCacheSpec
from penstock.messages.requests import EngineRequest
from penstock.messages.runner_output import ModelRunnerOutput
from penstock.messages.sampling_params import SamplingParams
from penstock.messages.scheduler_output import GrammarOutput, SchedulerOutput
from penstock.utils.child_process import Parent
from penstock.utils.wire import FrameReader
from penstock.worker.messages import CODEC as WORKER_CODEC
from penstock.worker.messages import InitializeWorker, LoadWorker, WorkerFacts, WorkerReady
from penstock.worker.worker_process import WorkerProcess

BLOCK_SIZE = 16
PROMPT_LEN = 128
BATCHES = (1, 8, 64, 256)
# A multiple of the block size, so that every round has its share of new blocks.
STEPS_PER_ROUND = 2 * BLOCK_SIZE
TOKEN_ID = 300


class InstantWorker:
    """A rank (`WorkerHandle`) that returns the same token for every request, at once. As long as the requests stay the
    same, so does the answer.
    """

    def __init__(self) -> None:
        self._plan = SchedulerOutput(step=0)
        self._output = ModelRunnerOutput()

    def load(self) -> Pending[WorkerFacts]:
        raise AssertionError("there is nothing to load")

    def initialize(self, plan: InitializeWorker) -> Pending[WorkerReady]:
        raise AssertionError("there is nothing to allocate")

    def execute_model(self, plan: SchedulerOutput) -> None:
        self._plan = plan

    def sample_tokens(self, grammars: GrammarOutput | None) -> Pending[ModelRunnerOutput]:
        if self._plan.num_scheduled_tokens.keys() != self._output.sampled_token_ids.keys():
            tokens = dict.fromkeys(self._plan.num_scheduled_tokens, (TOKEN_ID,))
            self._output = ModelRunnerOutput(sampled_token_ids=tokens)
        output = self._output
        return Later(lambda: output)

    def watch(self, on_death: Callable[[], None]) -> None: ...

    def check(self) -> None: ...

    def kill(self) -> None: ...

    def hang_up(self) -> None: ...

    def shutdown(self) -> None: ...


class InstantRank:
    """The worker of a separate process: an instant one."""

    ready = WorkerReady((0, 0), None, runs_ahead=False)

    def __init__(self) -> None:
        worker = InstantWorker()
        self.execute_model, self.sample_tokens, self.shutdown = (
            worker.execute_model,
            worker.sample_tokens,
            worker.shutdown,
        )


def make_core(depth: int, batch: int, max_tokens: int, worker: WorkerHandle | None = None) -> EngineCore:
    group = KVCacheGroup(("layer",), KVCacheSpec.keys_and_values(1, 1, "float32"))
    num_blocks = batch * ((PROMPT_LEN + max_tokens) // BLOCK_SIZE + 2)
    config = SchedulerConfig(
        max_num_batched_tokens=batch * PROMPT_LEN,
        max_num_seqs=batch,
        max_model_len=PROMPT_LEN + max_tokens,
        max_num_in_flight=depth,
    )
    kv = KVCacheManager(KVCacheConfig(num_blocks, BLOCK_SIZE, (group,)), enable_prefix_caching=True)
    core = EngineCore(Scheduler(config, kv), Executor([worker or InstantWorker()]), depth)
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


def time_rounds(num_rounds: int, num_steps: int, function: Callable[..., object], *args: object) -> list[float]:
    """Returns the microseconds per step in each round, in which the function does all of its `num_steps` steps."""
    times: list[float] = []
    for _ in range(num_rounds):
        started = time.perf_counter()
        function(*args)
        times.append(1e6 * (time.perf_counter() - started) / num_steps)
    return times


def show(name: str, batch: int, times: list[float]) -> None:
    least = min(times)
    print(f"| {name} | {batch} | {least:.1f} | {statistics.median(times):.1f} | {least / batch:.2f} |", flush=True)


def repeat(function: Callable[..., object], *args: object) -> None:
    """Calls the function once per step of a round."""
    for _ in range(STEPS_PER_ROUND):
        function(*args)


def core_alone(num_rounds: int) -> None:
    print("| steps in flight | batch | us per step, least | median | least per request |\n|---|---|---|---|---|")
    for depth in (1, 2):
        for batch in BATCHES:
            core = make_core(depth, batch, (num_rounds + 1) * STEPS_PER_ROUND)
            repeat(core.step)
            show(str(depth), batch, time_rounds(num_rounds - 1, STEPS_PER_ROUND, repeat, core.step))


def behind_the_seam(num_rounds: int) -> None:
    """The same steps with the worker here and in a separate process, alternating; and the cost of its messages."""
    print("\n| worker | batch | us per step, least | median | least per request |\n|---|---|---|---|---|")
    program = (__file__, "--worker")
    for batch in BATCHES:
        max_tokens = (num_rounds + 1) * STEPS_PER_ROUND
        there = start_worker(LoadWorker(resolve(EngineArgs()), (0, 0)), program)
        cores = {"here": make_core(1, batch, max_tokens), "there": make_core(1, batch, max_tokens, there)}
        times: dict[str, list[float]] = {name: [] for name in cores}
        for core in cores.values():
            repeat(core.step)
        for _ in range(num_rounds - 1):
            for name, core in cores.items():
                times[name] += time_rounds(1, STEPS_PER_ROUND, repeat, core.step)
        for name in cores:
            show(name, batch, times[name])
        there.shutdown()
    print("\n| message | batch | bytes | us encoded | us decoded |\n|---|---|---|---|---|")
    for batch in BATCHES:
        core = make_core(2, batch, 8)
        core.step()
        prefill = make_core(1, batch, 8)._scheduler.schedule()
        decode = core._in_flight[-1][0]
        answer = ModelRunnerOutput(sampled_token_ids=dict.fromkeys(decode.num_scheduled_tokens, (TOKEN_ID,)))
        for name, message in (("plan, prompts", prefill), ("plan, decoding", decode), ("answer", answer)):
            frame = WORKER_CODEC.encode(message)
            encoded = min(time_rounds(num_rounds, STEPS_PER_ROUND, repeat, WORKER_CODEC.encode, message))
            decoded = min(time_rounds(num_rounds, STEPS_PER_ROUND, repeat, FrameReader(WORKER_CODEC).feed, frame))
            print(f"| {name} | {batch} | {len(frame)} | {encoded:.1f} | {decoded:.1f} |", flush=True)


def offline(num_rounds: int) -> None:
    """Whole calls of `LLM.generate` with prompts of one token, including the core's part."""
    print("\n| LLM.generate | batch | us per step, least | median | least per request |\n|---|---|---|---|---|")
    num_steps = 16 * STEPS_PER_ROUND
    for batch in BATCHES:
        num_blocks = 2 + batch * (num_steps // BLOCK_SIZE + 2)
        llm = LLM(device="cpu", async_scheduling=True, max_num_seqs=batch, num_gpu_blocks_override=num_blocks)
        llm._core._executor = Executor([InstantWorker()])
        prompts = [{"prompt_token_ids": [TOKEN_ID]}] * batch
        for name, detokenize in (("token ids", False), ("text", True)):
            params = SamplingParams(temperature=0.0, max_tokens=num_steps, ignore_eos=True, detokenize=detokenize)
            generate = partial(llm.generate, prompts, params, use_tqdm=False)
            show(name, batch, time_rounds(max(2, num_rounds // 4), num_steps, generate))


def between_processes(num_rounds: int) -> None:
    """A step's report on its way to a server's front end: the time in the engine core's process, and in the other."""
    print("\n| step report | batch | us per step, least | median | least per request |\n|---|---|---|---|---|")
    for batch in BATCHES:
        core = make_core(1, batch, 8)
        core.step()
        report = core.step()
        frame = CODEC.encode(report)
        show("encoded", batch, time_rounds(num_rounds, STEPS_PER_ROUND, repeat, CODEC.encode, report))
        show("decoded", batch, time_rounds(num_rounds, STEPS_PER_ROUND, repeat, FrameReader(CODEC).feed, frame))


PARTS = {"core": core_alone, "seam": behind_the_seam, "offline": offline, "report": between_processes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error("--rounds must be at least 2: the first round warms up")
    if args.worker is not None:
        WorkerProcess(Parent(socket.socket(fileno=args.worker), WORKER_CODEC)).serve(InstantRank())
        return
    for name in args.only:
        PARTS[name](args.rounds)


if __name__ == "__main__":
    main()

"""Engines that share experts: milliseconds of a decoding step, and what an idle engine costs that runs along.

    python bench/shared_experts.py [--model bench/shapes/tiny-experts] [--batches 1 8] [--steps 200] [--rounds 5]

    alone        one engine of one rank: nothing is shared
    two ranks    one engine of two tensor parallel ranks, which share experts too
    one idle     two engines of one rank each, requests in the first one only
    both         two engines of one rank each, as many requests in each of them

Every rank is a process with one thread. The engines alternate within a round. A model with few and small experts shows
what the step itself costs; with a large one the experts of a request are computed on two cores instead of one, and the
step may become shorter.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from penstock import SamplingParams
from penstock.config.engine import EngineArgs, resolve
from penstock.engine.build import JointEngines, build_engines
from penstock.messages.requests import EngineRequest

PROMPT_LEN, WARM_STEPS = 32, 20


@dataclass(frozen=True)
class Arrangement:
    """`busy` are the engines that have requests."""

    name: str
    engines: JointEngines
    busy: Sequence[int]

    def step_seconds(self, batch: int, steps: int) -> float:
        """Returns the time of a step in which every busy engine decodes for `batch` requests."""
        joint = self.engines.cores
        num_tokens = steps + WARM_STEPS + 10
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        names = [(engine, f"{engine}-{number}") for engine in self.busy for number in range(batch)]
        for number, (engine, name) in enumerate(names):
            prompt = (5 + number,) * PROMPT_LEN
            request = EngineRequest(
                request_id=name, prompt_token_ids=prompt, sampling_params=params, max_tokens=num_tokens, seed=0
            )
            joint.cores[engine].add_request(request)
        for _ in range(WARM_STEPS):
            joint.step()
        started = time.perf_counter()
        for _ in range(steps):
            joint.step()
        seconds = (time.perf_counter() - started) / steps
        for engine in self.busy:
            joint.cores[engine].abort_requests([name for _, name in names])
        while any(core.has_work or core.has_rows_to_free for core in joint.cores):
            joint.step()
        return seconds


def start(model: str, num_engines: int, num_ranks: int = 1) -> JointEngines:
    args = EngineArgs(
        model=model,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_seqs=64,
        num_gpu_blocks_override=4000,
        enable_prefix_caching=False,
        distributed_executor_backend="mp",
        data_parallel_size=num_engines,
        tensor_parallel_size=num_ranks,
        enable_expert_parallel=num_engines * num_ranks > 1,
        num_threads=1,
    )
    return build_engines(resolve(args))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bench/shapes/tiny-experts")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    started = one, ranks, two = start(args.model, 1), start(args.model, 1, 2), start(args.model, 2)
    arrangements = [
        Arrangement("alone", one, [0]),
        Arrangement("two ranks", ranks, [0]),
        Arrangement("one idle", two, [0]),
        Arrangement("both", two, [0, 1]),
    ]
    print("| engines | requests of each | ms per step | more than alone |\n|---|---|---|---|")
    for batch in args.batches:
        seconds: dict[str, list[float]] = {each.name: [] for each in arrangements}
        for _ in range(args.rounds):
            for each in arrangements:
                seconds[each.name].append(each.step_seconds(batch, args.steps))
        medians = {name: statistics.median(values) * 1e3 for name, values in seconds.items()}
        for name, value in medians.items():
            print(f"| {name} | {batch} | {value:.3f} | {value - medians['alone']:+.3f} |", flush=True)
    for engines in started:
        engines.cores.shutdown()


if __name__ == "__main__":
    main()

"""Starts an engine and reports when it was ready, when the first token came, and the time of each stage.

    python start_once.py STARTED '{"model": ...}'      STARTED: the parent's time.monotonic() when it started this

The last line of its output is JSON, all in seconds. A stage's time excludes stages that are reported separately within
it, such as the capture of graphs while the runner is built. Stages that do not occur are left out.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Stages:
    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._within: list[float] = [0.0]  # seconds of stages that have ended inside each open stage

    def timed(self, function: Callable[..., Any], stage: str) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            started = time.monotonic()
            self._within.append(0.0)
            try:
                return function(*args, **kwargs)
            finally:
                seconds = time.monotonic() - started
                self.seconds[stage] += seconds - self._within.pop()
                self._within[-1] += seconds

        return wrapper

    def watch(self, module: str, name: str, stage: str) -> None:
        owner = importlib.import_module(module)
        if hasattr(owner, name):
            setattr(owner, name, self.timed(getattr(owner, name), stage))

    def watch_compilation_ahead(self, worker: Any) -> None:
        """Measures how long the engine waits for kernels that are compiled while its weights load."""
        if not hasattr(worker, "compiling_ahead"):
            return
        original = worker.compiling_ahead

        @contextmanager
        def watched(*args: Any) -> Iterator[Callable[[], None]]:
            with original(*args) as wait:
                yield self.timed(wait, "wait for kernels")

        worker.compiling_ahead = watched


def watch_triton(kernels: Counter[str]) -> None:
    """Counts the kernels that this process compiled, and those that it found in the cache."""
    if importlib.util.find_spec("triton") is None:
        return
    from triton import knobs

    def listener(*, cache_hit: bool, **_: Any) -> None:
        kernels["cached" if cache_hit else "compiled"] += 1

    knobs.compilation.listener = listener


def main() -> None:
    started, options = float(sys.argv[1]), json.loads(sys.argv[2])
    from penstock import LLM, SamplingParams

    stages, kernels = Stages(), Counter({"compiled": 0, "cached": 0})
    worker = importlib.import_module("penstock.worker.worker")
    stages.seconds["import"] = time.monotonic() - started
    stages.watch("penstock.worker.worker", "load_model", "weights")
    stages.watch_compilation_ahead(worker)
    stages.watch("penstock.worker.worker", "memory_budget", "profile run")
    stages.watch("penstock.worker.worker", "allocate_kv_cache", "KV cache")
    stages.watch("penstock.worker.worker", "make_runner", "runner")
    stages.watch("penstock.engine.build", "warm_up", "warm-up")
    if options["device"] == "cuda":
        stages.watch("penstock.runner.gpu.cudagraphs", "capture", "graphs")
        watch_triton(kernels)
    llm = LLM(**options)
    ready = time.monotonic() - started
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    llm.generate([list(range(32))], params, use_tqdm=False)
    first_token = time.monotonic() - started
    llm.shutdown()
    stages.seconds["rest"] = ready - sum(stages.seconds.values())
    rounded = {name: round(seconds, 3) for name, seconds in stages.seconds.items()}
    print(json.dumps({"ready_s": ready, "first_token_s": first_token, "stages": rounded, "kernels": kernels}))


if __name__ == "__main__":
    main()

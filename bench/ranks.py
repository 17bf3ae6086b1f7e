"""Several ranks compared with one: tokens per second while decoding, milliseconds of a step, and memory of each rank.

    python bench/ranks.py [--model bench/shapes/qwen3-0.6b] [--sizes 1x1 2x1 1x2] [--batches 1 8 32] [--rounds 5]

A size is TENSORxPIPELINE. All engines run at once and alternate within a round; the rank of a single-rank engine has a
separate process too, so the engines differ only by their ranks. The cores are divided among the ranks of an engine. The
ratio is to the first size; "bound" is the pipeline's maximum: with B requests, B of PP stages are busy.

Memory is the private and shared memory of each process (PSS), in MiB.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from penstock import LLM, SamplingParams

PROMPT_LEN, SHORT, LONG = 32, 2, 34


@dataclass(frozen=True)
class Engine:
    name: str
    llm: LLM
    pids: list[int]
    num_stages: int

    def bound(self, batch: int) -> float:
        """Returns the share of the stages that `batch` requests can keep busy."""
        return min(batch, self.num_stages) / self.num_stages

    def decode_seconds(self, batch: int) -> float:
        """Returns the time of `LONG - SHORT` steps with `batch` requests: a difference of two runs, without prompts."""
        prompts = [{"prompt_token_ids": [100 + index] * PROMPT_LEN} for index in range(batch)]
        found: list[float] = []
        for max_tokens in (SHORT, LONG):
            params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
            started = time.perf_counter()
            self.llm.generate(prompts, params, use_tqdm=False)
            found.append(time.perf_counter() - started)
        return found[1] - found[0]

    def mebibytes(self) -> list[int]:
        return [_pss(pid) // 1024 for pid in self.pids]


def _pss(pid: int) -> int:
    """Returns KiB."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1])
    raise OSError(f"no Pss of process {pid}")


def _children() -> set[int]:
    tasks = Path(f"/proc/{os.getpid()}/task")
    return {int(pid) for task in tasks.iterdir() for pid in (task / "children").read_text(encoding="utf-8").split()}


def start(model: str, size: str) -> Engine:
    tp, pp = map(int, size.split("x"))
    before = _children()
    llm = LLM(
        model=model,
        load_format="dummy" if not list(Path(model).glob("*.safetensors")) and Path(model).is_dir() else "auto",
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_seqs=64,
        num_gpu_blocks_override=600,
        distributed_executor_backend="mp",
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
    )
    return Engine(f"TP {tp}, PP {pp}", llm, sorted(_children() - before), pp)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bench/shapes/qwen3-0.6b")
    parser.add_argument("--sizes", nargs="+", default=["1x1", "2x1", "1x2"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        engines = [start(args.model, size) for size in args.sizes]
        for engine in engines:
            stack.callback(engine.llm.shutdown)
        bounds = {engine.name: engine.bound for engine in engines}
        print("| ranks | batch | tokens/s | ms per token and request | ratio | bound |\n|---|---|---|---|---|---|")
        for batch in args.batches:
            seconds: dict[str, list[float]] = {engine.name: [] for engine in engines}
            for _ in range(1 + args.rounds):
                for engine in engines:
                    seconds[engine.name].append(engine.decode_seconds(batch))
            # The first round is the warm-up.
            medians = {name: statistics.median(values[1:]) / (LONG - SHORT) for name, values in seconds.items()}
            first = medians[engines[0].name]
            for name, value in medians.items():
                cells = (name, batch, f"{batch / value:.1f}", f"{value * 1e3:.2f}", f"{first / value:.2f}")
                print(f"| {' | '.join(map(str, cells))} | {bounds[name](batch):.2f} |", flush=True)
        print("\n| ranks | MiB of each |\n|---|---|")
        for engine in engines:
            print(f"| {engine.name} | {', '.join(map(str, engine.mebibytes()))} |")


if __name__ == "__main__":
    main()

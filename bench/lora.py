"""What adapters cost: decode tokens/s of a batch without adapters, and with some.

    python bench/lora.py [bench/shapes/qwen3-0.6b] [--rounds 7] [--rank 16] [--quick] [--vllm PYTHON]

One engine without adapters, one with them; the cases alternate, and a share is the median of the rounds' shares.
Weights and adapters are random. The adapters change every projection of every layer, as PEFT's `all-linear` does. vLLM
follows, one round of each case: on a CPU it computes prompts with adapters very slowly.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from penstock import LLM, LoRARequest, SamplingParams

SHAPE = Path(__file__).parent / "shapes" / "qwen3-0.6b"
PROMPT, OUTPUT, PREFILL = 2, 25, 1024


def write(folder: Path, targets: dict[str, Any], rank: int, scale: float = 0.1) -> Path:
    """Writes an adapter of every projection: to outputs it adds about `scale`, if inputs are about 1."""
    folder.mkdir()
    tensors: dict[str, torch.Tensor] = {}
    for name, target in targets.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = (
            torch.randn(rank, target.num_inputs) / target.num_inputs**0.5
        )
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(target.num_outputs, rank) * scale / rank**0.5
    save_file(tensors, folder / "adapter_model.safetensors")
    modules = sorted({name.rpartition(".")[2] for name in targets})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", nargs="?", default=str(SHAPE), help="folder with a config.json")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters", type=int, nargs="+", default=[0, 1, 8])
    parser.add_argument("--vllm", metavar="PYTHON", help="vLLM's interpreter: then the same with it")
    parser.add_argument("--quick", action="store_true", help="a few steps, to try the script")
    return parser.parse_args()


class Measurement:
    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args = args
        self.num_output, self.batches, self.num_prefill = (3, (2,), 32) if args.quick else (OUTPUT, (8, 32), PREFILL)
        self.columns = [*(f"batch {batch}" for batch in self.batches), f"prompt of {self.num_prefill}"]
        self.vocab_size = json.loads((Path(args.shape) / "config.json").read_text())["vocab_size"]
        self.rng = random.Random(0)
        common: dict[str, Any] = {
            "model": args.shape,
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "max_model_len": 2048,
            "enable_prefix_caching": False,
        }
        self.base, self.adapted = LLM(**common), LLM(enable_lora=True, max_loras=max(args.adapters), **common)
        targets = self.adapted.info.lora_targets
        self.paths = [str(write(folder / str(number), targets, args.rank)) for number in range(max(args.adapters))]
        self.loras = [LoRARequest(f"adapter{number}", number, path) for number, path in enumerate(self.paths)]

    def run(self) -> None:
        print(f"| tokens/s, median of {self.args.rounds}; rank {self.args.rank} | " + " | ".join(self.columns) + " |")
        print("|---" * (len(self.columns) + 1) + "|")
        for lora in self.loras:
            self.adapted.generate([[1]], SamplingParams(max_tokens=1), use_tqdm=False, lora_request=lora)
        cases = {"no adapters in the engine": (self.base, 0)}
        cases |= {f"{number} adapters": (self.adapted, number) for number in self.args.adapters}
        rounds = [{name: self.rates(*case) for name, case in cases.items()} for _ in range(self.args.rounds)]
        for name in cases:
            show(name, [each[name] for each in rounds], [next(iter(each.values())) for each in rounds])
        if self.args.vllm:
            alone = self.run_vllm([], [0])["0"]
            show("vLLM, no adapters in the engine", [alone], [alone])
            for count, rates in self.run_vllm(self.paths, self.args.adapters).items():
                show(f"vLLM, {count} adapters", [rates], [alone])

    def rates(self, llm: LLM, adapters: int) -> list[float]:
        """Returns the tokens/s of each column."""
        found: list[float] = []
        for batch in self.batches:
            first = self.seconds(llm, batch, PROMPT, 1, adapters)
            whole = self.seconds(llm, batch, PROMPT, self.num_output, adapters)
            found.append(batch * (self.num_output - 1) / (whole - first))
        return [*found, self.num_prefill / self.seconds(llm, 1, self.num_prefill, 1, min(1, adapters))]

    def seconds(self, llm: LLM, count: int, length: int, output: int, adapters: int) -> float:
        prompts = [[self.rng.randrange(self.vocab_size) for _ in range(length)] for _ in range(count)]
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False)
        chosen = [self.loras[number % adapters] if adapters else None for number in range(count)]
        started = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False, lora_request=chosen)
        return time.perf_counter() - started

    def run_vllm(self, folders: list[str], adapters: list[int]) -> dict[str, list[float]]:
        """Returns the tokens/s of each column by number of adapters."""
        options = {
            "shape": self.args.shape,
            "rank": self.args.rank,
            "vocab_size": self.vocab_size,
            "prompt": PROMPT,
            "output": self.num_output,
            "prefill": self.num_prefill,
            "batches": self.batches,
            "folders": folders,
            "adapters": adapters,
        }
        script = str(Path(__file__).parent / "peers" / "lora_vllm.py")
        command = [self.args.vllm, script, json.dumps(options)]
        done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            raise SystemExit(f"vLLM ended with status {done.returncode}: its own messages are above")
        return json.loads(done.stdout.strip().splitlines()[-1])


def show(name: str, rounds: list[list[float]], bases: list[list[float]]) -> None:
    """Prints a row: each rate with its share of the base's, both the medians of the rounds."""
    cells: list[str] = []
    for own, base in zip(zip(*rounds, strict=True), zip(*bases, strict=True), strict=True):
        share = statistics.median(one / of for one, of in zip(own, base, strict=True))
        cells.append(f"{statistics.median(own):.1f} ({share:.2f})")
    print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Measurement(read_arguments(), Path(folder)).run()


if __name__ == "__main__":
    main()

"""What adapters cost: decode tokens/s of a batch without adapters, and with some.

    python bench/lora.py [bench/shapes/qwen3-0.6b] [--rounds 3] [--rank 16] [--quick] [--vllm PYTHON]

One engine without adapters, one with them; the cases alternate. Weights and adapters are random. The adapters change
every projection of every layer, as PEFT's `all-linear` does.
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
PROMPT, OUTPUT, PREFILL = 32, 49, 1024


def write(folder: Path, targets: dict[str, Any], rank: int) -> Path:
    """Writes an adapter of every projection."""
    folder.mkdir()
    tensors: dict[str, torch.Tensor] = {}
    for name, target in targets.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, target.num_inputs) / 64
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(target.num_outputs, rank) / 64
    save_file(tensors, folder / "adapter_model.safetensors")
    modules = sorted({name.rpartition(".")[2] for name in targets})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", nargs="?", default=str(SHAPE), help="folder with a config.json")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters", type=int, nargs="+", default=[0, 1, 8])
    parser.add_argument("--vllm", metavar="PYTHON", help="vLLM's interpreter: the same with it, before and after")
    parser.add_argument("--quick", action="store_true", help="a few steps, to try the script")
    args = parser.parse_args()
    num_output, batches, num_prefill = (3, (2,), 32) if args.quick else (OUTPUT, (8, 32), PREFILL)
    common: dict[str, Any] = {
        "model": args.shape,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": 2048,
        "enable_prefix_caching": False,
    }
    vocab_size = json.loads((Path(args.shape) / "config.json").read_text())["vocab_size"]
    rng = random.Random(0)
    base, adapted = LLM(**common), LLM(enable_lora=True, max_loras=max(args.adapters), **common)
    with tempfile.TemporaryDirectory() as folder:
        targets = adapted.info.lora_targets
        paths = [write(Path(folder, str(n)), targets, args.rank) for n in range(max(args.adapters))]
        loras = [LoRARequest(f"adapter{number}", number, str(path)) for number, path in enumerate(paths)]

        def seconds(llm: LLM, count: int, length: int, output: int, adapters: int) -> float:
            prompts = [[rng.randrange(vocab_size) for _ in range(length)] for _ in range(count)]
            params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False)
            chosen = [loras[number % adapters] if adapters else None for number in range(count)]
            started = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False, lora_request=chosen)
            return time.perf_counter() - started

        def rate(llm: LLM, count: int, adapters: int) -> float:
            first = seconds(llm, count, PROMPT, 1, adapters)
            return count * (num_output - 1) / (seconds(llm, count, PROMPT, num_output, adapters) - first)

        given: dict[str, Any] = {"shape": args.shape, "rank": args.rank, "vocab_size": vocab_size, "prompt": PROMPT}
        given |= {"output": num_output, "prefill": num_prefill, "batches": batches, "rounds": args.rounds}

        def run_vllm(folders: list[str], adapters: list[int]) -> dict[str, dict[str, float]]:
            script = str(Path(__file__).parent / "peers" / "lora_vllm.py")
            options = json.dumps({**given, "folders": folders, "adapters": adapters})
            done = subprocess.run([args.vllm, script, options], check=True, stdout=subprocess.PIPE, text=True)
            return json.loads(done.stdout.strip().splitlines()[-1])

        others: dict[str, dict[str, float]] = {}
        if args.vllm:
            others["vLLM, no adapters in the engine"] = run_vllm([], [0])["0"]
        for lora in loras:
            adapted.generate([[1]], SamplingParams(max_tokens=1), use_tqdm=False, lora_request=lora)
        cases = [("no adapters in the engine", base, 0), *((f"{n} adapters", adapted, n) for n in args.adapters)]
        columns = [*(f"batch {batch}" for batch in batches), f"prompt of {num_prefill}"]
        found: dict[tuple[str, str], list[float]] = {}
        for _ in range(args.rounds):
            for name, llm, adapters in cases:
                for batch, column in zip(batches, columns, strict=False):
                    found.setdefault((name, column), []).append(rate(llm, batch, adapters))
                prefill = num_prefill / seconds(llm, 1, num_prefill, 1, min(1, adapters))
                found.setdefault((name, columns[-1]), []).append(prefill)
        if args.vllm:
            for count, rates in run_vllm(list(map(str, paths)), args.adapters).items():
                others[f"vLLM, {count} adapters"] = rates
    print(f"| tokens/s, median of {args.rounds}; rank {args.rank} | " + " | ".join(columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    own = {name: {c: statistics.median(found[name, c]) for c in columns} for name, _, _ in cases}
    for rows in (own, others):
        show(rows, columns)


def show(rows: dict[str, dict[str, float]], columns: list[str]) -> None:
    """Prints the rows of one engine, each number with its share of the first row's."""
    base = next(iter(rows.values()), {})
    for name, rates in rows.items():
        cells = [f"{rates[column]:.1f} ({rates[column] / base[column]:.2f})" for column in columns]
        print(f"| {name} | " + " | ".join(cells) + " |")


main()

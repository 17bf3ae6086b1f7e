"""What adapters cost: decode tokens/s of a batch without adapters, and with some.

    python bench/lora.py [bench/shapes/qwen3-0.6b] [--rounds 3] [--rank 16] [--quick]

One engine without adapters, one with them; the cases alternate. Weights and adapters are random. The adapters change
every projection of every layer, as PEFT's `all-linear` does.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
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
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", nargs="?", default=str(SHAPE), help="folder with a config.json")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters", type=int, nargs="+", default=[0, 1, 8])
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
    print(f"| tokens/s, median of {args.rounds}; rank {args.rank} | " + " | ".join(columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    first = {column: statistics.median(found[cases[0][0], column]) for column in columns}
    for name, _, _ in cases:
        values = [statistics.median(found[name, column]) for column in columns]
        cells = [f"{value:.1f} ({value / first[column]:.2f})" for value, column in zip(values, columns, strict=True)]
        print(f"| {name} | " + " | ".join(cells) + " |")


main()

"""Speculative decoding compared with plain decoding: tokens per second and acceptance, by task, method and batch size.

    python bench/speculation.py [--model demo] [--batch 1 8] [--rounds 3] [--methods ...] [--temperature 1]
    python bench/speculation.py --adapter 0.05 ...
    python bench/speculation.py --model bench/shapes/qwen3-0.6b --synthetic 0.76 0.45 0.34 --methods "mtp K=1" ...

The tasks repeat parts of the prompt to different degrees: `lookup` answers a question about facts, `copy` repeats a
list, `json` converts a table to JSON, `schema` does so within a JSON schema, `story` continues freely. They are worded
as in the built-in model's training, and answers end where the model ends them. Plain and drafted runs alternate;
printed are the plain run's median tokens per second, and for each method the ratio of the medians and the share of
accepted drafts; then the best table of drafts by batch size for these figures.

With `--adapter` the model has a random LoRA adapter of rank 16 of this scale (`bench/lora.py`), and drafters have none.
With `--synthetic` the weights are random and drafts are accepted at random, each place with its own probability once
those before it are accepted: this simulates an engine of that shape with such a drafter.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from lora import write

from penstock import LLM, LoRARequest, SamplingParams, StructuredOutputsParams

NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Greta", "Hugo")
CITIES = ("Paris", "Zurich", "Delhi", "Lisbon", "Jakarta", "Bergen", "Oxford", "Madrid")
COLORS = ("black", "purple", "gray", "brown", "white", "gold", "pink", "orange")
FACTS = " ".join(f"{name} lives in {city}." for name, city in zip(NAMES, CITIES, strict=True))
RECORDS = [f"{name},{city},{100 + i}" for i, (name, city) in enumerate(zip(NAMES, CITIES, strict=True))]
AS_JSON = [
    "\n".join(["Convert this CSV to JSON:", "name,city,count", *(RECORDS[i:] + RECORDS[:i])[:3]]) for i in range(8)
]
LISTS = [", ".join([*NAMES[i:], *COLORS, *CITIES, *NAMES[:i]]) for i in range(8)]
TEXT, COUNT = {"type": "string", "maxLength": 40}, {"type": "integer"}
SCHEMA = {
    "type": "array",
    "minItems": 3,
    "items": {
        "type": "object",
        "properties": {"name": TEXT, "city": TEXT, "count": COUNT},
        "required": ["name", "city", "count"],
        "additionalProperties": False,
    },
}
TASKS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "lookup": ([f"{FACTS} In which city does {name} live?" for name in NAMES], {}),
    "copy": ([f"Repeat: {each}" for each in LISTS], {}),
    "json": (AS_JSON, {}),
    "schema": (AS_JSON, {"structured_outputs": StructuredOutputsParams(json=SCHEMA)}),
    "story": ([f"Tell me a story about {name}." for name in NAMES], {}),
}
METHODS: dict[str, dict[str, Any]] = {
    "ngram K=3": {"method": "ngram", "num_speculative_tokens": 3},
    "mtp K=1": {"method": "mtp", "num_speculative_tokens": 1},
    "mtp K=2": {"method": "mtp", "num_speculative_tokens": 2},
    "mtp K=3": {"method": "mtp", "num_speculative_tokens": 3},
    "eagle3 K=1": {"method": "eagle3", "model": "demo/eagle3", "num_speculative_tokens": 1},
    "eagle3 K=3": {"method": "eagle3", "model": "demo/eagle3", "num_speculative_tokens": 3},
    "mtp K=3 drawn": {"method": "mtp", "num_speculative_tokens": 3, "draft_sample_method": "probabilistic"},
}
PROMPT_TOKENS = 64
RANK = 16


def main() -> None:
    args = parse_arguments()
    settings = {"plain": None, **{name: configured(METHODS[name], args) for name in args.methods}}
    engines = {name: make(args, each) for name, each in settings.items()}
    with tempfile.TemporaryDirectory() as folder:
        lora: LoRARequest | None = None
        if args.adapter is not None:
            torch.manual_seed(0)
            path = write(Path(folder, "adapter"), engines["plain"].info.lora_targets, RANK, args.adapter)
            lora = LoRARequest("adapter", 1, str(path))
        compare(args, engines, lora)


def compare(args: argparse.Namespace, engines: dict[str, LLM], lora: LoRARequest | None) -> None:
    print("| task | batch | " + " | ".join(engines) + " |\n" + "|---" * (len(engines) + 2) + "|")
    ratios: dict[tuple[str, int], list[float]] = {}
    for task in args.tasks:
        for batch in args.batch:
            rates: dict[str, list[float]] = {name: [] for name in engines}
            accepted: dict[str, float] = {}
            for number in range(args.rounds + 1):
                for name, llm in engines.items():
                    rate, accepted[name] = measure(llm, task, batch, args, lora)
                    if number:
                        rates[name].append(rate)
            plain = statistics.median(rates["plain"])
            cells = [f"{plain:.0f}"]
            for name in list(engines)[1:]:
                ratio = statistics.median(rates[name]) / plain
                ratios.setdefault((name, batch), []).append(ratio)
                cells.append(f"{ratio:.2f}x ({100 * accepted[name]:.0f} %)")
            print(f"| {task} | {batch} | " + " | ".join(cells) + " |", flush=True)
    print_tables(ratios, args.batch)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output-len", type=int, default=96)
    parser.add_argument("--methods", nargs="+", default=list(METHODS)[:-1], choices=METHODS)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--temperature", type=float, default=0.0, help="drawn drafts need one")
    parser.add_argument("--adapter", type=float, metavar="SCALE", help="with a random LoRA adapter of the model")
    parser.add_argument("--synthetic", type=float, nargs="+", help="acceptance by place, with random weights")
    args = parser.parse_args()
    if args.synthetic:
        args.tasks = ["random"]
    return args


def configured(method: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    if not args.synthetic:
        return method
    rates = args.synthetic[: method["num_speculative_tokens"]]
    return {**method, "rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}


def make(args: argparse.Namespace, speculative: dict[str, Any] | None) -> LLM:
    random = {"load_format": "dummy", "skip_tokenizer_init": True} if args.synthetic else {}
    has_adapter = args.adapter is not None
    common: dict[str, Any] = {"max_model_len": 1024, "kv_cache_memory": 512 << 20, "enable_lora": has_adapter}
    return LLM(args.model, speculative_config=speculative, **common, **random)


def measure(llm: LLM, task: str, batch: int, args: argparse.Namespace, lora: LoRARequest | None) -> tuple[float, float]:
    """Returns tokens per second for a batch of the task, and the share of accepted drafts."""
    llm.reset_prefix_cache()
    questions, extra = TASKS.get(task, ([], {}))
    # Random weights end an answer anywhere.
    params = SamplingParams(temperature=args.temperature, max_tokens=args.output_len, ignore_eos=not questions, **extra)
    started = time.perf_counter()
    if questions:
        chats = [[{"role": "user", "content": text}] for text in questions[:batch]]
        outputs = llm.chat(chats, params, use_tqdm=False, lora_request=lora)
    else:
        prompts = [[(i * 31 + j * 7) % 1000 for j in range(PROMPT_TOKENS)] for i in range(batch)]
        outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=lora)
    seconds = time.perf_counter() - started
    drafted = sum(output.num_draft_tokens for output in outputs)
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    return num_tokens / seconds, sum(output.num_accepted_tokens for output in outputs) / max(1, drafted)


def print_tables(ratios: dict[tuple[str, int], list[float]], batches: list[int]) -> None:
    """Prints for each kind of drafter the best number of drafts by batch size, none if plain decoding is faster."""
    for kind in dict.fromkeys(METHODS[name]["method"] for name, _ in ratios):
        table: dict[str, int] = {}
        for batch in sorted(batches):
            best = (1.0, 0)
            for (name, its_batch), found in ratios.items():
                if its_batch == batch and METHODS[name]["method"] == kind and "drawn" not in name:
                    best = max(best, (statistics.median(found), METHODS[name]["num_speculative_tokens"]))
            table[str(batch)] = best[1]
        print(f'{kind}: "num_speculative_tokens_per_batch_size": {table}')


if __name__ == "__main__":
    main()

"""Speculative decoding beside the plain run: tokens per second and acceptance, by task, method and batch size.

    python bench/speculation.py [--model demo] [--batch 1 8] [--rounds 3] [--methods ngram mtp ...] [--temperature 1]

The tasks repeat what stands in the prompt to different degrees: `lookup` answers questions about facts, `copy` repeats
a list, `json` turns a sentence into JSON, `story` goes on freely. Plain and drafted runs alternate; printed are the
plain run's median tokens per second, and for each method the ratio of the medians and the share of right drafts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from penstock import LLM, SamplingParams

NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Greta", "Hugo")
PLACES = ("red box", "blue cup", "old shed", "green bag", "tall jar", "white hut", "small bowl", "grey tent")
FACTS = " ".join(f"The key of {name} is in the {place}." for name, place in zip(NAMES, PLACES, strict=True))
TASKS = {
    "lookup": [f"{FACTS} Where is the key of {name}?" for name in NAMES],
    "copy": [f"Repeat this list: {', '.join(PLACES[i:] + PLACES[:i])}." for i in range(8)],
    "json": [f"Write this as JSON: name {name}, place {PLACES[i]}, count {i}." for i, name in enumerate(NAMES)],
    "story": [f"Tell a short story about {name}." for name in NAMES],
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--methods", nargs="+", default=list(METHODS)[:-1], choices=METHODS)
    parser.add_argument("--temperature", type=float, default=0.0, help="drawn drafts need one")
    args = parser.parse_args()
    settings = {"plain": None, **{name: METHODS[name] for name in args.methods}}
    engines = {name: LLM(args.model, max_model_len=1024, speculative_config=each) for name, each in settings.items()}
    params = SamplingParams(temperature=args.temperature, max_tokens=args.output_len, ignore_eos=True)
    print("| task | batch | " + " | ".join(engines) + " |\n" + "|---" * (len(engines) + 2) + "|")
    for task, questions in TASKS.items():
        for batch in args.batch:
            rates: dict[str, list[float]] = {name: [] for name in engines}
            accepted = {}
            for number in range(args.rounds + 1):
                for name, llm in engines.items():
                    seconds, accepted[name] = measure(llm, questions[:batch], params)
                    if number:
                        rates[name].append(batch * args.output_len / seconds)
            plain = statistics.median(rates["plain"])
            cells = [f"{plain:.0f}"]
            for name in list(engines)[1:]:
                rate = statistics.median(rates[name])
                cells.append(f"{rate / plain:.2f}x ({100 * accepted[name]:.0f} %)")
            print(f"| {task} | {batch} | " + " | ".join(cells) + " |", flush=True)


def measure(llm: LLM, questions: list[str], params: SamplingParams) -> tuple[float, float]:
    """Seconds for all questions together, and the share of drafts that was right."""
    llm.reset_prefix_cache()
    started = time.perf_counter()
    outputs = llm.chat([[{"role": "user", "content": text}] for text in questions], params, use_tqdm=False)
    seconds = time.perf_counter() - started
    drafted = sum(output.num_draft_tokens for output in outputs)
    return seconds, sum(output.num_accepted_tokens for output in outputs) / max(1, drafted)


if __name__ == "__main__":
    main()

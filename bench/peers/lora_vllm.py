"""vLLM (the CPU build) with LoRA adapters, for `bench/lora.py --vllm`: arguments are a JSON object on the command line.

Prints a line of JSON: by number of adapters, tokens/s of each batch and of a prompt, each measured once.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# By default it leaves one core free.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, sorted(os.sched_getaffinity(0)))))

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest


def main() -> None:
    given = json.loads(sys.argv[1])
    folders, rng = given["folders"], random.Random(0)
    common = {
        "model": given["shape"],
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": 2048,
        "dtype": "bfloat16",
        "enable_prefix_caching": False,
        "max_num_seqs": 64,
    }
    lora = {"enable_lora": True, "max_loras": len(folders), "max_lora_rank": given["rank"]} if folders else {}
    llm = LLM(**common, **lora)
    loras = [LoRARequest(f"adapter{number}", number + 1, folder) for number, folder in enumerate(folders)]

    def seconds(count: int, length: int, output: int, adapters: int) -> float:
        prompts = [
            {"prompt_token_ids": [rng.randrange(given["vocab_size"]) for _ in range(length)]} for _ in range(count)
        ]
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False)
        chosen = [loras[number % adapters] for number in range(count)] if adapters else None
        started = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False, lora_request=chosen)
        return time.perf_counter() - started

    found: dict[str, list[float]] = {}
    for adapters in given["adapters"]:
        seconds(1, given["prompt"], 2, adapters)
        rates = found[str(adapters)] = []
        for batch in given["batches"]:
            first = seconds(batch, given["prompt"], 1, adapters)
            whole = seconds(batch, given["prompt"], given["output"], adapters)
            rates.append(batch * (given["output"] - 1) / (whole - first))
        rates.append(given["prefill"] / seconds(1, given["prefill"], 1, min(1, adapters)))
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()

"""vLLM (the CPU build) for `bench/embeddings.py --vllm`: `MODEL DTYPE`. Each line of standard input is a JSON list of
texts, and each line of the output has the seconds that they took and their vectors.
"""

from __future__ import annotations

import json
import os
import sys
import time

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from vllm import LLM


def main() -> None:
    # Libraries print to standard output too, which must hold the answers only.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    llm = LLM(sys.argv[1], runner="pooling", dtype=sys.argv[2])
    for line in sys.stdin:
        texts = json.loads(line)
        started = time.perf_counter()
        outputs = llm.embed(texts, use_tqdm=False, tokenization_kwargs={"truncate_prompt_tokens": -1})
        seconds = time.perf_counter() - started
        answers.write(json.dumps([seconds, [each.outputs.embedding for each in outputs]]) + "\n")


if __name__ == "__main__":
    main()

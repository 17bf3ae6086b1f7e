"""What quantization costs in quality: the perplexity of a model with each way to store its weights, and its KV.

    python bench/quality.py [--model demo] [--text FILE] [--tokens 2048]

Perplexity is exp of the mean negative log probability of a text's tokens, in windows of --window tokens that do not
overlap. Without --text it is that of LICENSE and of additions, the built-in model's own subject. The bits are those
of a linear layer's weight, scales included.
"""

from __future__ import annotations

import argparse
import math
import random
from pathlib import Path
from typing import Any

from penstock import LLM, SamplingParams

WAYS: dict[str, dict[str, Any]] = {
    "as stored": {},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "int8, head int8": {"quantization": "int8", "quantize_head": "int8"},
    "int4, head int8": {"quantization": "int4", "quantize_head": "int8"},
    "int8, activations int8": {"quantization": "int8", "quantize_activations": "int8"},
    "int4, activations int8": {"quantization": "int4", "quantize_activations": "int8"},
    "as stored, KV int8": {"kv_cache_dtype": "int8"},
}
BITS = {None: 16, "int8": 8.5, "int4": 4.5}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--text", type=Path, action="append")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--window", type=int, default=256)
    args = parser.parse_args()
    texts = {path.name: path.read_text(encoding="utf-8") for path in args.text or ()} or default_texts()
    print("| weights | bits | " + " | ".join(f"perplexity of {name}" for name in texts) + " |")
    print("|---" * (len(texts) + 2) + "|")
    for way, arguments in WAYS.items():
        llm = LLM(args.model, max_model_len=args.window + 16, **arguments)
        found = [perplexity(llm, text, args.tokens, args.window) for text in texts.values()]
        llm.shutdown()
        bits = BITS[arguments.get("quantization")]
        print(f"| {way} | {bits:g} | " + " | ".join(f"{each:.4f}" for each in found) + " |", flush=True)


def default_texts() -> dict[str, str]:
    rng = random.Random(0)
    pairs = [(rng.randrange(1000), rng.randrange(1000)) for _ in range(400)]
    sums = "".join(
        f"<|im_start|>user\nWhat is {a} + {b}?<|im_end|>\n<|im_start|>assistant\n{a} + {b} = {a + b}.<|im_end|>\n"
        for a, b in pairs
    )
    license = Path(__file__).parents[1] / "LICENSE"
    return {license.name: license.read_text(encoding="utf-8"), "additions": sums}


def perplexity(llm: LLM, text: str, num_tokens: int, window: int) -> float:
    token_ids = llm.get_tokenizer().encode(text)[:num_tokens]
    windows = [token_ids[first : first + window] for first in range(0, len(token_ids), window)]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    total, count = 0.0, 0
    for output in llm.generate([each for each in windows if len(each) > 1], params, use_tqdm=False):
        for token, logprobs in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
            total -= logprobs[token].logprob
            count += 1
    return math.exp(total / count)


if __name__ == "__main__":
    main()

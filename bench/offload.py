"""What the OffloadingConnector gains and costs: time to the first token of a repeated prompt, and decode beside stores.

    python bench/offload.py [--model bench/shapes/qwen3-0.6b] [--prompt-len 1500] [--rounds 5] [--folder DIR]

Time to first token, in milliseconds: of an engine without a connector (recomputed), with the prompt in the CPU tier,
and with the prompt on disk (a new engine on the same folder, whose files are in the page cache). Then decode throughput
with and without stores, in alternation. Random weights; every load is forced, so that the cost model does not choose.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from penstock import LLM, SamplingParams

_SMALL_TIER = 64 << 20
SHAPE = Path(__file__).parent / "shapes" / "qwen3-0.6b"


def connector(folder: str | None, attestation: str, num_bytes: int) -> dict[str, Any]:
    options = {"cpu_bytes_to_use": num_bytes, "load_policy": "always", "attestation": attestation}
    if folder is not None:
        options["disk_path"] = folder
    return {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": options}


def make(model: str, transfer: dict[str, Any] | None) -> LLM:
    return LLM(
        model,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=2048,
        kv_cache_memory=1 << 30,
        kv_transfer_config=transfer,
    )


def milliseconds_to_first_token(llm: LLM, prompt: list[int], expected_cached: int) -> float:
    assert llm.reset_prefix_cache()
    started = time.perf_counter()
    (output,) = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
    elapsed = 1000 * (time.perf_counter() - started)
    assert output.num_cached_tokens == expected_cached, (output.num_cached_tokens, expected_cached)
    return elapsed


def first_tokens(args: argparse.Namespace, folder: str, attestation: str) -> dict[str, float]:
    prompt = [i * 7919 % 1000 for i in range(args.prompt_len)]
    cached = (args.prompt_len - 1) // 16 * 16
    times: dict[str, list[float]] = {"recomputed": [], "from memory": [], "from disk": []}
    plain = make(args.model, None)
    milliseconds_to_first_token(plain, prompt, 0)
    for number in range(args.rounds + 1):
        times["recomputed"].append(milliseconds_to_first_token(plain, prompt, 0))
        llm = make(args.model, connector(folder, attestation, 1 << 30))
        if number:
            times["from disk"].append(milliseconds_to_first_token(llm, prompt, cached))
        else:
            milliseconds_to_first_token(llm, prompt, 0)
        # Once more for what a tier's memory costs when it is touched for the first time.
        milliseconds_to_first_token(llm, prompt, cached)
        times["from memory"].append(milliseconds_to_first_token(llm, prompt, cached))
        llm.shutdown()
    plain.shutdown()
    return {name: statistics.median(each) for name, each in times.items()}


def decode(args: argparse.Namespace, folder: str, batch: int) -> list[float]:
    """Tokens per second without a connector, and what stores into memory, and on to disk, leave of them.

    The tier is so small that the first round fills it: memory that a process touches for the first time costs more.
    """
    transfers = (None, connector(None, "all", _SMALL_TIER), connector(folder, "all", _SMALL_TIER))
    engines = [make(args.model, transfer) for transfer in transfers]
    params = SamplingParams(temperature=0.0, max_tokens=args.output_len, ignore_eos=True)
    rates: list[list[float]] = [[] for _ in engines]
    for number in range(args.rounds + 1):
        prompts = [[(number * 131 + i * 17 + j) % 1000 for j in range(32)] for i in range(batch)]
        for rate, llm in zip(rates, engines, strict=True):
            started = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            rate.append(batch * args.output_len / (time.perf_counter() - started))
    for llm in engines:
        llm.shutdown()
    without, *beside = (statistics.median(rate[1:]) for rate in rates)
    return [without, *(rate / without for rate in beside)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(SHAPE))
    parser.add_argument("--prompt-len", type=int, default=1500)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="for the disk tier; a temporary one by default")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        print(f"Time to first token of {args.prompt_len} tokens, milliseconds:")
        print("| attestation | recomputed | from memory | from disk |\n|---|---|---|---|")
        for attestation in ("all", "sampled", "off"):
            found = first_tokens(args, f"{folder}/{attestation}", attestation)
            print(f"| {attestation} | " + " | ".join(f"{value:.0f}" for value in found.values()) + " |", flush=True)
        print("\nDecode, tokens per second:\n| batch | no stores | into memory | and to disk |\n|---|---|---|---|")
        for batch in (1, 8):
            without, memory, disk = decode(args, f"{folder}/decode", batch)
            print(f"| {batch} | {without:.1f} | {memory:.3f}x | {disk:.3f}x |", flush=True)


if __name__ == "__main__":
    main()

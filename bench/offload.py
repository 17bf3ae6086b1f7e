"""Benefit and cost of the OffloadingConnector: time to first token of a repeated prompt, and decoding during stores.

    python bench/offload.py [--model bench/shapes/qwen3-0.6b] [--prompt-len 1500] [--rounds 5] [--folder DIR]
                           [--attestation all sampled off] [--first-only | --decode-only]

Time to first token, in milliseconds: of an engine without a connector (recomputed), of one that stores the prompt, with
the prompt in the CPU tier, and with the prompt on disk (a new engine on the same folder); and how long after the stored
prompt's first token all files are written. Before, the bytes of the prompt's KV, and of the states of recurrent layers
if there are any, of which a hit loads one. Then decode throughput with and without stores, in
alternation. Random weights; every load is forced, so that the cost model does not choose.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from operator import truediv
from pathlib import Path
from typing import Any

from penstock import LLM, SamplingParams

_SMALL_TIER = 64 << 20
# Token ids that are valid for every shape.
VOCABULARY = 512
SHAPE = Path(__file__).parent / "shapes" / "qwen3-0.6b"


def connector(folder: str | None, attestation: str, num_bytes: int) -> dict[str, Any]:
    options = {"cpu_bytes_to_use": num_bytes, "load_policy": "always", "attestation": attestation}
    if folder is not None:
        options["disk_path"] = folder
    return {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": options}


def make(model: str, transfer: dict[str, Any] | None, max_model_len: int = 2048) -> LLM:
    return LLM(
        model,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=max_model_len,
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


def bytes_of(llm: LLM, folder: Path, num_tokens: int) -> str:
    """Describes what a prompt of so many tokens has stored in the folder."""
    info, files = llm.info, [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    text = f"{sum(files) / 1e6:.1f} MB in {len(files)} files; "
    text += f"{num_tokens * info.kv_cache_bytes / info.num_blocks / info.block_size / 1e6:.1f} MB of KV"
    if not info.num_states:
        return text
    state = info.state_cache_bytes / info.num_states
    return f"{text}, and states of {state / 1e6:.1f} MB each, kept every {info.checkpoint_interval} tokens"


def milliseconds_until_written(folder: Path) -> float:
    """Waits until the folder has not changed for two seconds; returns when it last did, from the call on."""
    started = changed = time.perf_counter()
    known = 0
    while time.perf_counter() - changed < 2:
        count = sum(path.is_file() for path in folder.rglob("*"))
        if count != known:
            known, changed = count, time.perf_counter()
        time.sleep(0.002)
    return 1000 * (changed - started)


def first_tokens(args: argparse.Namespace, folder: Path, attestation: str) -> dict[str, float]:
    prompt = [i * 7919 % VOCABULARY for i in range(args.prompt_len)]
    cached, length = (args.prompt_len - 1) // 16 * 16, max(2048, args.prompt_len + args.turn_len + 16)
    names = ("recomputed", "and stored", "until written", "from memory", "from disk")
    times: dict[str, list[float]] = {name: [] for name in names}
    turns = itertools.count()

    def turn() -> list[int]:
        """Returns the prompt and a new message, which no tier has."""
        first = next(turns)
        return prompt + [(first + 31 * i) % VOCABULARY for i in range(args.turn_len)]

    plain = make(args.model, None, length)
    milliseconds_to_first_token(plain, prompt, 0)
    for number in range(args.rounds):
        times["recomputed"].append(milliseconds_to_first_token(plain, turn(), 0))
        own = folder / str(number)
        transfer = connector(str(own), attestation, 1 << 30)
        llm = make(args.model, transfer, length)
        times["and stored"].append(milliseconds_to_first_token(llm, prompt, 0))
        times["until written"].append(milliseconds_until_written(own))
        if not number:
            print(f"{attestation}: {bytes_of(llm, own, cached)}", file=sys.stderr)
        # Repeated, because the first access to a tier's memory takes longer.
        milliseconds_to_first_token(llm, turn(), cached)
        times["from memory"].append(milliseconds_to_first_token(llm, turn(), cached))
        llm.shutdown()
        llm = make(args.model, transfer, length)
        times["from disk"].append(milliseconds_to_first_token(llm, turn(), cached))
        llm.shutdown()
    plain.shutdown()
    return {name: statistics.median(each) for name, each in times.items()}


def decode(args: argparse.Namespace, folder: str, batch: int) -> list[float]:
    """Returns tokens per second without a connector, with stores into memory, and with stores to disk.

    Each engine has a separate process, because two in one slow each other down; they alternate.
    """
    transfers = (None, connector(None, "all", _SMALL_TIER), connector(folder, "all", _SMALL_TIER))
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for transfer in transfers:
        pipe, other = context.Pipe()
        processes.append(context.Process(target=serve_rounds, args=(args.model, transfer, args.output_len, other)))
        processes[-1].start()
        pipes.append(pipe)
    rates: list[list[float]] = [[] for _ in transfers]
    for number in range(args.rounds + 1):
        prompts = [[(number * 131 + i * 17 + j) % VOCABULARY for j in range(32)] for i in range(batch)]
        for rate, pipe in zip(rates, pipes, strict=True):
            pipe.send(prompts)
            rate.append(batch * args.output_len / pipe.recv())
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send([])
        process.join()
    # The first round is the warm-up.
    ratios = [statistics.median(map(truediv, rate[1:], rates[0][1:])) for rate in rates[1:]]
    return [statistics.median(rates[0][1:]), *ratios]


def serve_rounds(model: str, transfer: dict[str, Any] | None, output_len: int, pipe: Connection) -> None:
    """Returns the seconds for each list of prompts that arrives, until an empty one does."""
    llm = make(model, transfer)
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    while prompts := pipe.recv():
        started = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        pipe.send(time.perf_counter() - started)
    llm.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(SHAPE))
    parser.add_argument("--prompt-len", type=int, default=1500)
    parser.add_argument("--turn-len", type=int, default=0, help="tokens behind a prompt that is recomputed or loaded")
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--attestation", nargs="+", default=["all", "sampled", "off"], help="for the first tokens")
    parser.add_argument("--decode-only", action="store_true", help="leave out the times to the first token")
    parser.add_argument("--first-only", action="store_true", help="leave out decoding")
    parser.add_argument("--folder", help="for the disk tier; a temporary one by default")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder, ignore_cleanup_errors=True) as folder:
        if not args.decode_only:
            print(f"Time to first token of {args.prompt_len} tokens, milliseconds:")
            print("| attestation | recomputed | and stored | until written | from memory | from disk |\n|" + 6 * "---|")
            for attestation in args.attestation:
                found = first_tokens(args, Path(folder) / attestation, attestation)
                print(f"| {attestation} | " + " | ".join(f"{value:.0f}" for value in found.values()) + " |", flush=True)
        if args.first_only:
            return
        print("\nDecode, tokens per second:\n| batch | no stores | into memory | and to disk |\n|---|---|---|---|")
        for batch in (1, 8):
            without, memory, disk = decode(args, f"{folder}/decode", batch)
            print(f"| {batch} | {without:.1f} | {memory:.3f}x | {disk:.3f}x |", flush=True)


if __name__ == "__main__":
    main()

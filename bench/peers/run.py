"""Penstock and other engines on one machine, in alternation, and the table of medians.

    python bench/peers/run.py --rounds 3 penstock=.venv/bin/python vllm=VLLM_VENV/bin/python \
        llama_cpp=LLAMA_VENV/bin/python transformers=.venv/bin/python

Each engine has its own interpreter, because they cannot be installed together. `--shape` names a folder with a
config.json; the weights are random. `penstock+int8=...` is Penstock with `--quantize-activations int8`. `--layers`
leaves out the layers after that many. The files of the weights go into a folder inside `--keep`, where the next run
finds them, or are deleted in the end.

`--start` has the time from the start of an engine's process to the first token of a prompt of 128, and its resident
memory in GB, in the place of rates.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from contextlib import nullcontext
from pathlib import Path

HERE = Path(__file__).parent
WEIGHTS = ("bf16", "q8_0", "q6_k", "q4_0", "q4_k_m", "gptq", "w8a8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", nargs="+", metavar="ENGINE=PYTHON")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shape", type=Path, default=HERE.parent / "shapes" / "qwen3-0.6b")
    parser.add_argument("--layers", type=int)
    parser.add_argument(
        "--weights", default="bf16", choices=WEIGHTS, help="those of GGUF files with llama_cpp named first"
    )
    parser.add_argument("--batches", nargs="+", default=["1", "8", "32"], help="8@4096: prompts of 4,096 tokens")
    parser.add_argument("--keep", type=Path, metavar="FOLDER")
    parser.add_argument("--start", action="store_true")
    args = parser.parse_args()
    batches = ["start"] if args.start else args.batches
    tables = {"tokens/s": [*(f"decode_b{batch}" for batch in batches), "prefill"]}
    tables["processor time per token, ms"] = [f"processor_b{batch}" for batch in batches]
    if args.start:
        tables = {"start": ["first_token_s", "peak_gb", "resident_gb", "anonymous_gb"]}
    config = json.loads((args.shape / "config.json").read_text())
    config["num_hidden_layers"] = args.layers or config["num_hidden_layers"]
    engines = dict(engine.split("=", 1) for engine in args.engines)
    results: dict[str, list[dict[str, float]]] = {engine: [] for engine in engines}
    with nullcontext(args.keep) if args.keep else tempfile.TemporaryDirectory() as folder:
        shape = Path(folder) / f"{args.shape.name}-{config['num_hidden_layers']}"
        shape.mkdir(parents=True, exist_ok=True)
        (shape / "config.json").write_text(json.dumps(config))
        for number in range(args.rounds):
            for engine, python in engines.items():
                script, _, activations = engine.partition("+")
                command = [python, str(HERE / f"run_{script}.py"), str(shape), args.weights, *batches]
                environment = {**os.environ, "ACTIVATIONS": activations}
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
                results[engine].append(json.loads(done.stdout.strip().splitlines()[-1]))
                print(f"round {number + 1}: {json.dumps(results[engine][-1])}", flush=True)
    for title, names in tables.items():
        print(f"\n| {title}, median of {args.rounds} | " + " | ".join(names) + " |")
        print("|---" * (len(names) + 1) + "|")
        for engine, rows in results.items():
            medians = [statistics.median(row[name] for row in rows) for name in names]
            print(f"| {engine} | " + " | ".join(f"{median:g}" for median in medians) + " |")


main()

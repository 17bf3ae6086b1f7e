"""Servers under the same load, in alternation: Penstock's and vLLM's, with random weights in one shape.

    python bench/peers/serve.py --rounds 2 penstock=.venv/bin/python vllm=VLLM_VENV/bin/python

The load is `penstock bench serve` with random prompts of 128 tokens and 64 output tokens, at concurrency 1, 8 and 32.
The model folder is the shape's config.json with the built-in model's tokenizer; ids beyond its vocabulary have no text,
for either server. vLLM's CPU build wants its OpenMP preloaded: VLLM_PRELOAD=libiomp5.so names it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from threading import Event

HERE = Path(__file__).parent
TOKENIZER = HERE.parents[1] / "src" / "penstock" / "demo"
PORT = 8765
LOADS = ((1, 8), (8, 48), (32, 96))  # concurrency, requests
KEYS = ("output_throughput", "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_itl_ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", nargs="+", metavar="ENGINE=PYTHON")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--shape", type=Path, default=HERE.parent / "shapes" / "qwen3-0.6b")
    args = parser.parse_args()
    engines = dict(engine.split("=", 1) for engine in args.engines)
    results: dict[tuple[str, int], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(args.shape / "config.json", folder)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(TOKENIZER / name, folder)
        for _ in range(args.rounds):
            for engine, python in engines.items():
                for concurrency, figures in measure(engine, python, folder):
                    results.setdefault((engine, concurrency), []).append(figures)
                    print(engine, concurrency, json.dumps(figures), flush=True)
    print("\n| server | concurrency | " + " | ".join(KEYS) + " |\n" + "|---" * (len(KEYS) + 2) + "|")
    for (engine, concurrency), rows in sorted(results.items(), key=lambda item: (item[0][1], item[0][0])):
        medians = [f"{statistics.median(row[key] for row in rows):.1f}" for key in KEYS]
        print(f"| {engine} | {concurrency} | " + " | ".join(medians) + " |")


def measure(engine: str, python: str, folder: str) -> list[tuple[int, dict[str, float]]]:
    server = subprocess.Popen(
        command(engine, python, folder), env=environment(engine), start_new_session=True, stdout=subprocess.DEVNULL
    )
    try:
        wait_until_ready(server)
        load(1, 2, folder)
        return [(concurrency, load(concurrency, count, folder)) for concurrency, count in LOADS]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)


def command(engine: str, python: str, folder: str) -> list[str]:
    shared = ["--port", str(PORT), "--load-format", "dummy", "--max-model-len", "2048", "--max-num-seqs", "64"]
    shared += ["--dtype", "bfloat16", "--no-enable-prefix-caching"]
    if engine == "penstock":
        return [python, "-m", "penstock.cli.main", "serve", folder, *shared]
    # The package of vLLM's CPU build has another name, which its own command does not find.
    return [python, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, *shared]


def environment(engine: str) -> dict[str, str]:
    if engine == "penstock":
        return dict(os.environ)
    preload = {"LD_PRELOAD": os.environ["VLLM_PRELOAD"]} if "VLLM_PRELOAD" in os.environ else {}
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_LOGGING_LEVEL": "ERROR"}
    return {**os.environ, **preload, **offline}


def wait_until_ready(server: subprocess.Popen[bytes], seconds: float = 600.0) -> None:
    for _ in range(int(seconds)):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{PORT}/v1/models", timeout=5).close()
        except (urllib.error.URLError, ConnectionError):
            assert server.poll() is None, "the server ended"
            Event().wait(1.0)
        else:
            return
    raise AssertionError("the server did not become ready")


def load(concurrency: int, count: int, folder: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as results:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "penstock.cli.main", "bench", "serve", "--port", str(PORT)),
                *("--num-prompts", str(count), "--max-concurrency", str(concurrency), "--tokenizer", folder),
                *("--random-input-len", "128", "--random-output-len", "64", "--ignore-eos", "--temperature", "0"),
                *("--save-result", "--result-dir", results, "--result-filename", "result.json", "--disable-tqdm"),
            ],
            check=True,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        result = json.loads((Path(results) / "result.json").read_text(encoding="utf-8"))
    assert result["completed"] == count, result
    return {key: result[key] for key in KEYS}


if __name__ == "__main__":
    main()

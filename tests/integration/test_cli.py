"""The command line as a user runs it, in real processes with real pipes."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.kernels import native
from tests.processes import started

PENSTOCK = [sys.executable, "-m", "penstock.cli.main"]
ENGINE = ["--max-model-len", "512", "--kv-cache-memory", "20MB"]


def run(*arguments: str, stdin: str | bytes = "") -> subprocess.CompletedProcess[bytes]:
    data = stdin.encode() if isinstance(stdin, str) else stdin
    return subprocess.run([*PENSTOCK, *arguments], input=data, capture_output=True, timeout=120, check=False)


def assert_start_lines(text: str) -> None:
    """Asserts the lines that every command with an engine prints at the start."""
    assert text.startswith("Loading demo ...\n")
    assert re.search(r"^  model +demo, bfloat16$", text, re.MULTILINE)
    kernels = "|".join((*native.PREFERENCE, "torch"))
    assert re.search(rf"^  device +cpu, ({kernels}) kernels, \d+ threads?$", text, re.MULTILINE)
    assert re.search(r"^  context +512 tokens$", text, re.MULTILINE)
    assert re.search(r"^  KV cache +0.02 GiB of bfloat16, [\d,]+ tokens in \d+ blocks$", text, re.MULTILINE)
    assert re.search(r"^  loaded in +\d+\.\d s$", text, re.MULTILINE)


def test_generate_streams_text_and_reports_figures() -> None:
    done = run("generate", "demo", "--chat", "--prompt", "What is 123 + 456?", *ENGINE)
    assert done.returncode == 0, done.stderr
    assert_start_lines(done.stderr.decode())
    assert b"579" in done.stdout
    assert re.search(rb"prompt tokens, \d+ generated \(stop\): [\d.]+ tokens/s; first token", done.stderr)
    assert b"tokens/s" not in done.stdout


def test_generate_reads_standard_input_and_writes_json() -> None:
    done = run("generate", "--json", "--max-tokens", "5", *ENGINE, stdin="Once upon a time\n")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["prompt"] == "Once upon a time"
    assert len(result["outputs"][0]["token_ids"]) == 5


@pytest.mark.spread(4)
@pytest.mark.parametrize(
    ("arguments", "stdin", "named"),
    [
        (["generate"], "", "the prompt is empty"),
        (["generate"], b"\xff\xfe\x00bad", "not UTF-8"),
        (["generate", "--prompt", "x", "--temperature", "nan"], "", "temperature must be"),
        (["generate", "--prompt", "x", "--model", "./nowhere"], "", "no folder"),
        (["generate", "--prompt", "x", "--max-model-len", "9999999"], "", "max_model_len"),
        (["bench", "latency", "--batch-size", "0"], "", "batch-size"),
        (["bench", "throughput", "--input-len", "600", *ENGINE], "", "max_model_len=512"),
        (["bench", "throughput", "--output-len", "8", "--runner", "pooling", *ENGINE], "", "generates no tokens"),
    ],
)
def test_errors_are_the_last_line_with_exit_code_2(arguments: list[str], stdin: str | bytes, named: str) -> None:
    done = run(*arguments, stdin=stdin)
    assert done.returncode == 2
    # Errors found only after the start of the engine follow the lines of the start.
    *before, last = done.stderr.decode().strip().splitlines()
    assert named in last
    assert all(line.startswith(("Loading ", "  ")) for line in before)


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        (
            ["throughput", "--num-prompts", "4"],
            {"elapsed_time", "num_requests", "total_num_tokens", "requests_per_second", "tokens_per_second"},
        ),
        (["latency", "--batch-size", "2", "--num-iters", "2"], {"avg_latency", "latencies", "percentiles"}),
    ],
)
def test_bench_of_a_pooling_engine(kind: list[str], keys: set[str]) -> None:
    done = run("bench", *kind, "--input-len", "500", "--runner", "pooling", *ENGINE)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result.keys() == keys
    assert result.get("total_num_tokens", 2000) == 2000


def test_a_closed_pipe_ends_quietly() -> None:
    command = " ".join([*PENSTOCK, "generate", "--prompt", "Once", "--max-tokens", "200", *ENGINE])
    done = subprocess.run(f"{command} | head -c 5", shell=True, capture_output=True, timeout=120, check=False)
    assert len(done.stdout) == 5
    assert b"Traceback" not in done.stderr


def test_an_interrupt_ends_with_its_exit_code() -> None:
    arguments = ["generate", "--prompt", "Once upon a time", "--max-tokens", "400", *ENGINE]
    with started([*PENSTOCK, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(10)
        process.send_signal(signal.SIGINT)
        stderr = process.stderr.read()
        assert process.wait(timeout=30) == 130
    assert b"Traceback" not in stderr


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        (
            ["throughput", "--num-prompts", "4"],
            {"elapsed_time", "num_requests", "total_num_tokens", "requests_per_second", "tokens_per_second"},
        ),
        (["latency", "--batch-size", "2", "--num-iters", "2"], {"avg_latency", "latencies", "percentiles"}),
    ],
)
def test_bench_reports_vllms_keys(kind: list[str], keys: set[str], tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    done = run("bench", *kind, "--input-len", "20", "--output-len", "8", "--output-json", str(file), *ENGINE)
    assert done.returncode == 0, done.stderr
    assert keys <= json.loads(done.stdout).keys()
    assert json.loads(file.read_text()) == json.loads(done.stdout)

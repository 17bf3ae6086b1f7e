"""The command line as a user meets it: real processes, real pipes, a real terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import started

PENSTOCK = [sys.executable, "-m", "penstock.cli.main"]
ENGINE = ["--max-model-len", "512", "--kv-cache-memory", "20000000"]


def run(*arguments: str, stdin: str | bytes = "") -> subprocess.CompletedProcess[bytes]:
    data = stdin.encode() if isinstance(stdin, str) else stdin
    return subprocess.run([*PENSTOCK, *arguments], input=data, capture_output=True, timeout=120, check=False)


def test_generate_streams_text_and_reports_figures() -> None:
    done = run("generate", "--chat", "--prompt", "What is 123 + 456?", *ENGINE)
    assert done.returncode == 0, done.stderr
    assert b"579" in done.stdout
    assert re.search(rb"prompt tokens, \d+ generated \(stop\): [\d.]+ tokens/s; first token", done.stderr)
    assert b"tokens/s" not in done.stdout


def test_generate_reads_standard_input_and_writes_json() -> None:
    done = run("generate", "--json", "--max-tokens", "5", *ENGINE, stdin="Once upon a time\n")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["prompt"] == "Once upon a time"
    assert len(result["outputs"][0]["token_ids"]) == 5


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
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(arguments: list[str], stdin: str | bytes, named: str) -> None:
    done = run(*arguments, stdin=stdin)
    assert done.returncode == 2
    assert named in done.stderr.decode()
    assert len(done.stderr.decode().strip().splitlines()) == 1


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


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """Both ends of a terminal: the one that a test reads and writes, and the one for a process."""
    ends = pty.openpty()
    yield ends
    for end in ends:
        os.close(end)


def test_chat_in_a_terminal(terminal: tuple[int, int]) -> None:
    controller, end = terminal
    seen = b""

    def read_until(wanted: bytes) -> None:
        nonlocal seen
        while wanted not in seen:
            assert select.select([controller], [], [], 60)[0], f"waited for {wanted!r} after {seen!r}"
            seen += os.read(controller, 4096)
        seen = seen.split(wanted, 1)[1]

    command = [*PENSTOCK, "chat", "--temperature", "0", *ENGINE]
    with started(command, stdin=end, stdout=end, stderr=end) as process:
        read_until(b"> ")
        os.write(controller, b"What is 123 + 456?\n")
        read_until(b"579")
        read_until(b"> ")
        # An interrupt that comes before readline waits for input is only seen with the next one, as at any prompt.
        for _ in range(12):
            process.send_signal(signal.SIGINT)
            if select.select([controller], [], [], 5)[0]:
                break
        read_until(b"> ")
        os.write(controller, b"/clear\n")
        read_until(b"> ")
        os.write(controller, b"/exit\n")
        assert process.wait(timeout=30) == 0


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

"""Every script that the documentation names runs, with its smallest arguments.

A script that takes long even so is also started and ended after some seconds: it must not have failed by then.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TINY = "bench/shapes/tiny"
PENSTOCK = f"penstock={sys.executable}"
LIMIT_S = 300
START_S = 10


@dataclass(frozen=True)
class Trial:
    """The arguments of a script, whose output must contain `output`. With `seconds` it may be ended after that time.

    `codes` are the exit codes that do not count as failures.
    """

    arguments: tuple[str, ...]
    output: str
    seconds: float | None = None
    codes: tuple[int, ...] = (0,)


QUICK = {
    "bench/profile_step.py": Trial((TINY, "--quick"), "rest "),
    "bench/lora.py": Trial((TINY, "--quick", "--rounds", "1"), "adapters |"),
    "bench/gpu_tune.py": Trial(("--list",), "decode attention"),
    "bench/host_cost.py": Trial(("--rounds", "2", "--only", "report"), "encoded"),
    "bench/experts.py": Trial(
        ("--model", "bench/shapes/tiny-experts", "--batches", "1", "3", "--rounds", "5", "--parts", "--megabytes", "4"),
        "of floor",
    ),
    "bench/collectives.py": Trial(("--rounds", "1", "--calls", "2"), "| gather [1, 151936] float32 |"),
    "bench/embeddings.py": Trial(("--count", "20", "--rounds", "1", "--pairs", "20"), "times as fast"),
    "bench/route.py": Trial(
        (
            *("--requests", "60", "--concurrency", "8", "--conversations", "2", "--turns", "2"),
            *("--only", "overhead", "--only", "replicas", "--only", "storm"),
        ),
        "Nothing was lost",
    ),
    "bench/transports.py": Trial(("--rounds", "1", "--megabytes", "4"), "sockets"),
    "bench/quality.py": Trial(("--tokens", "64"), "| int4, head int8 |"),
}
SLOW = {
    "bench/balancing.py": Trial(
        ("--layers", "1", "--batch", "4", "--prompt", "8", "--steps", "4", "--rounds", "1", "--interval", "8"),
        "times as fast",
    ),
    "bench/shared_experts.py": Trial(("--batches", "1", "--steps", "5", "--rounds", "1"), "| both | 1 |"),
    "bench/ranks.py": Trial(
        ("--model", "demo", "--sizes", "1x1", "2x1", "--batches", "1", "--rounds", "1"), "MiB of each"
    ),
    "bench/busy.py": Trial(("--neighbours", "0", "--batches", "1", "--rounds", "1"), "default / best"),
    "bench/disaggregation.py": Trial(
        ("transfers", "siblings", "--rounds", "1", "--lengths", "65"), "| tokens | loaded and the rest computed"
    ),
    "bench/kernels/latent.py": Trial(("--seconds", "0.01", "--prefill", "64", "--threads", "1"), "absorbed"),
    "bench/kernels/attention.py": Trial(("--seconds", "0.01", "--threads", "1"), "us"),
    "bench/kernels/linear.py": Trial(
        ("--shapes", "64x64", "--rows", "1", "--seconds", "0.1", "--working-set", "1", "--threads", "1"), "M=1"
    ),
    "bench/kernels/recurrent.py": Trial(
        ("--seconds", "0.01", "--prompts", "16", "--batches", "1", "--threads", "1"), "prompt of 16"
    ),
    "bench/kernels/rows.py": Trial(("--rows", "1", "--seconds", "0.01", "--threads", "1"), "add_rms_norm rows=1"),
    "bench/kv_cache.py": Trial(("--model", TINY, "--context", "64", "--rounds", "1"), "int8"),
    "bench/offload.py": Trial(
        ("--model", TINY, "--prompt-len", "64", "--output-len", "4", "--rounds", "1"), "from memory"
    ),
    "bench/peers/perplexity.py": Trial(("prepare", "OUT", "--text", "LICENSE"), "w8a8"),
    "bench/peers/run.py": Trial((PENSTOCK, "--rounds", "1"), "", seconds=30),
    "bench/peers/run_penstock.py": Trial(("src/penstock/demo", "bf16", "1"), "decode_b1"),
    "bench/quantized.py": Trial(
        ("--shapes", "64x64", "--kinds", "int4", "--rows", "1", "--seconds", "0.01", "--working-set", "1"), ""
    ),
    "bench/peers/serve.py": Trial(
        (f"penstock={sys.executable}", "--rounds", "1", "--shape", "src/penstock/demo"), "", seconds=60
    ),
    "bench/route_soak.py": Trial(("--minutes", "0.1", "--streams", "2"), "Nothing was wrong"),
    "bench/serve_overhead.py": Trial(("--concurrency", "1", "--output-len", "4", "--rounds", "1"), "1"),
    "bench/speculation.py": Trial(
        ("--rounds", "1", "--batch", "1", "--output-len", "4", "--methods", "ngram K=3", "--tasks", "story"), "ngram"
    ),
    "examples/demo_model/build.py": Trial(
        ("--out", "OUT", "--tokens", "20000", "--processes", "1", "--minutes", "0.05", "--batch-rows", "1"),
        "data:",
        seconds=60,
    ),
    "examples/demo_model/eagle3.py": Trial(
        ("--out", "OUT", "--tokens", "2000", "--processes", "1", "--minutes", "0.05", "--batch-rows", "1"),
        "",
        seconds=60,
    ),
    # It returns 1 if the model does not reach the thresholds of the recipe.
    "examples/demo_model/evaluate.py": Trial(
        ("--model", "src/penstock/demo", "--items", "1", "--free", "1"), "evaluate:", seconds=60, codes=(0, 1)
    ),
}
# These have their own tests.
ELSEWHERE = {
    "bench/gpu.py": "tests/integration/test_bench_gpu.py",
    "bench/null_gpu.py": "tests/null_gpu/test_command.py",
    "examples/example_connector.py": "tests/unit/test_connector_sides.py",
    "bench/pd_faults.py": "tests/integration/test_pd_faults.py",
}


def scripts_of_the_documentation() -> set[str]:
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")]
    found = {
        name for page in pages for name in re.findall(r"\b(?:bench|examples)/[\w/]+\.py\b", page.read_text("utf-8"))
    }
    # A script that is named without its folder is also named with it.
    return {name for name in found if (ROOT / name).parent.is_dir()}


def test_every_script_of_the_documentation_has_a_trial() -> None:
    named = scripts_of_the_documentation()
    assert named <= {*QUICK, *SLOW, *ELSEWHERE}
    for name in named:
        assert (ROOT / name).is_file(), f"the documentation names {name}, which does not exist"
    for name, test in ELSEWHERE.items():
        assert Path(name).name in (ROOT / test).read_text(encoding="utf-8")


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends a script and its children: by an interrupt, so that it ends the servers that it has started, or by force."""
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(60)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def try_script(name: str, trial: Trial, folder: Path) -> None:
    arguments = [str(folder / "out") if argument == "OUT" else argument for argument in trial.arguments]
    output = folder / "output.txt"
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, name, *arguments],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        try:
            code = process.wait(trial.seconds or LIMIT_S)
        except subprocess.TimeoutExpired:
            code = None
        text = output.read_text(encoding="utf-8", errors="replace")
        end(process)
    assert code in trial.codes or (code is None and trial.seconds is not None), (
        f"{name} ended with {code}:\n{text[-2000:]}"
    )
    assert trial.output in text, text[-2000:]
    assert "Traceback" not in text, text[-2000:]


@pytest.mark.spread(2)
@pytest.mark.parametrize("name", QUICK)
def test_a_quick_script_runs(name: str, tmp_path: Path) -> None:
    try_script(name, QUICK[name], tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name", SLOW)
def test_a_slow_script_starts(name: str, tmp_path: Path) -> None:
    try_script(name, replace(SLOW[name], output="", seconds=START_S), tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SLOW)
def test_a_slow_script_runs(name: str, tmp_path: Path) -> None:
    try_script(name, SLOW[name], tmp_path)

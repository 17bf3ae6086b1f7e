"""Runs `bench/gpu.py` to its end on a CPU with a tiny model: its figures are meaningless there, but reported."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

BENCH = Path(__file__).parents[2] / "bench"
QUICK = ("--device", "cpu", "--quick")


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCH / "gpu.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def lines(file: Path) -> dict[str, dict[str, Any]]:
    found = [json.loads(line) for line in file.read_text().splitlines()]
    assert all(line["value"] > 0 for line in found if "value" in line)
    return {line["key"]: line for line in found}


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], dict[str, dict[str, Any]]]]:
    """Runs one group in this process, as the command does in a separate one, and returns its lines."""
    monkeypatch.syspath_prepend(str(BENCH))
    import gpu

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def run(name: str) -> dict[str, dict[str, Any]]:
        shape = str(BENCH / "shapes" / "tiny") if gpu.GROUPS[name].has_shape else ""
        job = {"group": name, "shape": shape, "device": "cpu", "quick": True, "minutes": 0.01}
        gpu.run_job({**job, "output": str(tmp_path / "lines"), "work": str(tmp_path)})
        return lines(tmp_path / "lines")

    yield run
    torch.set_num_threads(num_threads)


def test_groups_run_in_separate_processes_and_give_one_table(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    places = ("--output", str(file), "--work", str(tmp_path / "work"))
    done = bench(*QUICK, *places, "--only", "decode")
    assert done.returncode == 0, done.stderr
    assert {"decode_b1", "decode_b2", "decode_end"} == set(lines(file))
    # A group that takes too long is ended and reported, and earlier results stay.
    done = bench(*QUICK, *places, "--only", "eager", "--limit", "0.1")
    assert done.returncode == 1
    assert "took longer" in lines(file)["eager_end"]["error"]
    table = done.stdout.split("relative to vLLM")[1]
    assert all(text in table for text in ("| decode_b1 |", "ms/step", "CPU", "| eager |", "took longer than 0 s"))
    # Groups that have ended, successfully or not, do not run again; groups without time left are named.
    done = bench(*QUICK, *places, "--only", "decode,eager,soak", "--resume", "--within", "0.01")
    assert done.returncode == 0
    assert "== " not in done.stdout
    assert done.stdout.endswith("--resume continues with soak tiny\n")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--only", "decode,speed"], "--only speed: the groups are decode"),
        (["--only", ","], "names no group"),
        (["--shapes", "nowhere"], "--shapes nowhere: there is no config.json"),
        (["--minutes", "-1"], "--minutes"),
        (["--output", "nowhere/file"], "nowhere/file cannot be written"),
    ],
)
def test_bad_arguments_are_named(arguments: list[str], named: str) -> None:
    done = bench(*QUICK, *arguments)
    assert done.returncode == 2
    assert named in done.stderr.splitlines()[-1]


@pytest.mark.exhaustive
def test_speed(group: Callable[[str], dict[str, dict[str, Any]]]) -> None:
    for name in ("decode", "deterministic", "eager", "prefill", "mix"):
        found = group(name)
    assert found["decode_b2"]["steps"] == 33
    assert found["decode_b2"]["replayed"] == 0
    assert {"deterministic_b1", "deterministic_b2", "eager_b1", "prefill"} < set(found)
    assert found["mix"]["value"] == sorted(found["mix"]["runs"])[1]


def test_profile(group: Callable[[str], dict[str, dict[str, Any]]]) -> None:
    found = group("profile")
    assert {"read_bandwidth", "profile_b1", "profile_b2", "profile_prefill"} == set(found)
    step = found["profile_b1"]
    assert 0 < step["kernels_us"] <= step["value"]
    assert 0 <= step["idle_us"] < step["value"]
    assert 0 < step["floor_us"] < step["value"]
    assert sum(kernel["us"] for kernel in step["kernels"]) <= 1.01 * step["kernels_us"]


@pytest.mark.long
def test_start(group: Callable[[str], dict[str, dict[str, Any]]]) -> None:
    found = group("start")
    for cache in ("cold", "warm"):
        ready, first = found[f"start_{cache}_ready"], found[f"start_{cache}_first_token"]
        assert ready["value"] < first["value"]
        assert abs(sum(ready["stages"].values()) - ready["ready_s"]) < 0.01
        assert {"import", "weights", "KV cache", "runner", "warm-up", "rest"} <= set(ready["stages"])
        assert ready["bytes"] > 2 * 2 * 512 * 64


@pytest.mark.exhaustive
def test_tokens(group: Callable[[str], dict[str, dict[str, Any]]]) -> None:
    found = group("tokens")
    assert len(found) == 14
    assert {line["text"] for line in found.values()} == {"equal"}


def test_differing_tokens_are_reported(group: Callable[[str], Any], tmp_path: Path) -> None:
    from gpu_parts.common import Job
    from gpu_parts.tokens import _compare

    job = Job("tokens", "", "cpu", True, str(tmp_path / "lines"), "", 0)
    # A failed request has no tokens or only the first ones.
    _compare(job, "tokens", [[1, 2], [3, 4], [5, 6]], ([[1, 2], [3, 5], [5]], False))
    found = lines(tmp_path / "lines")["tokens"]
    assert (found["value"], found["unit"]) == (1, "of 3 equal")
    expected = "first difference: request 1 token 1 of 2, request 2 token 1 of 2; NOT EXERCISED"
    assert found["text"].startswith(expected)


@pytest.mark.exhaustive
def test_speculation(group: Callable[[str], dict[str, dict[str, Any]]]) -> None:
    found = group("speculation")
    assert found["speculation_plain_b1"]["tokens_per_step"] == 1
    drafted = found["speculation_mtp3_b1"]
    assert drafted["tokens_per_step"] > 1
    assert drafted["accepted_tokens_per_verification"] > 0
    assert drafted["ratio_to_plain"] == drafted["value"] / found["speculation_plain_b1"]["value"]


def test_soak(group: Callable[[str], dict[str, dict[str, Any]]]) -> None:
    found = group("soak")["soak"]
    assert found["batches"] >= len(found["samples"]) >= 1
    assert found["growth_mib"]["host_peak"] >= 0


def test_the_union_of_spans(group: Callable[[str], Any]) -> None:
    from gpu_parts.profile import union

    assert union([(0, 2), (1, 3), (5, 6), (5, 5.5)]) == 4
    assert union([]) == 0

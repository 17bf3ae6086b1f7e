"""`penstock verify --soak` passes on the built-in model, and names the place where a planted fault began."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from penstock.cli import verify as verify_command
from penstock.cli.main import main
from penstock.config.engine import EngineArgs
from penstock.kernels import native
from penstock.utils.errors import ConfigError
from penstock.verify import soak as soak_module
from penstock.verify.recording import Plan, Recording, Round, Start, first_difference, row_key, save_rows
from penstock.verify.soak import ALL, SoakResult, soak
from tests.integration.checkpoints import make_checkpoint

PROMPTS = ("one two three four five six seven eight", "x", "The quick brown fox jumps over the lazy dog. " * 2)
SECONDS = 1 / 60


def run(*child: str, seed: int = 5) -> SoakResult:
    command = [sys.executable, "-m", *child]
    return soak(EngineArgs(), PROMPTS, 6, 2 * SECONDS, lambda tally: None, seed=seed, child=command)


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(soak_module.tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.long
def test_the_built_in_model_passes(folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS), encoding="utf-8")
    assert main(["verify", "--soak", "0.05", "--max-tokens", "6", "--prompts", str(prompts)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith(ALL)
    rows = {line[:38].strip(): line[38:].split() for line in lines[1:] if line[38:].split()}
    # Nine or ten digests of each of about 60 tokens; tokens found in the cache are not computed again.
    assert int(rows[ALL][2].replace(",", "")) > 300
    assert lines[-1].startswith("Every row agrees, and each of the 5")
    prompts.unlink()
    assert not list(folders.iterdir()), "recordings that agree are not kept"


@pytest.mark.long
def test_a_model_with_recurrent_layers_passes(tmp_path: Path) -> None:
    args = EngineArgs.from_kwargs(model=str(make_checkpoint("lfm2", tmp_path)), skip_tokenizer_init=True)
    # With this seed the first process runs alone, and everything that moves states occurs in it.
    result = soak(args, (), 6, SECONDS, lambda tally: None, seed=48)
    assert result.finding is None
    assert {"asynchronous scheduling", "prompts in chunks", "prefix hits", "preemptions"} <= set(result.tallies)


def test_a_fault_in_one_layer_is_named(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run("tests.integration.soak_planted", "layer")
    finding = result.finding
    assert finding is not None
    assert finding.place is not None
    assert (finding.place.what, finding.place.request, finding.place.position) == ("layer 3", 2, 20)
    assert sorted(path.name for path in finding.folder.iterdir()) == [
        "log.txt", "plan.json", "rows.npy", "start.json",
    ]  # fmt: skip
    assert finding.reference.is_dir()
    described = verify_command._describe_finding(finding)
    assert "first in   layer 3" in described
    assert "at         position 20 of request 2" in described
    assert f"recorded   {finding.folder}" in described
    # The printed command, which runs without the fault.
    again = [sys.executable, *finding.command.split()[1:]]
    subprocess.run(again, check=True)
    assert first_difference(Recording.load(finding.reference), Recording.load(Path(again[-1]))) is None
    assert first_difference(Recording.load(finding.reference), Recording.load(finding.folder)) == finding.place


@pytest.mark.long
def test_a_request_without_its_tokens_is_named() -> None:
    """All that the process has computed is equal."""
    finding = run("tests.integration.soak_planted", "loss").finding
    assert finding is not None
    assert "request 1 ended too early: length" in finding.problem


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "named"), [("table", "rotary.0.2"), ("token", "token")])
def test_other_faults_are_named(kind: str, named: str) -> None:
    finding = run("tests.integration.soak_planted", kind).finding
    assert finding is not None
    assert finding.place is not None
    assert finding.place.what == named


@pytest.mark.exhaustive
@pytest.mark.skipif(native.library() is None, reason="only the native kernels pack weights")
def test_a_wrong_packed_weight_is_named() -> None:
    finding = run("tests.integration.soak_planted", "weight").finding
    assert finding is not None
    assert finding.place is not None
    assert finding.place.what == "layers.4.feed_forward.down.own.packed"


@pytest.mark.long
def test_a_prompt_that_leaves_little_room_has_a_shorter_answer() -> None:
    result = soak(EngineArgs(max_model_len=24), PROMPTS[:2], 20, SECONDS / 60, lambda tally: None, seed=5)
    assert result.finding is None
    assert result.num_reference_rows > 0


def test_failing_processes_are_reported(tmp_path: Path) -> None:
    before = children()
    dies = [sys.executable, "-c", "raise RuntimeError('planted')"]
    with pytest.raises(ConfigError, match=r"the reference process failed: exit code 1\n(.*\n)*RuntimeError: planted"):
        soak(EngineArgs(), PROMPTS, 6, 1, lambda tally: None, child=dies)
    waits = [sys.executable, "-c", "import threading; threading.Event().wait()"]
    with pytest.raises(soak_module._ChildError, match="did not end within 0 seconds"):
        soak_module._run(Plan(0, {}, ((1,),), (1,), (), 2), tmp_path / "waits", waits, timeout=0.2)
    assert children() <= before, "neither it nor the processes that disturb it are left"


def children() -> set[str]:
    """Returns the process ids of this process's children."""
    parents: dict[str, str] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            parents[file.parent.name] = file.read_text().rsplit(")", 1)[1].split()[1]
    return {process for process, parent in parents.items() if parent == str(os.getpid())}


def record(folder: Path, rows: list[tuple[int, int]], **changes: object) -> Recording:
    folder.mkdir()
    save_rows(rows, folder / "rows.npy")
    start: dict = {"arithmetic": "avx2", "num_layers": 2, "tensors": {"rotary": "a", "head": "b"}, "num_rows": 1}
    start |= {"tensors_at_end": dict(start["tensors"]), "num_preemptions": 0, **changes}
    plan = Plan(0, {}, ((1,),), (1,), (Round((0,), 1, 1, False),), 0)
    return Recording(folder, plan, Start(**start), np.load(folder / "rows.npy"))


def test_the_order_of_differences(tmp_path: Path) -> None:
    """The order is weights, positions, stages, requests. The keys are not those of one position alone."""
    keys = [row_key(position, stage, request) for position in range(3) for stage in range(6) for request in range(2)]
    expected = record(tmp_path / "expected", [(key, 7) for key in keys])

    def found(name: str, wrong: list[tuple[int, int, int]], **changes: object) -> tuple[str, int | None, int | None]:
        rows = [(key, 7) for key in keys] + [(row_key(*place), 8) for place in wrong]
        place = first_difference(expected, record(tmp_path / name, rows, **changes))
        return ("", None, None) if place is None else (place.what, place.request, place.position)

    assert found("equal", []) == ("", None, None)
    assert found("rows after the end", [(3, 0, 0)]) == ("", None, None)
    assert found("position", [(2, 0, 0), (1, 4, 1), (1, 4, 0), (2, 1, 1)]) == ("logits", 0, 1)
    assert found("stage", [(1, 2, 0), (1, 1, 1)]) == ("layer 0", 1, 1)
    assert found("weight", [(0, 0, 0)], tensors={"rotary": "a", "head": "c"}) == ("head", None, None)
    assert found("end", [(0, 0, 0)], tensors_at_end={"rotary": "c", "head": "b"}) == ("rotary at the end", None, None)
    assert found("kernels", [], arithmetic="amx")[0] == "arithmetic: amx in place of avx2"


def test_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGpu:
        device = "cuda"

    monkeypatch.setattr(soak_module, "choose_device", lambda config: OnGpu())
    with pytest.raises(ConfigError, match="add --device cpu"):
        run("penstock.verify.soak_run")


@pytest.mark.parametrize("asked", ["0", "-1", "nan", "inf", "soon"])
def test_minutes_must_be_a_number_above_zero(asked: str) -> None:
    with pytest.raises(SystemExit):
        main(["verify", "--soak", asked])


@pytest.mark.exhaustive
@pytest.mark.alone
@pytest.mark.timeout(1500)
def test_ten_minutes(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["verify", "--soak", "10"])
    assert code == 0, capsys.readouterr().out

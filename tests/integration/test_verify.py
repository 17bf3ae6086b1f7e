"""`penstock verify` passes on the built-in model, and finds planted bugs of the kinds that it must find."""

from __future__ import annotations

import hashlib
import shutil
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from penstock.cli.main import main
from penstock.config.engine import EngineArgs, resolve
from penstock.config.model_path import resolve_model_path
from penstock.core import request
from penstock.core.scheduler import Scheduler
from penstock.kernels.prepare_inputs import TokenInputs
from penstock.messages.requests import EngineRequest
from penstock.messages.sampling_params import SamplingParams
from penstock.runner.cpu import inputs
from penstock.runner.sampling import batch
from penstock.verify import matrix
from penstock.verify.matrix import RowResult, verify
from penstock.verify.rows import Row, make_rows, plain_arguments
from penstock.verify.workload import Case
from penstock.worker.parts import choose_device
from tests.integration.test_drafts_on_states import make_checkpoint_of_few_tokens
from tests.integration.test_kv_connectors import offloading
from tests.quantized_formats import quantize_checkpoint

ROWS = [
    "plain run", "in company", "asynchronous scheduling", "chunked prefill", "prefix hits", "preemption",
    "KV offloaded: saved, loaded", "KV offloaded: and preempted",
    "drafts: ngram", "drafts: mtp", "structured outputs", "structured outputs, drafts", "everything at once",
    "everything, worker by mp", "tensor parallel", "pipeline parallel", "everything, 2 x 2 ranks",
    "as configured",
]  # fmt: skip
WITH_PROCESSES = ("parallel", "ranks", " by mp")


def run(last: str = "", **engine_args: Any) -> dict[str, RowResult]:
    """Returns the results up to the row `last`, without it all results."""
    args = EngineArgs.from_kwargs(**engine_args)
    results = {}
    for result in verify(args, (), max_tokens=12, is_quick=True, on_progress=lambda name, done, total: None):
        results[result.name] = result
        if result.name == last:
            break
    return results


@pytest.mark.long
def test_the_built_in_model_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--quick"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[:28].strip() for line in lines[1 : 1 + len(ROWS)]] == ROWS
    assert all(" yes " in line for line in lines[1 : 1 + len(ROWS)]), "every row must exercise what it tests"
    assert lines[-1].startswith("Every token agrees: ")


@pytest.mark.long
def test_weights_and_kv_that_are_rounded_pass(tmp_path: Path) -> None:
    """W8A8, whose rows have scales of their own, on a cache of int8."""
    path, _ = quantize_checkpoint(resolve_model_path("demo"), tmp_path, "int8 with int8 inputs")
    results = run(last="preemption", model=str(path), kv_cache_dtype="int8")
    assert list(results) == ROWS[:6]
    assert [result for result in results.values() if not (result.agrees and result.is_shown)] == []


CASE = Case(
    "",
    EngineRequest(
        request_id="0",
        prompt_token_ids=(1, 2, 3),
        sampling_params=SamplingParams(temperature=0.0),
        max_tokens=5,
        seed=0,
    ),
)


def test_every_row_rounds_weights_and_kv_as_asked() -> None:
    """Were the plain run to have others, the row as configured would differ from it."""
    rounded: dict[str, Any] = {
        "quantization": "int4",
        "quantize_head": "int8",
        "quantize_activations": "int8",
        "kv_cache_dtype": "int8",
    }
    args = EngineArgs(**rounded)
    config = choose_device(resolve(args))
    for arguments in (
        plain_arguments(args, config, [CASE]),
        *(row.arguments for row in make_rows(args, config, [CASE], True)),
    ):
        assert {name: arguments.get(name) for name in rounded} == rounded


def test_stages_do_not_separate_layers_that_share_keys_and_values() -> None:
    args = EngineArgs()
    config = replace(choose_device(resolve(args)), device="cpu")
    count = config.model.num_hidden_layers
    for source, found in ((count - 2, [f"{count - 2},2"] * 2), (0, [])):
        shared = replace(config, model=replace(config.model, kv_sources=(*range(count - 1), source)))
        rows = make_rows(args, shared, [CASE], True)
        stages = [row for row in rows if row.arguments.get("pipeline_parallel_size", 1) > 1]
        assert [row.arguments["pipeline_layers"] for row in stages] == found
    assert not any(row.arguments.get("pipeline_layers") for row in make_rows(args, config, [CASE], True))


def test_rows_of_a_gpu() -> None:
    """There identical tokens need `deterministic`, and there are rows with graphs."""
    args = EngineArgs()
    config = choose_device(resolve(args))
    on_cpu, on_gpu = (make_rows(args, replace(config, device=device), [CASE], True) for device in ("cpu", "cuda"))
    added = [row.name for row in on_gpu if row.name not in {each.name for each in on_cpu}]
    assert added == ["CUDA graphs", "CUDA graphs, drafts"]
    assert all(row.arguments["deterministic"] for row in on_gpu)
    assert [row.name for row in on_gpu if not row.arguments["enforce_eager"]] == [*added, "as configured"]


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the rows with separate processes, whose starts take most of the time."""

    def rows(*args: Any) -> list[Row]:
        return [row for row in make_rows(*args) if not any(part in row.name for part in WITH_PROCESSES)]

    monkeypatch.setattr(matrix, "make_rows", rows)


@pytest.mark.long
def test_a_model_with_recurrent_layers_passes(tmp_path: Path) -> None:
    """Drafts of n-grams and of its module are right and wrong; a tier has its states in memory, and then on disk."""
    path = make_checkpoint_of_few_tokens("qwen3.5", tmp_path)
    disk = offloading(disk_path=str(tmp_path / "kv"))
    results = run(last="everything at once", model=str(path), skip_tokenizer_init=True, kv_transfer_config=disk)
    assert [result for result in results.values() if not (result.agrees and result.is_shown)] == []
    assert {*ROWS[:10], "kv_transfer_config: saved, loaded", "kv_transfer_config: and preempted"} <= set(results)
    assert list((tmp_path / "kv").glob("*-states/*.kv"))


@pytest.mark.long
@pytest.mark.usefixtures("one_process")
def test_a_model_with_quantized_weights_passes(tmp_path: Path) -> None:
    path, _ = quantize_checkpoint(resolve_model_path("demo"), tmp_path, "packed with zero points")
    results = run(model=str(path))
    assert [result for result in results.values() if not (result.agrees and result.is_shown)] == []
    assert list(results) == [name for name in ROWS if not any(part in name for part in WITH_PROCESSES)]


@pytest.mark.long
@pytest.mark.usefixtures("one_process")
def test_noise_that_depends_on_the_batch_is_caught(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    uniform = batch.uniform

    def by_batch(seeds: Any, positions: np.ndarray, purpose: Any) -> np.ndarray:
        return uniform(seeds, positions + len(seeds) - 1, purpose)

    monkeypatch.setattr(batch, "uniform", by_batch)
    assert main(["verify", "--quick", "--max-tokens", "12"]) == 1
    written = capsys.readouterr()
    assert "rows do not agree" in written.err
    (described,) = [part for part in written.out.split("\n\n") if "in company: " in part]
    assert "requests differ; the first is request" in described
    assert "seed=" in described
    assert "of the output: token" in described
    assert "top_k=0" not in described, "defaults are left out"
    assert "LLM(max_model_len=" in described


@pytest.mark.long
def test_hashes_without_the_prefix_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hash without the tokens before its block finds the KV of other prompts."""

    def forgetful(chain: list[bytes], root: bytes, tokens: list[int], block_size: int, num_tokens_ahead: int) -> None:
        for start in range(len(chain) * block_size, len(tokens) - block_size + 1, block_size):
            chain.append(hashlib.sha256(array("q", tokens[start : start + 8]).tobytes()).digest())

    monkeypatch.setattr(request, "extend_chain", forgetful)
    results = run(last="prefix hits")
    assert results["in company"].agrees
    assert results["chunked prefill"].agrees
    assert not results["prefix hits"].agrees


def test_an_off_by_one_in_later_chunks_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    expand_tokens = inputs.expand_tokens

    def shifted(idx_mapping: Any, starts: Any, num_computed: Any, token_ids: Any, num_tokens: int) -> TokenInputs:
        inputs = expand_tokens(idx_mapping, starts, num_computed, token_ids, num_tokens)
        first = num_computed[inputs.rows, 0]
        is_late = (first > 0) & (inputs.positions == first + 20)
        inputs.input_ids[is_late] = token_ids[inputs.rows, inputs.positions - 1].long()[is_late]
        return inputs

    monkeypatch.setattr(inputs, "expand_tokens", shifted)
    results = run(last="chunked prefill")
    assert results["in company"].agrees
    difference = results["chunked prefill"].difference
    assert difference is not None
    assert difference.expected != difference.got


@pytest.mark.long
def test_a_token_lost_at_a_preemption_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    rewind = Scheduler._rewind

    def forgetful(self: Scheduler, victim: Any, last_step: int) -> None:
        rewind(self, victim, last_step)
        if victim.num_output_tokens > 2:
            victim.token_ids[-1] = victim.token_ids[-2]

    monkeypatch.setattr(Scheduler, "_rewind", forgetful)
    results = run(last="preemption")
    assert results["in company"].agrees
    assert results["prefix hits"].agrees
    assert not results["preemption"].agrees


def test_requests_that_fail_in_the_plain_run_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They would fail in every row, so that all rows agree."""
    path = shutil.copytree(resolve_model_path("demo"), tmp_path / "model")
    (file,) = path.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.norm.weight"][:] = float("nan")
    save_file(tensors, file)
    assert main(["verify", str(path), "--quick", "--max-tokens", "2"]) == 1
    written = capsys.readouterr()
    assert "FAILED" in written.out
    assert "16 of 22 requests failed: no token can be drawn: the logits are not finite" in written.out
    assert "Every token agrees" not in written.out


@pytest.mark.long
@pytest.mark.usefixtures("one_process")
def test_a_row_without_its_event_is_marked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("x\ny\n\n", encoding="utf-8")
    assert main(["verify", "--prompts", str(prompts), "--max-tokens", "2", "--skip-tokenizer-init"]) == 2
    assert "no tokenizer" in capsys.readouterr().err
    assert main(["verify", "--prompts", str(prompts), "--max-tokens", "2"]) == 0
    out = capsys.readouterr().out
    assert "(yes): the tokens agree, but what the row tests did not occur" in out
    assert "drafts: ngram" in out.splitlines()[-2]


@pytest.mark.long
@pytest.mark.usefixtures("one_process")
def test_without_a_tokenizer_and_with_the_users_drafter() -> None:
    head = {"method": "eagle3", "model": "demo/eagle3", "num_speculative_tokens": 2}
    results = run(skip_tokenizer_init=True, speculative_config=head)
    assert "structured outputs" not in results
    assert all(result.agrees for result in results.values())
    assert results["drafts: as configured"].arguments["speculative_config"] == head


@pytest.mark.exhaustive
@pytest.mark.usefixtures("one_process")
def test_drawn_drafts_are_compared_for_greedy_requests() -> None:
    drawn = {"method": "mtp", "num_speculative_tokens": 2, "draft_sample_method": "probabilistic"}
    results = run(speculative_config=drawn)
    assert all(result.agrees for result in results.values())
    assert "as configured" not in results
    assert results["as configured, greedy"].is_shown


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--prompts", "./nowhere"], "--prompts nowhere cannot be read"),
        (["--max-model-len", "8", "--prompts", "{file}"], "cannot be run"),
        (["--speculative-config", "{synthetic}"], "changes tokens on purpose"),
        (["--max-model-len", "999999"], "max_model_len"),
        (["--runner", "pooling"], "cannot be run: this engine pools"),
        (["--runner", "pooling", "--soak", "0.01"], "cannot be run: this engine pools"),
    ],
)
def test_invalid_arguments(
    arguments: list[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("one two three four five six seven eight nine ten\n", encoding="utf-8")
    synthetic = (
        '{"method": "ngram", "num_speculative_tokens": 1, "rejection_sample_method": "synthetic", '
        '"synthetic_acceptance_rates": [0.5]}'
    )
    values = {"{file}": str(file), "{synthetic}": synthetic}
    assert main(["verify", *(values.get(argument, argument) for argument in arguments)]) == 2
    assert named in capsys.readouterr().err

"""The kernels compiled ahead are those that an engine launches, and it finds them in the cache."""

from __future__ import annotations

import contextlib
import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from penstock.config.engine import EngineArgs, resolve
from penstock.runner.cpu.parts import cpu_parts
from penstock.runner.gpu.ahead import claim_in
from penstock.worker import compile_ahead
from tests.grids import exhaustive
from tests.integration.checkpoints import make_checkpoint
from tests.integration.test_gpu_runner import DEMO_MODEL, make_family
from tests.kernels.ahead_cases import in_a_new_process

OFFLOAD = {"kv_transfer_config": {"kv_connector": "OffloadingConnector"}}
MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}


@pytest.mark.long
@pytest.mark.parametrize("engine_args", [{}, exhaustive(MTP)], ids=["plain", "mtp"])
def test_an_engine_requests_only_variants_compiled_ahead(engine_args: dict[str, Any]) -> None:
    walked = in_a_new_process("walked", "meta", engine_args)
    assert len(walked) == len(set(walked)) >= 12
    missing = set(in_a_new_process("served", engine_args)) - set(walked)
    assert not missing
    if not engine_args:
        assert walked == in_a_new_process("walked", "cpu", {}), "memory makes a difference"


@pytest.mark.long
def test_variants_of_experts_and_latents_are_compiled_ahead(tmp_path: Path) -> None:
    engine_args = {"model": make_family("deepseek_v3", tmp_path), "tokenizer": str(DEMO_MODEL), "load_format": "dummy"}
    walked = in_a_new_process("walked", "meta", engine_args)
    names = ("_grouped_product", "_route", "_combine", "_prefill", "_decode ")
    assert all(any(name in variant for variant in walked) for name in names), walked
    assert not set(in_a_new_process("served", engine_args)) - set(walked)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["qwen3.5", "granite4", "lfm2"])
def test_variants_of_recurrent_layers_are_compiled_ahead(name: str, tmp_path: Path) -> None:
    folder = str(make_checkpoint(name, tmp_path))
    ngram = {"method": "ngram", "num_speculative_tokens": 2}
    engine_args = {"model": folder, "skip_tokenizer_init": True, "load_format": "dummy", "speculative_config": ngram}
    walked = in_a_new_process("walked", "meta", engine_args)
    assert all(any(kernel in variant for variant in walked) for kernel in ("_convolve", "_keep_drafts"))
    assert not set(in_a_new_process("served", engine_args)) - set(walked)


@pytest.mark.long
def test_kernels_that_move_blocks_are_compiled() -> None:
    moves = [name for name in in_a_new_process("walked", "meta", OFFLOAD) if "_move_blocks" in name]
    assert len(moves) == 2


@pytest.mark.long
@pytest.mark.parametrize("backend", ["flash_attention", exhaustive("flashinfer")])
def test_with_attention_of_a_library_the_other_kernels_are_walked(backend: str) -> None:
    names = in_a_new_process("walked", "meta", {"attention_backend": backend})
    assert any("_rope_and_store_kv" in name for name in names)


@pytest.mark.long
def test_variants_of_the_fused_decoder() -> None:
    without_memory = in_a_new_process("decoded", "meta")
    assert without_memory == in_a_new_process("decoded", "cpu")
    assert len(without_memory) >= 7


def test_compiled_kernels_are_found(tmp_path: Path) -> None:
    cache = {"TRITON_CACHE_DIR": str(tmp_path)}
    assert in_a_new_process("compile_two", **cache) == {"compiled": 2, "found": 0}
    assert in_a_new_process("compile_two", **cache) == {"compiled": 0, "found": 2}


@pytest.mark.long
def test_reads_of_tensors_without_memory_give_ones() -> None:
    expected = [[[1.0] * 3] * 2, 1.0, True, 6.0, 0, [1.0] * 3, True, True, 6, True]
    assert in_a_new_process("reads") == {"False": expected, "True": expected}


def test_a_variant_is_claimed_by_one_process(tmp_path: Path) -> None:
    claims = [claim_in(tmp_path) for _ in range(4)]
    won: list[str] = []

    def run(claim: Any) -> None:
        won.extend(name for name in map(str, range(50)) if claim(name))

    threads = [threading.Thread(target=run, args=(claim,)) for claim in claims]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won) == sorted(map(str, range(50)))


def test_a_cpu_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_ahead, "compiling", None)
    config = resolve(EngineArgs()).on_device("cpu")
    with compile_ahead.compiling_ahead(config, cpu_parts().compute_capability) as wait:
        wait()


def test_as_many_processes_compile_as_there_are_usable_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """One core is left for the engine's process; affinity and a cgroup's quota count."""
    counts: list[int] = []

    def compiling(config: Any, capability: int, num_processes: int) -> contextlib.AbstractContextManager[None]:
        counts.append(num_processes)
        return contextlib.nullcontext()

    monkeypatch.setattr(compile_ahead, "compiling", compiling)
    config = resolve(EngineArgs.from_kwargs())
    for cores in (1, 4, 64):
        monkeypatch.setattr(compile_ahead, "usable_cores", lambda cores=cores: cores)
        with compile_ahead.compiling_ahead(config, 90):
            pass
    assert counts == [1, 3, 16]


@pytest.mark.long
def test_a_failure_is_reported_and_the_engine_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    # In the interpreter there is nothing to compile, which the processes report as an error.
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    config = resolve(EngineArgs()).on_device("cpu")
    monkeypatch.setattr(logging.getLogger("penstock"), "propagate", True)
    for _ in range(2):
        with compile_ahead.compiling(config, 90, 1) as wait:
            caplog.clear()
            wait()
        assert "kernels could not be compiled ahead: AssertionError: kernels that are interpreted" in caplog.text


def test_a_complete_cache_is_not_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile_ahead, "_wait", lambda processes, claims: True)
    config = resolve(EngineArgs()).on_device("cpu")
    with compile_ahead.compiling(config, 90, 0) as wait:
        wait()
    monkeypatch.setattr(compile_ahead, "_wait", None)
    with compile_ahead.compiling(config, 90, 1) as wait:
        wait()
    with pytest.raises(TypeError), compile_ahead.compiling(config, 100, 0) as wait:
        wait()

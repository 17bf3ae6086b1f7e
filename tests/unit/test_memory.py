"""The memory budget of a device, and the errors if memory does not suffice. The device is simulated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from penstock import LLM
from penstock.config.cache import CacheConfig
from penstock.config.engine import EngineArgs, resolve
from penstock.config.kv_cache_groups import attach_layers, group_layers
from penstock.engine import build
from penstock.engine.cache_plan import num_blocks_in_budget
from penstock.messages.kv_cache_spec import KVCacheConfig
from penstock.messages.memory_budget import MemoryBudget
from penstock.models.sources.opening import loaded_bytes
from penstock.runner.memory import HostMemory, is_out_of_memory, measure
from penstock.runner.model_runner import ModelRunner
from penstock.utils.errors import ConfigError
from penstock.worker import load, memory_profile, worker
from penstock.worker.memory_profile import memory_budget, run_largest_steps
from penstock.worker.parts import make_parts
from penstock.worker.synthetic_steps import KINDS

GIB = 1 << 30
MTP = {"method": "mtp", "num_speculative_tokens": 2}
PARTS = make_parts(torch.device("cpu"))


class FakeMeter:
    """A device of 100 GiB, of which `in_use` are used. Torch holds `held` of them, and during a step at most `peak`."""

    def __init__(self, in_use: int, held: int, peak: int) -> None:
        self.reading = (100 * GIB, (100 - in_use) * GIB, held * GIB)
        self.peak_bytes = peak * GIB
        self.calls: list[str] = []

    def total(self) -> int:
        return self.reading[0]

    def available(self) -> int:
        return self.reading[1]

    def budget(self, largest_step: Callable[[], None], graph_bytes: int) -> MemoryBudget:
        return measure(self, largest_step, graph_bytes)

    def settle(self) -> tuple[int, int, int]:
        self.calls.append("settle")
        return self.reading

    def peak(self) -> int:
        self.calls.append("peak")
        return self.peak_bytes


def cache_config(**given: Any) -> CacheConfig:
    defaults = {"gpu_memory_utilization": 0.9, "kv_cache_memory": None, "num_blocks_override": None}
    return CacheConfig(block_size=16, enable_prefix_caching=True, **{**defaults, **given})


def test_the_memory_left_for_the_cache() -> None:
    meter = FakeMeter(in_use=25, held=20, peak=27)
    budget = measure(meter, lambda: meter.calls.append("step"), graph_bytes=3 * GIB)
    assert meter.calls == ["settle", "step", "peak", "settle"]
    assert budget == MemoryBudget(total=100 * GIB, in_use=25 * GIB, step=7 * GIB, graphs=3 * GIB)
    assert budget.left(0.9) == pytest.approx(55 * GIB, abs=1)
    assert num_blocks_in_budget(cache_config(), budget, GIB // 2) in (109, 110)
    assert num_blocks_in_budget(cache_config(kv_cache_memory=3 * GIB), budget, GIB) == 3
    assert num_blocks_in_budget(cache_config(num_blocks_override=7, kv_cache_memory=1), budget, GIB) == 7
    assert MemoryBudget(100 * GIB, 10 * GIB, most=4 * GIB).left(0.9) == 4 * GIB
    assert MemoryBudget(100 * GIB, 10 * GIB, adapters=30 * GIB).left(0.9) == 50 * GIB
    with pytest.raises(ConfigError, match=r"95.00 GiB for LoRA adapters, .* or lower max_cpu_loras"):
        num_blocks_in_budget(cache_config(), MemoryBudget(100 * GIB, 0, adapters=95 * GIB), GIB)


def test_a_step_that_fits_into_the_memory_held_by_torch_needs_no_more() -> None:
    assert measure(FakeMeter(in_use=25, held=20, peak=19), lambda: None, 0).step == 0


@pytest.mark.parametrize(
    ("given", "block_gib", "message"),
    [
        (
            {"gpu_memory_utilization": 0.3},
            2,
            r"gpu_memory_utilization=0.3 leaves no memory .* raise it to 0.39 at least",
        ),
        ({}, 40, "leaves no memory .* take a smaller model, or lower max_num_batched_tokens and max_num_seqs"),
        ({"kv_cache_memory": GIB}, 1, "less than two KV blocks of 1073741824 bytes: raise it to 2147483648"),
    ],
)
def test_the_error_for_a_small_budget_names_a_sufficient_value(
    given: dict[str, Any], block_gib: int, message: str
) -> None:
    budget = MemoryBudget(100 * GIB, 25 * GIB, 7 * GIB, 3 * GIB)
    with pytest.raises(ConfigError, match=message):
        num_blocks_in_budget(cache_config(**given), budget, block_gib * GIB)
    if "raise it to 0." in message:
        assert num_blocks_in_budget(cache_config(gpu_memory_utilization=0.39), budget, block_gib * GIB) == 2


@pytest.mark.parametrize("speculative", [None, MTP], ids=["plain", "mtp"])
def test_the_largest_steps(speculative: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps have the maximum of tokens and requests, sample every row in every kind of sampling, and verify drafts."""
    seen: list[tuple[int, int, int]] = []
    execute_model = ModelRunner.execute_model

    def watched(self: ModelRunner, plan: Any) -> None:
        counts = plan.num_scheduled_tokens
        seen.append((len(counts), sum(counts.values()), sum(plan.num_draft_tokens.values())))
        execute_model(self, plan)

    monkeypatch.setattr(ModelRunner, "execute_model", watched)
    args = EngineArgs(max_num_batched_tokens=50, max_num_seqs=20, max_model_len=40, speculative_config=speculative)
    config = resolve(args).on_device("cpu")
    loaded = load.load_model(config, PARTS)
    groups = group_layers(loaded.model.kv_cache_specs)
    cache = KVCacheConfig(1, 16, groups, attach_layers(loaded.draft_kv_cache_specs, groups, loaded.num_tokens_ahead))
    run_largest_steps(config, loaded, cache, PARTS)
    assert seen[0] == (20, 50, 0)
    assert len(seen) == len(KINDS) * (1 if speculative is None else 2)
    if speculative is not None:
        assert seen[1] == (16, 48, 32)


def raise_out_of_memory(*args: Any, **kwargs: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB.\nGPU 0 has")


@pytest.mark.parametrize(
    ("owner", "name", "message"),
    [
        (
            load,
            "_build",
            r"the weights of .* need more memory than cpu has: .* smaller model .*Tried to allocate 3.00 GiB",
        ),
        (
            worker,
            "allocate_kv_cache",
            "KV blocks need more memory than cpu has: lower gpu_memory_utilization from 0.5 to 0.4",
        ),
        (
            worker,
            "make_runner",
            "max_num_seqs=8 requests of 64 tokens need more .* lower max_num_seqs or max_model_len",
        ),
        (
            ModelRunner,
            "execute_model",
            "the first steps need .* lower gpu_memory_utilization, or lower max_num_batched_tokens from 96 to",
        ),
    ],
)
def test_every_error_for_insufficient_memory_names_its_flag(
    owner: Any, name: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, raise_out_of_memory)
    with pytest.raises(ConfigError, match=message):
        LLM(device="cpu", max_model_len=64, max_num_seqs=8, max_num_batched_tokens=96, gpu_memory_utilization=0.5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kv_cache_memory": 1 << 62}, r"KV blocks need more memory than cpu has: lower kv_cache_memory to \d+"),
        ({"num_gpu_blocks_override": 1 << 46}, r"lower num_gpu_blocks_override to \d+ "),
        ({"num_gpu_blocks_override": 1 << 62}, r"lower num_gpu_blocks_override to \d+ "),
    ],
)
def test_a_cache_larger_than_the_memory_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(device="cpu", max_model_len=64, **given)


@pytest.mark.parametrize(
    ("sizes", "parts", "part"),
    [
        ({}, 1, "^the"),
        ({"tensor_parallel_size": 2}, 1, "^the"),
        ({"pipeline_parallel_size": 2}, 2, "a stage's part of"),
    ],
    ids=["one rank", "tensor parallel", "pipeline parallel"],
)
def test_weights_of_all_ranks_of_a_host_must_fit_into_its_memory(
    sizes: dict[str, Any], parts: int, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank by itself would fit, and the system would end some process when the last one has loaded its part."""
    size = loaded_bytes(resolve(EngineArgs()).model, torch.bfloat16, True)
    monkeypatch.setattr(HostMemory, "available", lambda self: size // parts - 1)
    with pytest.raises(ConfigError, match=f"{part} .*weights of .* and cpu has .* free"):
        LLM(device="cpu", max_model_len=64, distributed_executor_backend="uniproc", **sizes)


def test_a_rank_on_a_host_of_its_own_needs_memory_for_its_part_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    size = loaded_bytes(resolve(EngineArgs()).model, torch.bfloat16, True)
    monkeypatch.setattr(HostMemory, "available", lambda self: size // 2 - 1)
    config = resolve(EngineArgs(tensor_parallel_size=2, distributed_executor_backend="ray")).on_device("cpu")
    with pytest.raises(ConfigError, match=r"a rank's part of the weights of .* and cpu has"):
        load.load_model(config, PARTS)


def test_a_largest_step_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_profile, "run_largest_steps", raise_out_of_memory)
    config = resolve(EngineArgs(max_num_batched_tokens=64, max_num_seqs=20)).on_device("cpu")
    loaded = load.load_model(config, PARTS)
    cache = KVCacheConfig(1, 16, group_layers(loaded.model.kv_cache_specs))
    with pytest.raises(ConfigError, match="lower max_num_batched_tokens from 64 to 32 or max_num_seqs from 20 to 10"):
        memory_budget(config, loaded, cache, replace(PARTS, memory=FakeMeter(1, 1, 1)))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("none"), True),
        (MemoryError(), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (OSError(12, "Cannot allocate memory"), True),
        (RuntimeError("shapes do not match"), False),
        (OSError(2, "No such file or directory"), False),
    ],
)
def test_which_errors_count_as_out_of_memory(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_other_errors_are_not_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> Callable[[], None]:
        raise RuntimeError("a bug")

    monkeypatch.setattr(build, "warm_up", fails)
    with pytest.raises(RuntimeError, match="a bug"):
        LLM(device="cpu", max_model_len=64)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_budget_is_kept() -> None:
    """After a step of every size the device holds no more than it was allowed."""
    llm = LLM(device="cuda", gpu_memory_utilization=0.5, max_model_len=512)
    llm.generate(["Once upon a time"] * 300, use_tqdm=False)
    free, total = torch.cuda.mem_get_info()
    assert total - free <= 0.51 * total
    llm.shutdown()

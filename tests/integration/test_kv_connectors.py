"""Promise P4 for KV that leaves the engine and comes back: whatever happens to it on the way, no token changes.

Every cell runs the requests of `test_identity_matrix` and compares with its plain run.
"""

from __future__ import annotations

import ctypes
import random
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import penstock
from penstock import LLM, ConfigError, SamplingParams
from penstock.engine import build
from penstock.kv_transfer.multi import MultiScheduler
from penstock.kv_transfer.offload.messages import OffloadLoad, OffloadMetadata
from penstock.kv_transfer.offload.scheduler import OffloadingScheduler
from penstock.kv_transfer.offload.worker import OffloadingWorker
from penstock.kv_transfer.view import Parts, Place, Take, write_now
from penstock.messages.kv_transfer import BadRange, KVConnectorOutput, TransferId, TransferReport, TransferStatus
from penstock.messages.outputs import CompletionOutput
from penstock.runner.cpu import parts
from penstock.runner.cpu.kv_cache_view import HostKVCacheView
from penstock.runner.gpu.kv_cache_view import GpuKVCacheView
from tests.grids import grid
from tests.integration.test_identity_matrix import requests, run
from tests.integration.test_identity_speculation import METHODS

DEMO_FOLDER = Path(penstock.__file__).parent / "demo"
_MIDDLE = re.compile(r"model\.layers\.[23]\.mlp\.")
COUNT = 16
NUM_DRAFTS = 3
# The longest request fits with a block to spare, the batch does not.
POOL = {"max_model_len": 240, "num_gpu_blocks_override": 17, "enable_prefix_caching": True}
SPECULATORS: dict[str, dict[str, Any] | None] = {
    "none": None,
    **{name: {**method, "num_speculative_tokens": NUM_DRAFTS} for name, method in METHODS.items()},
}
# The connector of `examples/example_connector.py`.
EXAMPLE = {"kv_connector": "ExampleConnector", "kv_connector_module_path": "examples.example_connector"}


def offloading(**options: Any) -> dict[str, Any]:
    """Loads everything that can be loaded, so that the result does not depend on the machine's speed."""
    return {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"load_policy": "always", **options}}


def completions(llm: LLM) -> list[CompletionOutput]:
    prompts, params = zip(*requests()[:COUNT], strict=True)
    return [output.outputs[0] for output in llm.generate(list(prompts), list(params), use_tqdm=False)]


def completions_of(llm: LLM, count: int) -> list[list[int]]:
    prompts, params = zip(*requests()[:count], strict=True)
    return [output.outputs[0].token_ids for output in llm.generate(list(prompts), list(params), use_tqdm=False)]


def tokens(llm: LLM) -> list[list[int]]:
    return [each.token_ids for each in completions(llm)]


@pytest.fixture(scope="module")
def plain_tokens() -> list[list[int]]:
    found, _ = run(one_by_one=True, count=COUNT)
    return found


def make(connector: dict[str, Any], **engine_args: Any) -> LLM:
    return LLM(**{**POOL, "kv_transfer_config": connector, **engine_args})


def run_again(llm: LLM) -> list[list[int]]:
    """Runs the requests again, after a reset of the engine's own cache."""
    assert llm.reset_prefix_cache()
    return tokens(llm)


@pytest.mark.spread(1)
@pytest.mark.parametrize(("speculator", "overlap"), grid(list(SPECULATORS), (False, True), strength=1))
def test_loads_from_memory_and_from_disk(
    plain_tokens: list[list[int]], tmp_path: Path, speculator: str, overlap: bool
) -> None:
    engine_args = {"async_scheduling": overlap, "speculative_config": SPECULATORS[speculator]}
    connector = offloading(disk_path=str(tmp_path), eviction_policy="arc" if overlap else "lru")
    llm = make(connector, **engine_args)
    assert tokens(llm) == plain_tokens
    assert run_again(llm) == plain_tokens
    stats = llm.stats()
    assert stats.num_preemptions > 0
    assert stats.remote_kv.num_tokens > 500
    assert stats.remote_kv.num_failed == 0
    llm.check_integrity()
    llm.shutdown()
    llm = make(connector, **engine_args)
    assert tokens(llm) == plain_tokens
    stats = llm.stats()
    # How much was written before its memory was reused depends on the disk.
    assert stats.connector["num_promoted"] > 0
    assert stats.connector["STORAGE.num_loaded"] > 0
    assert stats.connector["STORAGE.num_chunks"] > 0
    assert stats.remote_kv.num_tokens > 0
    llm.check_integrity()
    llm.shutdown()


class Late:
    """A `Transfer` that is done at the third query."""

    def __init__(self, run: Callable[[], object]) -> None:
        self._run = run
        self._left = 3

    def done(self) -> bool:
        self._left -= 1
        if self._left == 0:
            self._run()
        return self._left <= 0

    def result(self) -> None:
        while not self.done():
            pass


@pytest.mark.long
@pytest.mark.uniproc
def test_transfers_that_take_some_steps(plain_tokens: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are reallocated while they are copied, and requested while they are loaded."""

    def read_blocks(self: HostKVCacheView, places: Sequence[Place], take: Take) -> Late:
        kept = [[memoryview(bytes(part)) for part in self.block_parts(*place)] for place in places]
        return Late(lambda: [take(number, parts) for number, parts in enumerate(kept)])

    def write_blocks(self: HostKVCacheView, places: Sequence[Place], data: Sequence[Parts], take: Take) -> Late:
        return Late(lambda: write_now(self, places, data, take))

    monkeypatch.setattr(HostKVCacheView, "read_blocks", read_blocks)
    monkeypatch.setattr(HostKVCacheView, "write_blocks", write_blocks)
    llm = make(offloading(), async_scheduling=True)
    assert tokens(llm) == plain_tokens
    assert run_again(llm) == plain_tokens
    stats = llm.stats()
    assert stats.num_preemptions > 0
    assert stats.remote_kv.num_tokens > 500
    assert stats.remote_kv.num_failed == 0
    llm.check_integrity()
    llm.shutdown()


@pytest.mark.long
@pytest.mark.uniproc
def test_transfers_with_the_kernels_of_a_gpu(plain_tokens: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the kernels in Triton's interpreter."""
    monkeypatch.setattr(parts, "HostKVCacheView", GpuKVCacheView)
    llm = make(offloading())
    assert completions_of(llm, 4) == plain_tokens[:4]
    assert llm.reset_prefix_cache()
    assert completions_of(llm, 4) == plain_tokens[:4]
    assert llm.stats().remote_kv.num_tokens > 50
    assert llm.stats().remote_kv.num_failed == 0
    llm.shutdown()


@pytest.mark.spread(1)
@pytest.mark.parametrize("speculator", ["none", "mtp"])
def test_a_tier_that_is_too_small(plain_tokens: list[list[int]], speculator: str) -> None:
    """Blocks are evicted and recomputed all the time."""
    llm = make(offloading(cpu_bytes_to_use=600_000), speculative_config=SPECULATORS[speculator])
    assert tokens(llm) == plain_tokens
    assert run_again(llm) == plain_tokens
    assert llm.stats().connector["num_evicted"] > 30
    llm.check_integrity()
    llm.shutdown()


FAILING = {"first": 0, "middle": 2, "last": -1}


@pytest.mark.long
@pytest.mark.uniproc
@pytest.mark.parametrize(
    ("speculator", "policy", "place"), grid(list(SPECULATORS), ("recompute", "fail"), list(FAILING))
)
def test_loads_that_lack_a_block(
    plain_tokens: list[list[int]], monkeypatch: pytest.MonkeyPatch, place: str, policy: str, speculator: str
) -> None:
    """Every second load lacks a block, which is recomputed or fails its request alone."""
    llm = make(offloading() | {"kv_load_failure_policy": policy}, speculative_config=SPECULATORS[speculator])
    assert tokens(llm) == plain_tokens
    begin_step, get_finished = OffloadingWorker.begin_step, OffloadingWorker.get_finished
    loads: dict[TransferId, OffloadLoad] = {}

    def begin(self: OffloadingWorker, metadata: OffloadMetadata) -> None:
        loads.update((load.job_id, load) for load in metadata.loads)
        begin_step(self, metadata)

    def lossy(self: OffloadingWorker, report: TransferReport) -> TransferReport:
        if report.transfer_id not in loads or list(loads).index(report.transfer_id) % 2 == 0:
            return report
        blocks = sorted(loads[report.transfer_id].blocks, key=lambda each: each.index)
        block = blocks[min(FAILING[place], len(blocks) - 1)]
        size = 16
        for part in self._view.block_parts(block.group, block.block_id):
            part[:] = bytes(len(part))
        bad = BadRange(block.group, block.index * size, (block.index + 1) * size)
        return TransferReport(report.transfer_id, self._shard, TransferStatus.FAILED, (bad,))

    def finish(self: OffloadingWorker, finished_request_ids: frozenset[str]) -> KVConnectorOutput:
        return KVConnectorOutput(tuple(lossy(self, each) for each in get_finished(self, finished_request_ids).reports))

    monkeypatch.setattr(OffloadingWorker, "begin_step", begin)
    monkeypatch.setattr(OffloadingWorker, "get_finished", finish)
    assert llm.reset_prefix_cache()
    outputs = completions(llm)
    failed = [index for index, each in enumerate(outputs) if each.finish_reason == "error"]
    assert llm.stats().remote_kv.num_failed > 0
    assert bool(failed) == (policy == "fail")
    for index, each in enumerate(outputs):
        assert list(each.token_ids) == ([] if index in failed else plain_tokens[index])
    llm.check_integrity()
    llm.shutdown()


@pytest.mark.long
def test_checkpoints_that_differ_in_the_middle_share_no_kv(tmp_path: Path) -> None:
    """They share the folder of KV and have the same shape, size, and first and last megabytes."""
    tensors = load_file(DEMO_FOLDER / "model.safetensors")
    one, other = tmp_path / "one", tmp_path / "other"
    for folder, factor in ((one, 1), (other, 2)):
        shutil.copytree(DEMO_FOLDER, folder)
        changed = {name: factor * x if _MIDDLE.match(name) else x for name, x in tensors.items()}
        save_file(changed, folder / "model.safetensors")
    prompt = [{"prompt_token_ids": [i % 90 + 5 for i in range(100)]}]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    connector = offloading(disk_path=str(tmp_path / "kv"))
    found: list[Any] = []
    for model, using, num_cached in (
        (one, connector, 0),
        (one, connector, 96),
        (other, connector, 0),
        (other, connector, 96),
        (other, None, 0),
    ):
        llm = LLM(**POOL, model=str(model), kv_transfer_config=using)
        (output,) = llm.generate(prompt, params, use_tqdm=False)
        assert output.num_cached_tokens == num_cached
        found.append(output.outputs[0].token_ids)
        llm.shutdown()
    assert found[0] == found[1] != found[2]
    assert found[2] == found[3] == found[4]


@pytest.mark.long
def test_corrupted_files_are_detected(plain_tokens: list[list[int]], tmp_path: Path) -> None:
    """One file in a hundred, and at least three, loses a bit; no token changes."""
    connector = offloading(disk_path=str(tmp_path))
    llm = make(connector)
    assert tokens(llm) == plain_tokens
    llm.shutdown()
    rng = random.Random(0)
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    victims = rng.sample(files, max(3, len(files) // 100))
    for path in victims:
        data = bytearray(path.read_bytes())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
    llm = make(connector)
    assert tokens(llm) == plain_tokens
    assert llm.stats().connector["num_promotions_failed"] + llm.stats().connector["num_corrupted"] > 0
    llm.shutdown()


@pytest.mark.long
def test_bytes_that_change_in_memory_are_detected(plain_tokens: list[list[int]]) -> None:
    """The digest is compared with the bytes that landed in the engine's cache."""
    llm = make(offloading())
    assert tokens(llm) == plain_tokens
    connector: Any = llm._core._scheduler._connector
    connector._region.chunk(0)[5] ^= 1
    assert run_again(llm) == plain_tokens
    assert llm.stats().connector["num_corrupted"] == 1
    llm.shutdown()


@pytest.mark.long
def test_example_connector(plain_tokens: list[list[int]], tmp_path: Path) -> None:
    connector = {
        **EXAMPLE,
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    for speculator in ("none", "mtp"):
        for expected in (0, 500):
            llm = make(connector, speculative_config=SPECULATORS[speculator])
            assert tokens(llm) == plain_tokens
            assert llm.stats().remote_kv.num_tokens >= expected
            llm.check_integrity()
            llm.shutdown()
    for path in sorted(path for path in tmp_path.rglob("*") if path.is_file())[::2]:
        path.write_bytes(b"nonsense")
    llm = make(connector)
    assert tokens(llm) == plain_tokens
    assert llm.stats().remote_kv.num_failed > 0
    llm.check_integrity()
    llm.shutdown()


def test_a_file_that_vanishes_before_its_load(
    plain_tokens: list[list[int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Another host empties the shared folder between match and allocation: the engine continues and recomputes."""
    example = {
        **EXAMPLE,
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    both = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [example]}}
    llm = make(both)
    assert completions_of(llm, 4) == plain_tokens[:4]
    llm.shutdown()
    begin = MultiScheduler.update_state_after_alloc

    def clean_up_first(self: MultiScheduler, *args: Any) -> None:
        for path in tmp_path.rglob("*.safetensors"):
            path.unlink()
        begin(self, *args)

    monkeypatch.setattr(MultiScheduler, "update_state_after_alloc", clean_up_first)
    llm = make(both)
    assert completions_of(llm, 4) == plain_tokens[:4]
    assert llm.stats().remote_kv.num_failed > 0
    assert not llm.reset_prefix_cache(reset_connector=True), "it must not remove shared files"
    llm.check_integrity()
    llm.shutdown()


def test_a_reset_clears_the_tiers_on_request() -> None:
    llm = make(offloading())
    prompt, params = [[i % 90 + 5 for i in range(100)]], SamplingParams(temperature=0.0, max_tokens=1)

    def num_cached() -> int | None:
        return llm.generate(prompt, params, use_tqdm=False)[0].num_cached_tokens

    assert num_cached() == 0
    assert llm.reset_prefix_cache()
    assert num_cached() == 96
    assert llm.reset_prefix_cache(reset_connector=True)
    assert num_cached() == 0
    assert llm.reset_prefix_cache()
    assert num_cached() == 96, "what is stored afterwards is found again"
    llm.shutdown()


def test_a_producer_saves_and_a_consumer_loads(tmp_path: Path) -> None:
    prompt, params = [[i % 90 + 5 for i in range(100)]], SamplingParams(temperature=0.0, max_tokens=1)
    files: list[int] = []
    for role, expected in (("kv_consumer", 0), ("kv_producer", 0), ("kv_consumer", 96)):
        llm = make({**offloading(disk_path=str(tmp_path)), "kv_role": role})
        for _ in range(2):
            assert llm.generate(prompt, params, use_tqdm=False)[0].num_cached_tokens == expected
            assert llm.reset_prefix_cache()
        llm.shutdown()
        files.append(len([path for path in tmp_path.rglob("*") if path.is_file()]))
    assert files[0] < files[1] == files[2]


@pytest.mark.uniproc
def test_the_layout_gives_the_addresses_of_the_bytes() -> None:
    llm = make(offloading(), speculative_config=SPECULATORS["mtp"])
    llm.generate([[7] * 40], SamplingParams(max_tokens=2), use_tqdm=False)
    worker: Any = llm._core._executor._workers[0]
    view = worker._worker._worker._runner.kv_step._connector._view
    regions = {region.name: region for region in view.layout.regions}
    layers = view.layout.layers_of(0)
    for layer, part in zip(layers, view.block_parts(0, 1), strict=True):
        region, start = regions[layer.region], layer.offset + layer.block_bytes
        assert start + layer.block_bytes <= region.num_bytes
        assert ctypes.string_at(region.address + start, layer.block_bytes) == bytes(part)
        assert any(part)
        assert layer.shape[layer.axes.index("token")] == view.layout.block_size == 16
        assert layer.heads == (0, layer.shape[layer.axes.index("head")])
    llm.shutdown()


def test_several_connectors(plain_tokens: list[list[int]], tmp_path: Path) -> None:
    example = {
        **EXAMPLE,
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    both = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [offloading(), example]}}
    llm = make(both, speculative_config=SPECULATORS["mtp"])
    assert tokens(llm) == plain_tokens
    assert run_again(llm) == plain_tokens
    stats = llm.stats()
    assert stats.connector["OffloadingConnector.num_loads"] > 30
    llm.check_integrity()
    llm.shutdown()
    # What the first child does not have, the second has.
    llm = make(both, speculative_config=SPECULATORS["mtp"])
    assert tokens(llm) == plain_tokens
    assert llm.stats().remote_kv.num_tokens > 500
    llm.shutdown()


@pytest.mark.long
@pytest.mark.parametrize("overlap", [False, True])
def test_finished_requests_are_saved(overlap: bool) -> None:
    """The save does not wait for another request."""
    llm = make(offloading(), async_scheduling=overlap)
    prompt, params = [[i % 90 + 5 for i in range(100)]], SamplingParams(temperature=0.0, max_tokens=1)
    llm.generate(prompt, params, use_tqdm=False)
    assert llm.reset_prefix_cache()
    assert llm.generate(prompt, params, use_tqdm=False)[0].num_cached_tokens == 96
    llm.shutdown()


@pytest.mark.long
def test_transfer_parameters_of_requests() -> None:
    llm = make(offloading())
    prompt = [{"prompt_token_ids": [i % 90 + 5 for i in range(100)]}]
    for transfer_params, expected in (
        ({"offload_policy": "none"}, 0),
        ({"max_offload_tokens": 40}, 2),
        ({"offload_policy": "request"}, 6),
        ({"do_remote_decode": True, "remote_block_ids": [[1, 2], None], "offload_policy": None}, 6),
    ):
        params = SamplingParams(temperature=0.0, max_tokens=2, kv_transfer_params=transfer_params)
        llm.generate(prompt, params, use_tqdm=False)
        llm.generate([[1, 2, 3]], params, use_tqdm=False)
        assert llm.stats().connector["num_stored"] == expected
        if expected < 6:
            llm.reset_prefix_cache()
    llm.reset_prefix_cache()
    limited = SamplingParams(temperature=0.0, max_tokens=2, kv_transfer_params={"max_load_tokens": 32})
    assert llm.generate(prompt, limited, use_tqdm=False)[0].num_cached_tokens == 32
    llm.shutdown()


@pytest.mark.parametrize(
    ("connector", "message"),
    [
        ({}, "needs a kv_connector"),
        ({"kv_connector": "Offloading"}, "did you mean 'OffloadingConnector'"),
        ({"kv_connector": "X", "kv_connector_module_path": "no.such.module"}, "cannot be imported"),
        ({"kv_connector": "X", "kv_connector_module_path": "json"}, "has no 'X'"),
        (offloading(cpu_bytes=3), "unknown key 'cpu_bytes' of OffloadingConnector; did you mean 'cpu_bytes_to_use'"),
        (offloading(cpu_bytes_to_use=3), "cpu_bytes_to_use"),
        (offloading(eviction_policy="fifo"), "one of lru, arc"),
        (offloading(disk_path="/proc/none"), "/proc/none"),
        (EXAMPLE, "needs shared_storage_path"),
        ({"kv_connector": "ExampleConnector"}, 'kv_connector_module_path to "examples.example_connector"'),
        ({"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [1]}}, "list of objects"),
        ({**offloading(), "kv_ranks": 1}, "unknown key 'kv_ranks'"),
        ({**offloading(), "kv_load_timeout": 0}, "kv_load_timeout"),
    ],
)
def test_invalid_configurations(connector: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(connector)


def test_connectors_need_the_prefix_cache() -> None:
    with pytest.raises(ConfigError, match="prefix cache"):
        make(offloading(), enable_prefix_caching=False)


def test_an_engine_that_fails_to_start_shuts_its_connector_down(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    shutdown = OffloadingScheduler.shutdown

    def note_shutdown(self: OffloadingScheduler) -> None:
        calls.append("shutdown")
        shutdown(self)

    def fail(*args: Any) -> None:
        raise ConfigError("the warm-up fails")

    monkeypatch.setattr(OffloadingScheduler, "shutdown", note_shutdown)
    monkeypatch.setattr(build, "warm_up", fail)
    with pytest.raises(ConfigError, match="the warm-up fails"):
        make(offloading())
    assert calls == ["shutdown"]

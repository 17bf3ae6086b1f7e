"""Promise P4 with a KV cache of int8: whatever stores, moves or reuses KV changes no token.

Cells are those of `test_identity_families` and `test_identity_speculation`, compared with plain runs of the same cache.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock import ConfigError
from penstock.config.engine import EngineArgs, resolve
from penstock.kernels import native
from tests.grids import grid
from tests.integration.checkpoints import make_encoder_checkpoint
from tests.integration.test_disaggregation import complete, disaggregated, transfer_config
from tests.integration.test_identity_families import Families, answer, check_cell, check_pair, engine, requests
from tests.integration.test_identity_matrix import run
from tests.integration.test_identity_speculation import METHODS, SMALL_POOL, config
from tests.integration.test_kv_connectors import offloading

INT8: dict[str, Any] = {"kv_cache_dtype": "int8"}
# Without windows; with windows in some layers; with sinks as well; with heads of two sizes and shared keys and values.
FAMILIES = ("qwen3-128", "gemma3", "gpt-oss", "gemma4-shared")
BATCHES = ("chunks", "overlap", "preemption", "hits", "drafts", "two ranks", "stages", "ranks of stages", "a tier")
COUNT = 12


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Families:
    return Families(tmp_path_factory.mktemp("families"), INT8)


@pytest.mark.parametrize(("name", "cell"), grid(FAMILIES, BATCHES, strength=1))
def test_a_batch(families: Families, name: str, cell: str) -> None:
    check_cell(families, name, cell)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_integers_are_what_is_read(families: Families, name: str) -> None:
    """Were chunks to read what they have not stored yet, a whole prompt would have the results of bfloat16."""
    llm = engine(families.path(name))
    prompt, params = requests()[5]
    plain = answer(complete(llm, prompt, params))
    llm.shutdown()
    assert families.expected(name)[5] != plain


@pytest.mark.parametrize(
    ("name", "pair", "transport"),
    grid(FAMILIES, ("ranks of P", "ranks of D", "ranks and stages"), ("sockets", "shared_memory"), strength=1),
)
def test_a_prompt_in_one_engine_and_its_answer_in_another(
    families: Families, name: str, pair: str, transport: str
) -> None:
    check_pair(families, name, pair, transport)


def test_half_the_bytes_are_moved(families: Families) -> None:
    moved: dict[str, float] = {}
    for dtype in ("auto", "int8"):
        common = {"enable_prefix_caching": True, "kv_cache_dtype": dtype}
        prefill = engine(families.path("qwen3-128"), kv_transfer_config=transfer_config("kv_producer"), **common)
        decode = engine(families.path("qwen3-128"), kv_transfer_config=transfer_config("kv_consumer"), **common)
        prompt, params = requests()[5]
        disaggregated(prefill, decode, prompt, params)
        moved[dtype] = decode.stats().connector["p2p_from/kv_producer/bytes"]
        for llm in (prefill, decode):
            llm.shutdown()
    head_dim = 128
    assert moved["int8"] / moved["auto"] == (head_dim + 4) / (2 * head_dim)


@pytest.fixture(scope="module")
def plain_tokens() -> list[list[int]]:
    tokens, _ = run(one_by_one=True, count=COUNT, **INT8)
    return tokens


@pytest.mark.parametrize("method", METHODS)
def test_drafts(plain_tokens: list[list[int]], method: str) -> None:
    tokens, llm = run(
        count=COUNT,
        repeat=2,
        async_scheduling=True,
        max_num_batched_tokens=16,
        enable_prefix_caching=True,
        speculative_config=config(method, 3),
        **SMALL_POOL,
        **INT8,
    )
    assert tokens == plain_tokens
    stats = llm.stats()
    assert stats.num_preemptions > 0
    assert 0 < stats.speculation.num_accepted_tokens < stats.speculation.num_draft_tokens


def test_a_module_and_tiers_of_memory_and_disk(plain_tokens: list[list[int]], tmp_path: Path) -> None:
    tiers = {"kv_transfer_config": offloading(disk_path=str(tmp_path)), "enable_prefix_caching": True}
    for _ in range(2):  # the second engine finds the files of the first
        arguments: dict[str, Any] = {**tiers, **SMALL_POOL, **INT8, "speculative_config": config("mtp", 2)}
        tokens, llm = run(count=COUNT, repeat=2, **arguments)
        assert tokens == plain_tokens
    assert llm.stats().connector["STORAGE.num_loaded"] > 0
    tokens, llm = run(count=COUNT, **{**arguments, "kv_cache_dtype": "auto"})
    assert llm.stats().connector["STORAGE.num_loaded"] == 0


def test_reference_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CPU_ISA", "torch")
    native.library.cache_clear()
    try:
        plain, _ = run(one_by_one=True, count=3, **INT8)
        together, _ = run(count=3, max_num_batched_tokens=16, **INT8)
    finally:
        native.library.cache_clear()
    assert together == plain


def test_what_is_refused(families: Families, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype must be one of auto, int8, got 'int4'"):
        resolve(EngineArgs(kv_cache_dtype="int4"))
    with pytest.raises(ConfigError, match="kv_cache_dtype=int8 needs a CPU"):
        resolve(EngineArgs(**INT8)).on_device("cuda")
    with pytest.raises(ConfigError, match=r"kv_cache_dtype=int8 cannot be used with .*latent attention"):
        resolve(EngineArgs(model=str(families.path("deepseek-v2")), skip_tokenizer_init=True, **INT8))
    encoder = make_encoder_checkpoint("bert", tmp_path)
    with pytest.raises(ConfigError, match=r"kv_cache_dtype=int8 cannot be used with .*an encoder stores no KV"):
        resolve(EngineArgs(model=str(encoder), skip_tokenizer_init=True, **INT8))

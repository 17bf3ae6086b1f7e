"""Disaggregation between engines with different ranks: tokens and accepted drafts are those of a single rank.

Ranks are threads; one test starts processes. The drafter's KV is on the last stage of both sides.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.grids import grid
from tests.integration.test_disaggregation import (
    METHODS,
    complete,
    connector,
    counts,
    disaggregated,
    engine,
    requests,
    transfer_config,
)

SIZES = ((1, 1), (2, 1), (4, 1), (1, 2), (1, 3), (2, 2))
CELLS = [
    cell
    for cell in grid(
        SIZES, SIZES, ("none", "mtp", "eagle3"), ((16, 16), (16, 32), (32, 16)), ("sockets", "shared_memory")
    )
    if cell.values[:2] != ((1, 1), (1, 1))
]


def ranks(size: tuple[int, int], backend: str = "uniproc") -> dict[str, Any]:
    tp, pp = size
    return {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "distributed_executor_backend": backend}


@pytest.fixture(scope="module")
def expected() -> dict[str, list[Any]]:
    """Returns the results of a single rank, by speculator."""
    found: dict[str, list[Any]] = {}
    for method in ("none", "mtp", "eagle3"):
        arguments = {} if METHODS[method] is None else {"speculative_config": METHODS[method]}
        with engine(**arguments, enable_prefix_caching=False) as one:
            found[method] = [counts(complete(one, prompt, params)) for prompt, params in requests()]
    return found


def check(
    expected: list[Any],
    method: str,
    sizes: tuple[tuple[int, int], tuple[int, int]],
    block_sizes: tuple[int, int],
    transport: str,
    backend: str,
    **options: Any,
) -> None:
    common = {} if METHODS[method] is None else {"speculative_config": METHODS[method]}
    for_p, for_d = (
        {**common, **ranks(size, backend), "block_size": block_size}
        for size, block_size in zip(sizes, block_sizes, strict=True)
    )
    with (
        engine(kv_transfer_config=transfer_config("kv_producer", transport, **options), **for_p) as prefill,
        engine(kv_transfer_config=transfer_config("kv_consumer", transport, **options), **for_d) as decode,
    ):
        for (prompt, params), answer in zip(requests(), expected, strict=True):
            for llm in (prefill, decode):
                assert llm.reset_prefix_cache()
            found = disaggregated(prefill, decode, prompt, params)
            assert counts(found) == answer
            assert found.num_cached_tokens == (len(found.prompt_token_ids) - 1) // block_sizes[1] * block_sizes[1]
        assert connector(decode, "consumer_completed") == len(expected)
        assert connector(decode, "consumer_refused") == connector(decode, "consumer_cancelled") == 0
        assert connector(prefill, "held") == 0


@pytest.mark.spread(2)
@pytest.mark.parametrize(("p_size", "d_size", "method", "block_sizes", "transport"), CELLS)
def test_transfers_between_any_ranks(
    expected: dict[str, list[Any]],
    p_size: tuple[int, int],
    d_size: tuple[int, int],
    method: str,
    block_sizes: tuple[int, int],
    transport: str,
) -> None:
    check(expected[method], method, (p_size, d_size), block_sizes, transport, "uniproc")


@pytest.mark.long
@pytest.mark.parametrize("transport", ["sockets", "shared_memory"])
def test_ranks_in_processes(expected: dict[str, list[Any]], transport: str) -> None:
    check(expected["mtp"], "mtp", ((2, 1), (1, 2)), (16, 32), transport, "mp")

"""Disaggregation over a transfer library, configured as in vLLM: the same tokens, also when a helper is stopped."""

from __future__ import annotations

import itertools
import os
import signal
from typing import Any

import numpy as np
import pytest

from penstock import LLM, SamplingParams
from penstock.kv_transfer.p2p.worker import P2PWorker
from penstock.kv_transfer.transports.agent_transport import AgentTransport
from penstock.kv_transfer.transports.agents import LIBRARIES
from penstock.simulation.conformance import runs_of
from penstock.utils.errors import ConfigError
from penstock.utils.shared_memory import create_memory
from tests.integration.test_agent_transport import endpoint, wait_until
from tests.integration.test_disaggregation import (
    ENGINE,
    FACT,
    METHODS,
    check_identity,
    complete,
    connector,
    disaggregated,
    engine,
    requests,
    transfer_config,
)
from tests.integration.test_disaggregation_ranks import check as check_ranks
from tests.integration.transfer_libraries import LIBRARY_KINDS, with_library

CONFIGS: dict[str, dict[str, Any]] = {
    "mooncake": transfer_config("", "mooncake", "MooncakeConnector", mooncake_protocol="tcp", bootstrap_port=0),
    "nixl": transfer_config("", "nixl", "NixlConnector", backends=["UCX"]),
}
IN_EVERY_RUN = {("mtp", True, (16, 32)), ("none", False, (32, 16))}
GRID = [
    with_library(library, library, *values, exhaustive=values not in IN_EVERY_RUN)
    for library in LIBRARIES
    for values in itertools.product(METHODS, (False, True), ((16, 16), (16, 32), (32, 16), (32, 32)))
]


@pytest.mark.spread(2)
@pytest.mark.parametrize(("library", "method", "overlap", "block_sizes"), GRID)
def test_tokens_and_acceptance_are_those_of_one_engine(
    library: str, method: str, overlap: bool, block_sizes: tuple[int, int]
) -> None:
    check_identity(method, overlap, block_sizes, CONFIGS[library])


@pytest.mark.exhaustive
@pytest.mark.parametrize("library", LIBRARY_KINDS)
def test_ranks_in_processes(library: str) -> None:
    with engine(enable_prefix_caching=False) as one:
        expected = [
            (each.outputs[0].token_ids, each.num_draft_tokens, each.num_accepted_tokens)
            for each in (complete(one, prompt, params) for prompt, params in requests())
        ]
    check_ranks(expected, "none", ((2, 1), (1, 2)), (16, 32), library, "mp")


def worker_connector(llm: LLM) -> P2PWorker:
    (handle,) = llm._core._executor._workers
    return handle._worker._worker._runner.kv_step._connector


def kv_bytes(llm: LLM) -> np.ndarray:
    """Returns a copy of all KV memory."""
    worker = worker_connector(llm)
    return np.concatenate([np.frombuffer(view, np.uint8) for view in worker._transport._memory._regions])


@pytest.mark.spread(1)
@pytest.mark.parametrize("library", LIBRARY_KINDS)
def test_a_helper_that_continues_after_its_lease_changes_no_block(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader gives the transfer up, computes the prompt, and uses all of its blocks for other requests."""
    # On one host UCX would read the memory of a stopped process.
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    prompt, params = FACT * 4, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    others = [(f"Something else, number {n}. " * 30, params) for n in range(8)]
    with engine() as one:
        expected = complete(one, prompt, params).outputs[0].token_ids
        expected_others = [complete(one, *each).outputs[0].token_ids for each in others]
    short = {**CONFIGS[library]["kv_connector_extra_config"], "lease_seconds": 0.5}
    config = {**CONFIGS[library], "kv_connector_extra_config": short, "kv_load_timeout": 1.5}
    few = {"num_gpu_blocks_override": 48}
    with (
        engine(kv_transfer_config={**config, "kv_role": "kv_producer", "engine_id": "p"}) as prefill,
        engine(kv_transfer_config={**config, "kv_role": "kv_consumer", "engine_id": "d"}, **few) as decode,
    ):
        transport = worker_connector(prefill)._transport
        assert isinstance(transport, AgentTransport)

        def reads() -> bool:
            """Tells whether D has read from P, which fails while a helper takes longer to start than a load may."""
            completed = connector(decode, "consumer_completed")
            assert decode.reset_prefix_cache()
            assert disaggregated(prefill, decode, prompt, params).outputs[0].token_ids == expected
            return connector(decode, "consumer_completed") > completed

        wait_until(reads, "D reads from P")
        assert decode.reset_prefix_cache()
        completed = connector(decode, "consumer_completed")
        stopped = transport.serving_pid
        assert stopped is not None
        os.kill(stopped, signal.SIGSTOP)
        try:
            assert disaggregated(prefill, decode, prompt, params).outputs[0].token_ids == expected
            assert connector(decode, "consumer_completed") == completed, "it was read from a stopped helper"
            for each, answer in zip(others, expected_others, strict=True):
                assert complete(decode, *each).outputs[0].token_ids == answer
            before = kv_bytes(decode)
        finally:
            os.kill(stopped, signal.SIGCONT)
        read_from(library, transport)
        assert np.array_equal(kv_bytes(decode), before), "bytes have landed after the end of a transfer"
        # P still works, and D reads from it again.
        wait_until(reads, "D reads from P again")


def read_from(library: str, transport: AgentTransport) -> None:
    """Reads with a third endpoint: after that, the helper has continued, or another one serves instead."""
    memory = create_memory(1 << 16)
    other = endpoint(library, memory, transport._key)
    try:
        name = other.connect(transport.descriptor())
        handle = other.submit(name, runs_of((0, 0, 1 << 16)))
        wait_until(lambda: other.poll(handle).is_settled, "the read settles")
    finally:
        other.close()


def test_a_missing_library_is_an_error_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"pip install 'penstock\[mooncake\]'"):
        LLM(**ENGINE, kv_transfer_config={**CONFIGS["mooncake"], "kv_role": "kv_both", "engine_id": "d"})


@pytest.mark.parametrize(("option", "value"), [("mooncake_protocol", "pigeons"), ("backends", []), ("backends", "UCX")])
def test_an_invalid_option_is_refused_at_the_start(option: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=option):
        LLM(**ENGINE, kv_transfer_config=transfer_config("kv_both", **{option: value}))

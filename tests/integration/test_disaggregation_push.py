"""Push: P writes into D's memory. Tokens are those of one engine, and no bytes land that D does not wait for."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from penstock import LLM, SamplingParams
from penstock.utils.errors import ConfigError
from tests.integration.push_producer import PushProducer
from tests.integration.test_agent_transport import wait_until
from tests.integration.test_disaggregation import (
    ENGINE,
    FACT,
    METHODS,
    check_identity,
    complete,
    connector,
    disaggregated,
    engine,
    pair,
    requests,
    transfer_config,
)
from tests.integration.test_disaggregation_libraries import kv_bytes, worker_connector
from tests.integration.test_disaggregation_ranks import check as check_ranks

BLOCK_SIZES = ((16, 16), (16, 32), (32, 16), (32, 32))
IN_EVERY_RUN = {("mtp", True, (16, 32)), ("none", False, (32, 16))}
GRID = [
    pytest.param(*values, marks=() if values in IN_EVERY_RUN else pytest.mark.exhaustive)
    for values in itertools.product(METHODS, (False, True), BLOCK_SIZES)
]


@pytest.mark.spread(2)
@pytest.mark.parametrize(("method", "overlap", "block_sizes"), GRID)
def test_tokens_and_acceptance_are_those_of_one_engine(
    method: str, overlap: bool, block_sizes: tuple[int, int]
) -> None:
    check_identity(method, overlap, block_sizes, transfer_config("", transfer="push"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("parts", [((2, 1), (1, 2)), ((1, 2), (2, 1)), ((1, 1), (2, 2))])
def test_ranks_in_processes(parts: Any) -> None:
    with engine(enable_prefix_caching=False) as one:
        expected = [
            (each.outputs[0].token_ids, each.num_draft_tokens, each.num_accepted_tokens)
            for each in (complete(one, prompt, params) for prompt, params in requests())
        ]
    check_ranks(expected, "none", parts, (16, 32), "sockets", "mp", transfer="push")


@pytest.mark.parametrize("on_p", ["pull", "push"])
def test_the_decode_instance_chooses_the_direction(on_p: str) -> None:
    prompt, params = requests()[1]
    for_p, for_d = (
        transfer_config(role, transfer=how) for role, how in (("kv_producer", on_p), ("kv_consumer", "push"))
    )
    with engine() as one:
        expected = complete(one, prompt, params).outputs[0].token_ids
    with engine(kv_transfer_config=for_p) as prefill, engine(kv_transfer_config=for_d) as decode:
        assert disaggregated(prefill, decode, prompt, params).outputs[0].token_ids == expected
        assert connector(decode, "consumer_completed") == connector(prefill, "producer_completed") == 1
        # P has connected to D, and not the reverse.
        transports: list[Any] = [worker_connector(each)._transport for each in (prefill, decode)]
        assert [len(each._peers) for each in transports] == [1, 0]


def test_without_digests_the_tokens_are_the_same() -> None:
    prompt, params = requests()[1]
    with engine() as one:
        expected = complete(one, prompt, params).outputs[0].token_ids
    with pair(options={"transfer": "push", "attestation": "off"}) as (prefill, decode):
        assert disaggregated(prefill, decode, prompt, params).outputs[0].token_ids == expected
        assert connector(decode, "consumer_completed") == 1


def test_a_transport_that_cannot_end_writes_is_refused_at_the_start() -> None:
    config = transfer_config("kv_consumer", "shared_memory", transfer="push")
    with pytest.raises(ConfigError, match=r"transfer=push does not work with transport=shared_memory.*transfer=pull"):
        LLM(**ENGINE, kv_transfer_config=config)
    with pytest.raises(ConfigError, match="transfer of P2PConnector must be one of pull, push"):
        LLM(**ENGINE, kv_transfer_config=transfer_config("kv_both", transfer="throw"))
    # P writes to the other engine, so its own transport may be any.
    with engine(kv_transfer_config=transfer_config("kv_producer", "shared_memory", transfer="push")):
        pass


# ---- P in another process, which is stopped or killed during a write ----

PROMPT, PARAMS = FACT * 6, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
OTHERS = [f"Something else, number {number}. " * 30 for number in range(8)]


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    with engine() as one:
        return {prompt: complete(one, prompt, PARAMS).outputs[0].token_ids for prompt in (PROMPT, *OTHERS)}


@pytest.fixture
def producer() -> Iterator[PushProducer]:
    made = PushProducer(transfer_config("kv_producer", lease_seconds=2.0))
    try:
        yield made
    finally:
        made.end()


def decoding() -> Any:
    """Starts an engine with few blocks, which gives up a write soon."""
    config = {**transfer_config("kv_consumer", transfer="push"), "kv_load_timeout": 6.0}
    return engine(kv_transfer_config=config, num_gpu_blocks_override=48)


def is_written(producer: PushProducer, decode: LLM, expected: list[int]) -> bool:
    """Runs the prompt through both; returns whether its KV came from P."""
    completed = connector(decode, "consumer_completed")
    assert decode.reset_prefix_cache()
    handoff = producer.ask("prefill", PROMPT, PARAMS.max_tokens)
    found = complete(decode, PROMPT, replace(PARAMS, kv_transfer_params=handoff))
    assert found.outputs[0].token_ids == expected
    return connector(decode, "consumer_completed") > completed


def test_a_producer_in_another_process_writes(producer: PushProducer, expected: dict[str, list[int]]) -> None:
    with decoding() as decode:
        for _ in range(3):
            wait_until(lambda: is_written(producer, decode, expected[PROMPT]), "P writes into D's memory")
        wait_until(lambda: producer.ask("count", "held") == 0, "P has released its blocks")


@pytest.mark.parametrize("where", ["before", "halfway"])
def test_a_producer_that_continues_after_its_lease_changes_no_block(
    producer: PushProducer, expected: dict[str, list[int]], where: str
) -> None:
    """D gives the write up, computes the prompt, and uses all of its blocks for other requests."""
    with decoding() as decode:
        wait_until(lambda: is_written(producer, decode, expected[PROMPT]), "P writes into D's memory")
        cancelled = connector(decode, "consumer_cancelled")
        assert producer.ask("stop", where) == "ready"
        assert not is_written(producer, decode, expected[PROMPT])
        assert producer.answer() == "stopped"
        assert connector(decode, "consumer_cancelled") == cancelled + 1
        for prompt in OTHERS:
            assert complete(decode, prompt, PARAMS).outputs[0].token_ids == expected[prompt]
        before = kv_bytes(decode)
        os.kill(producer.process.pid, signal.SIGCONT)
        wait_until(lambda: producer.ask("count", "held") == 0, "P has released its blocks")
        assert np.array_equal(kv_bytes(decode), before), "bytes have landed after the end of a write"
        wait_until(lambda: is_written(producer, decode, expected[PROMPT]), "P writes again")


def test_a_producer_that_is_killed_during_a_write(producer: PushProducer, expected: dict[str, list[int]]) -> None:
    with decoding() as decode:
        assert producer.ask("stop", "halfway") == "ready"
        handoff = producer.ask("prefill", PROMPT, PARAMS.max_tokens)

        def kill() -> None:
            assert producer.answer() == "stopped"
            producer.end()

        killing = threading.Thread(target=kill)
        killing.start()
        found = complete(decode, PROMPT, replace(PARAMS, kv_transfer_params=handoff))
        killing.join()
        assert found.outputs[0].token_ids == expected[PROMPT]
        assert connector(decode, "consumer_cancelled") == 1
        for prompt in OTHERS:
            assert complete(decode, prompt, PARAMS).outputs[0].token_ids == expected[prompt]

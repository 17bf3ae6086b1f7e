"""Disaggregation between engines whose steps take longer than every deadline of the protocol."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from penstock.kv_transfer.p2p.worker import P2PWorker
from penstock.messages.kv_transfer import KVConnectorMetadata
from tests.integration.test_disaggregation import complete, connector, counts, engine, pair, prefill_for, requests

LEASE_SECONDS = 0.3


def test_a_prompt_is_handed_over_while_its_engine_computes_one_long_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """P is in the middle of a step from before the handshake until D has its KV; D's step is longer than a lease."""
    (prompt, params), (other, _) = requests()[5], requests()[6]
    begin_step, is_busy, may_go_on = P2PWorker.begin_step, threading.Event(), threading.Event()
    with engine(enable_prefix_caching=False) as one:
        expected = counts(complete(one, prompt, params))
    with pair(options={"lease_seconds": LEASE_SECONDS}) as (prefill, decode):
        handoff = prefill_for(prefill, prompt, params)
        busy = threading.Thread(target=complete, args=(prefill, other, replace(params, max_tokens=1)))

        def begin_slowly(worker: P2PWorker, metadata: KVConnectorMetadata | None) -> None:
            begin_step(worker, metadata)
            if threading.current_thread() is busy:
                is_busy.set()
                assert may_go_on.wait(60.0)
            elif worker._metadata.reads:
                threading.Event().wait(3 * LEASE_SECONDS)

        monkeypatch.setattr(P2PWorker, "begin_step", begin_slowly)
        busy.start()
        try:
            assert is_busy.wait(60.0)
            found = complete(decode, prompt, replace(params, kv_transfer_params=handoff))
            assert busy.is_alive()
        finally:
            may_go_on.set()
            busy.join()
        assert counts(found) == expected
        assert connector(decode, "consumer_completed") == 1
        assert found.num_cached_tokens == (len(found.prompt_token_ids) - 1) // 16 * 16

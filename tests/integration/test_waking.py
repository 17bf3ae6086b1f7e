"""An idle engine takes a step when its connector has work, and none while the connector only waits."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from penstock import AsyncLLM, SamplingParams
from tests.integration.waking_connector import RELEASE

GREEDY = SamplingParams(temperature=0, max_tokens=2)
PROMPT = {"prompt_token_ids": list(range(40))}
SECONDS = 20.0


def config(folder: Path, is_child: bool = False) -> dict[str, Any]:
    options = {"socket": str(folder / "control")}
    connector = {
        "kv_connector": "WakingConnector",
        "kv_connector_module_path": "tests.integration.waking_connector",
        "kv_connector_extra_config": options,
    }
    if not is_child:
        return connector
    other = {"kv_connector": "OffloadingConnector"}
    return {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [other, connector]}}


def send(folder: Path, message: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendto(message, str(folder / "control"))


@pytest.mark.parametrize("is_child", [False, True], ids=["alone", "one of several"])
def test_an_idle_core_wakes_up(tmp_path: Path, is_child: bool) -> None:
    prefix = "WakingConnector." if is_child else ""

    async def run() -> None:
        engine = await AsyncLLM.start(max_model_len=256, kv_transfer_config=config(tmp_path, is_child))

        async def counters() -> Mapping[str, float]:
            """Asking for them takes no step: the report of an abort brings them."""
            before = engine.stats
            engine._core.abort_requests(("unknown",))
            while engine.stats is before:
                await asyncio.sleep(0.001)
            return {name.removeprefix(prefix): value for name, value in engine.stats.connector.items()}

        async for _ in engine.generate(PROMPT, GREEDY):
            pass
        await asyncio.sleep(0.2)
        idle = await counters()
        assert idle["num_held"] == 1
        await engine.check_integrity()
        await asyncio.sleep(0.5)
        assert (await counters())["num_steps"] == idle["num_steps"], "the engine polls"
        send(tmp_path, RELEASE)
        deadline = time.monotonic() + SECONDS
        while (await counters())["num_held"]:
            assert time.monotonic() < deadline, "the engine sleeps"
        await engine.check_integrity()
        await asyncio.sleep(0.5)
        assert (await counters())["num_steps"] == idle["num_steps"] + 1
        await engine.shutdown()

    asyncio.run(run())

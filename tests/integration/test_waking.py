"""An idle engine takes a step when its connector has work, and none while the connector only waits."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, AsyncLLM, EngineDeadError, SamplingParams
from penstock.kv_transfer.connector import NO_MATCH, PENDING, ConnectorEvent, LoadEnded, Match, RequestView
from penstock.kv_transfer.factory import ConnectorContext
from penstock.kv_transfer.multi import MultiScheduler, MultiWorker
from penstock.kv_transfer.null import NullSchedulerConnector, NullWorkerConnector
from penstock.messages.kv_transfer import (
    BadRange,
    ConnectorSetup,
    KVConnectorMetadata,
    KVConnectorOutput,
    ShardId,
    TransferId,
)
from penstock.messages.scheduler_output import BlockIds, SchedulerOutput
from tests.integration.waking_connector import RELEASE, REST, WORK

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


@pytest.mark.spread(1)
@pytest.mark.parametrize("is_child", [False, True], ids=["alone", "one of several"])
def test_an_idle_core_wakes_up(tmp_path: Path, is_child: bool) -> None:
    prefix = "WakingConnector." if is_child else ""

    async def run() -> None:
        engine = await AsyncLLM.start(max_model_len=256, kv_transfer_config=config(tmp_path, is_child))

        async def counters() -> Mapping[str, float]:
            """Returns the counters from the report of an abort, which takes no step."""
            before = engine.replicas[0].stats
            engine.replicas[0]._core.abort_requests(("unknown",))
            while engine.replicas[0].stats is before:
                await asyncio.sleep(0.001)
            return {name.removeprefix(prefix): value for name, value in engine.replicas[0].stats.connector.items()}

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


# ---- Requests that wait for KV ----


class SlowPeer(NullSchedulerConnector):
    """A connector that cannot tell for some time whether a peer has the prompt."""

    def __init__(self, seconds: float) -> None:
        self.num_steps = 0
        self._seconds = seconds
        self._answer = threading.Event()

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> Match:
        if not self.num_steps:
            threading.Timer(self._seconds, self._answer.set).start()
        return NO_MATCH if self._answer.is_set() else PENDING

    def build_connector_meta(self, plan: SchedulerOutput) -> KVConnectorMetadata | None:
        self.num_steps += not plan.total_num_scheduled_tokens
        return None

    def wait(self, seconds: float) -> None:
        self._answer.wait(seconds)


def generate_with(part: NullSchedulerConnector | MultiScheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs one request in an engine whose connector has this scheduler part."""
    monkeypatch.setattr(NullPair, "part", part)
    llm = LLM(
        max_model_len=256,
        num_gpu_blocks_override=64,
        kv_transfer_config={"kv_connector": "NullPair", "kv_connector_module_path": __name__},
    )
    llm.generate(PROMPT, GREEDY, use_tqdm=False)
    llm.shutdown()


@pytest.mark.parametrize("is_child", [False, True], ids=["alone", "one of several"])
def test_a_request_that_waits_for_kv_takes_few_steps(monkeypatch: pytest.MonkeyPatch, is_child: bool) -> None:
    peer = SlowPeer(0.5)
    part = MultiScheduler({"other": NullSchedulerConnector(), "peer": peer}) if is_child else peer
    generate_with(part, monkeypatch)
    # 0.5 s in waits of 5 ms, or of half as long.
    assert 2 < peer.num_steps <= 210


class LostLoad(NullSchedulerConnector):
    """Its loads fail in the step that begins them."""

    def __init__(self) -> None:
        self.num_loads = self.num_waits = 0
        self._ended: list[ConnectorEvent] = []

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> Match:
        return NO_MATCH if self.num_loads else Match(32, is_async=True)

    def update_state_after_alloc(
        self, request: RequestView, transfer_id: TransferId, block_ids: BlockIds, num_computed_tokens: int, end: int
    ) -> None:
        self.num_loads += 1
        self._ended.append(LoadEnded(transfer_id, (BadRange(0, num_computed_tokens, end),)))

    def update_connector_output(self, output: KVConnectorOutput) -> list[ConnectorEvent]:
        events, self._ended = self._ended, []
        return events

    def wait(self, seconds: float) -> None:
        self.num_waits += 1


def test_the_end_of_a_load_is_not_followed_by_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    part = LostLoad()
    generate_with(part, monkeypatch)
    assert (part.num_loads, part.num_waits) == (1, 0)


class NullPair:
    """A connector whose scheduler part is set by a test."""

    part: Any = None

    @staticmethod
    def make_scheduler_connector(context: ConnectorContext) -> Any:
        return NullPair.part

    @staticmethod
    def make_worker_connector(context: ConnectorContext, shard: ShardId, setup: ConnectorSetup | None) -> Any:
        if setup is None:
            return NullWorkerConnector()
        return MultiWorker({"other": NullWorkerConnector(), "peer": NullWorkerConnector()})


# ---- In a program ----


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.001)


def is_served() -> bool:
    return any(thread.name == "penstock-transfers" for thread in threading.enumerate())


def num_steps(llm: LLM) -> float:
    return llm.stats().connector["num_steps"]


@pytest.mark.parametrize("overlap", [False, True], ids=["synchronous", "overlapped"])
def test_an_idle_program_serves_its_connector(tmp_path: Path, overlap: bool) -> None:
    llm = LLM(
        max_model_len=256, num_gpu_blocks_override=64, kv_transfer_config=config(tmp_path), async_scheduling=overlap
    )
    llm.generate(PROMPT, GREEDY, use_tqdm=False)
    llm.check_integrity()
    before = num_steps(llm)
    time.sleep(0.5)
    assert (num_steps(llm), llm.stats().connector["num_held"]) == (before, 1), "the engine polls"
    assert not is_served()
    send(tmp_path, RELEASE)
    wait_until(lambda: not llm.stats().connector["num_held"], "the engine sleeps")
    wait_until(lambda: not is_served(), "the thread stays")
    llm.check_integrity()
    assert num_steps(llm) == before + 1
    assert llm.reset_prefix_cache()
    llm.shutdown()


def test_an_engine_whose_connector_accepts_no_waker_has_no_thread() -> None:
    llm = LLM(max_model_len=256, kv_transfer_config={"kv_connector": "OffloadingConnector"})
    llm.generate(PROMPT, GREEDY, use_tqdm=False)
    assert not is_served()
    llm.shutdown()


def make_working(tmp_path: Path) -> LLM:
    """Returns an engine whose connector always has work."""
    llm = LLM(max_model_len=256, num_gpu_blocks_override=64, kv_transfer_config=config(tmp_path))
    send(tmp_path, WORK)
    wait_until(lambda: num_steps(llm) > 3, "the engine sleeps")
    return llm


def test_calls_interrupt_the_work_of_the_connector(tmp_path: Path) -> None:
    working = make_working(tmp_path)
    plain = LLM(max_model_len=256)
    wanted = plain.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    plain.shutdown()
    for _ in range(5):
        assert working.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids == wanted
    for _ in working.stream(PROMPT, GREEDY):
        steps = num_steps(working)
        time.sleep(0.05)
        assert num_steps(working) == steps, "between two results of a stream nothing is stepped"
    steps = num_steps(working)
    wait_until(lambda: num_steps(working) > steps + 3, "the engine sleeps")
    for _ in range(20):
        working.check_integrity()
    send(tmp_path, REST)
    wait_until(lambda: not is_served(), "the thread stays")
    working.shutdown()


def test_the_thread_does_not_keep_an_engine_alive(tmp_path: Path) -> None:
    working = make_working(tmp_path)
    program, core = weakref.ref(working), weakref.ref(working._core)
    assert is_served()
    del working
    wait_until(lambda: gc.collect() >= 0 and program() is None and core() is None, "the engine stays")
    wait_until(lambda: not is_served(), "the thread stays")


def test_a_failed_step_is_reported_by_the_next_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    working = make_working(tmp_path)

    def fail(plan: object, engine: int) -> None:
        raise RuntimeError("the device is on fire")

    monkeypatch.setattr(working._core._executor, "execute_model", fail)
    wait_until(lambda: not is_served(), "the thread stays")
    with pytest.raises(EngineDeadError, match="the device is on fire"):
        working.generate(PROMPT, GREEDY, use_tqdm=False)
    working.shutdown()


ENDS = """
import socket, sys, time
from penstock import LLM
from penstock.kv_transfer.connector import NO_MATCH, PENDING, Match, RequestView
from penstock.kv_transfer.factory import ConnectorContext
from penstock.kv_transfer.multi import MultiScheduler, MultiWorker
from penstock.kv_transfer.null import NullSchedulerConnector, NullWorkerConnector
from penstock.messages.kv_transfer import ConnectorSetup, KVConnectorMetadata, ShardId
from penstock.messages.scheduler_output import SchedulerOutput
from tests.integration.waking_connector import WORK
config, path = sys.argv[1:]
llm = LLM(max_model_len=256, kv_transfer_config=config, async_scheduling=True)
socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(WORK, path)
while llm.stats().connector["num_steps"] < 10:
    time.sleep(0.001)
print("done")
"""


# Registered before those of the thread pools, it runs after them, while the main thread still lives.
ENDS_SLOWLY = "import threading, time; threading._register_atexit(time.sleep, 0.2)"


@pytest.mark.parametrize("first", ["", ENDS_SLOWLY], ids=["at once", "slowly"])
def test_a_program_with_a_working_connector_ends_silently(tmp_path: Path, first: str) -> None:
    command = [sys.executable, "-c", first + ENDS, json.dumps(config(tmp_path)), str(tmp_path / "control")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done\n", "")

"""`--restart-on-failure`: the server keeps running and restarts an engine that has died."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from tests.integration.raw_http import Answer, Stream, call, eventually
from tests.integration.server_probes import (
    COMPLETIONS,
    endless,
    ends_with_error,
    is_gone,
    send_dashboard_request,
    wait_for,
)
from tests.integration.server_process import ServerProcess, serve
from tests.integration.timing import check_seconds, retried_when_slow

GREEDY: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 16, "temperature": 0}
OFFLOADING = '{"kv_connector": "OffloadingConnector"}'


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()]


def complete(server: ServerProcess) -> Answer:
    return call(server.url, "POST", COMPLETIONS, GREEDY)


def metric(server: ServerProcess, name: str) -> float:
    lines = call(server.url, "GET", "/metrics").body.decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + "{"))


def health(server: ServerProcess) -> tuple[int, str]:
    answer = call(server.url, "GET", "/health")
    return answer.status, answer.json()["status"]


@pytest.mark.alone
@retried_when_slow
def test_the_engine_is_restarted_and_the_server_keeps_running() -> None:
    ranks = ("--tensor-parallel-size", "2", "--num-threads", "1")
    with serve("--restart-on-failure", "2", *ranks) as server, ThreadPoolExecutor(8) as pool, ExitStack() as stack:
        before = complete(server)
        assert before.status == 200
        tokens = metric(server, "vllm:generation_tokens_total")
        dashboard = stack.enter_context(closing(send_dashboard_request(server)))
        streams = [stack.enter_context(closing(Stream(server.url, COMPLETIONS, endless()))) for _ in range(8)]
        assert [stream.begin() for stream in streams] == [200] * 8
        wait_for(server, 8)
        core = server.core_pid
        ranks_before = children(core)
        os.kill(ranks_before[1], signal.SIGKILL)
        killed = time.monotonic()
        for error in pool.map(lambda stream: ends_with_error(stream.events()), streams):
            assert "worker (0, 1) was killed by signal 9" in error["message"]
        check_seconds(time.monotonic() - killed, 1.0)

        assert health(server) == (200, "restarting")
        assert call(server.url, "GET", "/ready").status == 503
        refused = complete(server)
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        assert "started again" in refused.error["message"]
        assert metric(server, "penstock:engine_up") == 0
        assert call(server.admin_url, "POST", "/reset_prefix_cache").status == 503

        eventually(lambda: call(server.url, "GET", "/ready").status == 200, 60)
        assert health(server) == (200, "ok")
        assert is_gone(core)
        assert all(is_gone(pid) for pid in ranks_before)
        assert complete(server).json()["choices"] == before.json()["choices"]
        assert metric(server, "penstock:engine_restarts_total") == 1
        assert metric(server, "penstock:engine_up") == 1
        assert metric(server, "vllm:generation_tokens_total") > tokens
        wait_for(server, 0)
        assert call(server.admin_url, "POST", "/check_integrity").json() == {"whole": True}
        assert b'"status":"restarting"' in _received(dashboard)
        assert server.terminate() == 0
        assert sum("the engine has been started again" in line for line in server.log) == 1


def _received(connection: Any) -> bytes:
    connection.setblocking(False)
    pieces: list[bytes] = []
    try:
        while piece := connection.recv(1 << 20):
            pieces.append(piece)
    except BlockingIOError:
        pass
    return b"".join(pieces)


@pytest.mark.long
@pytest.mark.alone
def test_the_server_ends_when_no_restart_is_left() -> None:
    with serve("--restart-on-failure", "1", "--kv-transfer-config", OFFLOADING) as server:
        assert complete(server).status == 200
        os.kill(server.core_pid, signal.SIGKILL)
        eventually(lambda: health(server) == (200, "restarting"), 2)
        eventually(lambda: health(server) == (200, "ok"), 60)
        assert complete(server).status == 200
        os.kill(server.core_pid, signal.SIGKILL)
        eventually(lambda: health(server)[0] == 503, 2)
        assert server.process.wait(15) == 1


@pytest.mark.long
@pytest.mark.alone
def test_a_server_that_restarts_its_engine_still_ends_on_sigterm() -> None:
    with serve("--restart-on-failure", "5") as server:
        os.kill(server.core_pid, signal.SIGKILL)
        eventually(lambda: health(server) == (200, "restarting"), 2)
        eventually(lambda: children(server.pid), 10)
        (core,) = children(server.pid)
        assert server.terminate() == 0
        assert is_gone(core)

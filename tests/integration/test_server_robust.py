"""A server under crashes, signals, clients that disconnect or are slow, and overload."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from penstock.frontend.replica import RequestStream
from penstock.messages.outputs import CompletionOutput, RequestOutput
from penstock.server.openai.generation import Generation
from tests.integration.raw_http import Stream, call, connect, eventually, post_bytes, send_raw
from tests.integration.server_probes import (
    COMPLETIONS,
    check_idle,
    endless,
    ends_with_error,
    is_gone,
    num_unfinished,
    resident_bytes,
    send_dashboard_request,
    stopped,
    wait_for,
)
from tests.integration.server_process import ServerProcess, serve
from tests.processes import started

pytestmark = pytest.mark.alone

CHAT = "/v1/chat/completions"
LONG_PROMPT = [5 + i % 3000 for i in range(1900)]
# Megabytes of answer for little work, which fill the server's buffers if the client does not read.
BULKY: dict[str, Any] = {"prompt": LONG_PROMPT, "echo": True, "logprobs": 20, "n": 8, "temperature": 1}
SIGNALS = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])


def open_stream(server: ServerProcess, body: dict[str, Any] | None = None) -> tuple[Stream, Iterator[Any]]:
    """Opens a stream and reads its first event; returns it and the events that follow."""
    stream = Stream(server.url, COMPLETIONS, endless() if body is None else body)
    assert stream.begin() == 200
    events = stream.events()
    assert next(events)["choices"]
    return stream, events


@pytest.fixture(autouse=True)
def _streams_are_closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    opened: list[Stream] = []
    original = Stream.__init__

    def remember(self: Stream, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        opened.append(self)

    monkeypatch.setattr(Stream, "__init__", remember)
    yield
    for stream in opened:
        stream.close()


@pytest.fixture(scope="module")
def small() -> Iterator[ServerProcess]:
    """Starts a server that runs four requests at once and takes thirty steps for a long prompt."""
    with serve("--max-num-seqs", "4", "--max-num-batched-tokens", "64") as server:
        yield server


# ---- The death of one process, and a process that hangs ----


def test_every_client_gets_an_error_at_once_when_the_core_is_killed() -> None:
    with serve() as server, ThreadPoolExecutor(2) as pool:
        streams = [open_stream(server)[1] for _ in range(3)]
        whole = [pool.submit(call, server.url, "POST", COMPLETIONS, endless(stream=False)) for _ in range(2)]
        wait_for(server, 5)
        os.kill(server.core_pid, signal.SIGKILL)
        killed = time.monotonic()
        eventually(lambda: call(server.url, "GET", "/health").status == 503, 3)
        health = call(server.url, "GET", "/health").json()
        refused = call(server.url, "POST", COMPLETIONS, endless())
        for events in streams:
            assert "signal 9" in ends_with_error(events)["message"]
        for answer in (refused, *(future.result() for future in whole)):
            assert answer.status == 503
            assert answer.error["type"] == "service_unavailable_error"
        assert time.monotonic() - killed < 5
        assert health["status"] == "dead"
        assert "signal 9" in health["reason"]
        assert server.process.wait(15) == 1


def test_the_core_ends_when_the_front_end_is_killed() -> None:
    with serve() as server:
        core = server.core_pid
        _, events = open_stream(server)
        server.process.kill()
        assert "[DONE]" not in list(events)
        eventually(lambda: is_gone(core), 15)


def test_health_depends_on_progress() -> None:
    timeout = 1.5
    with serve("--health-timeout", str(timeout)) as server, ThreadPoolExecutor(1) as pool:

        def status() -> str:
            return call(server.url, "GET", "/health").json()["status"]

        # A client that has not fetched all of its finished answer must not make an idle engine look busy.
        lazy = Stream(server.url, COMPLETIONS, endless(**BULKY | {"max_tokens": 2}), receive_buffer=4096)
        wait_for(server, 8)
        wait_for(server, 0, 60)
        with stopped(server.core_pid):
            idle = time.monotonic()
            while time.monotonic() < idle + 1.5 * timeout:
                assert status() == "ok"
            asked = time.monotonic()
            answer = pool.submit(call, server.url, "POST", COMPLETIONS, {"prompt": "a", "max_tokens": 2})
            wait_for(server, 1)
            first = status()
            assert first == "ok" or time.monotonic() > asked + timeout, "idle time was counted as a standstill"
            eventually(lambda: call(server.url, "GET", "/health").status == 503, 3 * timeout)
            health = call(server.url, "GET", "/health").json()
            assert health["status"] == "unhealthy"
            assert "1 requests wait, and no step was made" in health["reason"]
            assert call(server.url, "GET", "/ready").status == 503
        assert answer.result().status == 200
        assert status() == "ok"
        lazy.close()


# ---- Signals ----


@pytest.mark.spread(1)
@SIGNALS
def test_a_signal_lets_running_requests_finish(number: int) -> None:
    with serve("--shutdown-timeout", "120") as server, send_dashboard_request(server):
        runs = [open_stream(server, endless(max_tokens=150))[1] for _ in range(2)]
        server.process.send_signal(number)
        eventually(lambda: call(server.url, "GET", "/ready").status == 503)
        refused = call(server.url, "POST", COMPLETIONS, endless())
        assert refused.status == 503
        assert int(refused.headers["retry-after"]) > 0
        assert "shutting down" in refused.error["message"]
        health = call(server.url, "GET", "/health")
        assert (health.status, health.json()["status"]) == (200, "draining")
        for events in runs:
            *_, last, done = events
            assert last["choices"][0]["finish_reason"] == "length"
            assert done == "[DONE]"
        assert server.process.wait(60) == 0
        assert "Traceback" not in "".join(server.log)


@pytest.mark.spread(1)
@pytest.mark.parametrize(("timeout", "again"), [("0.5", None), ("60", signal.SIGTERM), ("60", signal.SIGINT)])
def test_a_request_that_runs_too_long_gets_an_error(timeout: str, again: int | None) -> None:
    with serve("--shutdown-timeout", timeout) as server, ThreadPoolExecutor(1) as pool:
        _, events = open_stream(server)
        whole = pool.submit(call, server.url, "POST", COMPLETIONS, endless(stream=False))
        wait_for(server, 2)
        server.process.send_signal(signal.SIGTERM)
        if again is not None:
            eventually(lambda: call(server.url, "GET", "/ready").status == 503)
            server.process.send_signal(again)
        assert "shut down" in ends_with_error(events)["message"]
        assert whole.result().status == 503
        assert server.process.wait(8) == 0
        assert "Traceback" not in "".join(server.log)


@pytest.mark.long
def test_an_idle_server_ends_quickly_with_open_connections() -> None:
    with (
        serve() as server,
        send_dashboard_request(server),
        connect(server.url),
        connect(server.url) as kept,
        connect(server.url) as half,
    ):
        kept.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert kept.recv(4096)
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        began = time.monotonic()
        assert server.terminate(20) == 0
        # Only the incomplete body may delay the end, by the few seconds that flushing answers may take.
        assert time.monotonic() - began < 8


@pytest.mark.long
def test_a_slow_reader_gets_its_whole_answer_at_the_shutdown() -> None:
    with serve() as server:
        core = server.core_pid
        lazy = Stream(server.url, COMPLETIONS, endless(**BULKY | {"max_tokens": 2}), receive_buffer=4096)
        wait_for(server, 8)
        wait_for(server, 0, 60)
        server.process.send_signal(signal.SIGTERM)
        eventually(lambda: is_gone(core))
        assert lazy.begin() == 200
        *chunks, done = lazy.events()
        assert done == "[DONE]"
        assert not [chunk["error"] for chunk in chunks if "error" in chunk]
        reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
        assert reasons.count("length") == 8
        assert server.process.wait(10) == 0


@SIGNALS
def test_a_signal_while_the_model_loads(number: int) -> None:
    command = [sys.executable, "-m", "penstock.cli.main", "serve", "--port", "0"]
    with started(command, stderr=subprocess.PIPE, text=True) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        eventually(lambda: children.read_text(encoding="utf-8").split())
        core = int(children.read_text(encoding="utf-8").split()[0])
        process.send_signal(number)
        _, log = process.communicate(timeout=10)
    assert process.returncode in (-signal.SIGTERM, 128 + signal.SIGTERM, 128 + signal.SIGINT, 0)
    assert "Traceback" not in log
    eventually(lambda: is_gone(core), 15)


@SIGNALS
def test_a_signal_as_soon_as_the_server_is_announced(number: int) -> None:
    with serve() as server:
        server.process.send_signal(number)
        assert server.process.wait(20) == 0
        assert "Traceback" not in "".join(server.log)


# ---- Clients that disconnect ----


def _disconnect_in_the_queue(server: ServerProcess) -> None:
    running = [open_stream(server)[0] for _ in range(4)]
    queued = Stream(server.url, COMPLETIONS, endless())
    wait_for(server, 5)
    queued.close()
    wait_for(server, 4, 2)
    for stream in running:
        stream.close()


def _disconnect_in_prefill(server: ServerProcess) -> None:
    stream = Stream(server.url, COMPLETIONS, endless(prompt=LONG_PROMPT, max_tokens=100))
    wait_for(server, 1)
    stream.close()


def _disconnect_in_the_middle(server: ServerProcess) -> None:
    open_stream(server)[0].close()


def _disconnect_in_chat(server: ServerProcess) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2000, "ignore_eos": True, "stream": True}
    stream = Stream(server.url, CHAT, body)
    wait_for(server, 1)
    stream.close()


def _disconnect_without_stream(server: ServerProcess) -> None:
    stream = Stream(server.url, COMPLETIONS, endless(stream=False))
    wait_for(server, 1)
    stream.close()


def _disconnect_before_the_body_is_complete(server: ServerProcess) -> None:
    request = post_bytes(COMPLETIONS, endless())
    with connect(server.url) as connection:
        connection.sendall(request[:-5])


def _disconnect_after_half_a_chunk(server: ServerProcess) -> None:
    """The received bytes look like a complete body, but the sender did not end it."""
    body = json.dumps(endless()).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with connect(server.url) as connection:
        connection.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n" + b"%x\r\n%s\r\n" % (len(body), body))


def _disconnect_with_several(server: ServerProcess) -> None:
    several = endless(prompt=["One", "Two", "Three"], n=2, temperature=1)
    stream = open_stream(server, several)[0]
    whole = Stream(server.url, COMPLETIONS, {**several, "stream": False})
    wait_for(server, 12)
    stream.close()
    wait_for(server, 6, 2)
    whole.close()


DISCONNECTIONS = [
    _disconnect_in_the_queue, _disconnect_in_prefill, _disconnect_in_the_middle, _disconnect_in_chat,
    _disconnect_without_stream,
    _disconnect_before_the_body_is_complete, _disconnect_after_half_a_chunk, _disconnect_with_several,
]  # fmt: skip


@pytest.mark.parametrize("disconnect", DISCONNECTIONS)
def test_a_disconnected_client_frees_its_resources(
    small: ServerProcess, disconnect: Callable[[ServerProcess], None]
) -> None:
    disconnect(small)
    # Much sooner than the request would have ended by itself.
    wait_for(small, 0, 2)
    check_idle(small)


NUM_CLIENTS = 64
NUM_PROMPTS = 16
NUM_ROUNDS = 32


def _client_body(client: int) -> dict[str, Any]:
    prompt = [100 + client % NUM_PROMPTS, *range(200, 230 + client % NUM_PROMPTS)]
    return endless(prompt=prompt, max_tokens=10, temperature=1.0, seed=client % NUM_PROMPTS, return_token_ids=True)


async def _run_client(url: str, client: int, disconnect_after: int | None) -> list[int]:
    """Returns the tokens of one stream, read to its end or for `disconnect_after` events."""
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    try:
        writer.write(post_bytes(COMPLETIONS, _client_body(client), {"Connection": "close"}))
        tokens: list[int] = []
        num_events = 0
        while num_events != disconnect_after and (line := await reader.readline()):
            if line.startswith(b"data: {"):
                num_events += 1
                tokens += json.loads(line[6:])["choices"][0]["token_ids"]
        return tokens
    finally:
        writer.transport.abort()


def test_disconnecting_changes_no_other_tokens_and_leaks_no_memory() -> None:
    chance = random.Random(1)

    async def run_round(url: str) -> dict[int, list[int]]:
        leaving = set(chance.sample(range(NUM_CLIENTS), NUM_CLIENTS // 3))
        moments = [chance.randrange(8) if client in leaving else None for client in range(NUM_CLIENTS)]
        results = await asyncio.gather(*(_run_client(url, c, moment) for c, moment in enumerate(moments)))
        return {client: tokens for client, tokens in enumerate(results) if client not in leaving}

    # Few blocks, so that all have been touched, and paged in, after the first rounds. Large tensors get pages of their
    # own: in glibc's heap they cause fragmentation, which changed its resident size by up to 10 MiB.
    allocation = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_ARENA_MAX": "1"}
    with serve("--num-gpu-blocks-override", "256", env=allocation) as server:
        alone = [asyncio.run(_run_client(server.url, client, None)) for client in range(NUM_PROMPTS)]
        assert all(len(tokens) == 10 for tokens in alone)
        memory: list[tuple[int, int]] = []
        for _ in range(NUM_ROUNDS):
            for client, tokens in asyncio.run(run_round(server.url)).items():
                assert tokens == alone[client % NUM_PROMPTS], client
            check_idle(server)
            memory.append((resident_bytes(server.pid), resident_bytes(server.core_pid)))
        for early, late in zip(memory[NUM_ROUNDS // 2], memory[-1], strict=True):
            assert late < early + (8 << 20), memory


# ---- Slow clients ----


@pytest.mark.long
def test_a_slow_reader_does_not_delay_others() -> None:
    with serve() as server:
        lazy = Stream(server.url, COMPLETIONS, endless(**BULKY | {"max_tokens": 100}), receive_buffer=4096)
        wait_for(server, 8)
        quick = call(server.url, "POST", COMPLETIONS, {"prompt": "a", "max_tokens": 10, "ignore_eos": True})
        assert quick.json()["usage"]["completion_tokens"] == 10
        assert num_unfinished(server) == 8, "the slow reader was meant to be still running"
        wait_for(server, 0, 60)
        assert lazy.begin() == 200
        *chunks, done = lazy.events()
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        assert sum(len(choice["logprobs"]["tokens"]) for choice in choices) == 8 * (len(LONG_PROMPT) + 100)
        assert len(choices) < 8 * 100, "an answer that is not read must not pile up"
        assert (sum(choice["finish_reason"] == "length" for choice in choices), done) == (8, "[DONE]")
        lazy.close()
        check_idle(server)


def test_a_slow_reader_of_several_prompts_gets_all_of_them() -> None:
    async def read_late() -> list[int]:
        outputs = [RequestOutput(str(i), None, [1], [CompletionOutput(0)]) for i in range(2)]
        streams = tuple(RequestStream(output, [output.request_id], lambda _: None) for output in outputs)
        updates = Generation(streams).updates()
        seen: list[int] = []

        async def advance(number: int, finished: bool) -> None:
            outputs[number].outputs[0].token_ids.append(7)
            outputs[number].finished = finished
            streams[number].wake()
            for _ in range(5):
                await asyncio.sleep(0)

        reading = asyncio.ensure_future(anext(updates))
        await advance(0, False)
        seen.append(await reading)
        # No client reads now: the first prompt continues and ends.
        await advance(0, False)
        await advance(0, True)
        seen.append(await anext(updates))
        finishing = asyncio.ensure_future(_rest(updates))
        await advance(1, True)
        return seen + await finishing

    async def _rest(updates: Any) -> list[int]:
        return [number async for number in updates]

    assert 1 in asyncio.run(read_late()), "the end of one prompt was counted twice"


# ---- Overload ----


def test_overload_is_refused_and_the_server_recovers() -> None:
    with serve("--max-num-queued-requests", "4") as server, ThreadPoolExecutor(16) as pool:
        streams = [open_stream(server)[0] for _ in range(4)]
        refused: list[Future[Any]] = [pool.submit(call, server.url, "POST", COMPLETIONS, endless()) for _ in range(12)]
        for answer in [future.result() for future in refused]:
            assert answer.status == 503
            assert int(answer.headers["retry-after"]) > 0
            assert "max_num_queued_requests=4" in answer.error["message"]
        # Two prompts of which only one would fit leave nothing behind.
        streams[0].close()
        wait_for(server, 3)
        several = call(server.url, "POST", COMPLETIONS, endless(prompt=["a", "b"]))
        assert several.status == 503
        for stream in streams[1:]:
            stream.close()
        check_idle(server)
        # More than the queue can ever hold, so that waiting would not help.
        for body in (endless(prompt=["a"] * 5), endless(n=5)):
            never = call(server.url, "POST", COMPLETIONS, body)
            assert never.status == 400
            assert "5 inputs exceed max_num_queued_requests=4: send fewer" in never.error["message"]
        assert call(server.url, "POST", COMPLETIONS, {"prompt": "a", "max_tokens": 1}).status == 200


def test_many_connections_do_not_delay_others(small: ServerProcess) -> None:
    body = {"prompt": "The old mill", "max_tokens": 20, "temperature": 0}
    expected = call(small.url, "POST", COMPLETIONS, body).json()["choices"]
    memory = resident_bytes(small.pid)
    for _ in range(2000):
        connect(small.url).close()
    held = [connect(small.url) for _ in range(300)]
    for number, connection in enumerate(held):
        # Nothing at all, half a head, half a body: none of them may delay other clients.
        data = (b"", b"GET /health HTTP/1.1\r\nHo", post_bytes(COMPLETIONS, body)[:-4])[number % 3]
        connection.sendall(data)
    try:
        began = time.monotonic()
        assert call(small.url, "GET", "/health").status == 200
        assert time.monotonic() - began < 2
        assert call(small.url, "POST", COMPLETIONS, body).json()["choices"] == expected
    finally:
        for connection in held:
            connection.close()
    check_idle(small)
    assert resident_bytes(small.pid) < memory + (32 << 20)


def test_request_heads_are_limited(small: ServerProcess) -> None:
    """A client without a key must not fill the memory, so a head without an end is cut off."""
    endless_head = b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + (b"X: " + b"a" * (1 << 20) + b"\r\n") * 64
    with connect(small.url) as connection, pytest.raises((ConnectionResetError, BrokenPipeError)):
        connection.sendall(endless_head)
    assert call(small.url, "GET", "/health").status == 200


def test_a_huge_prompt_does_not_delay_others(small: ServerProcess) -> None:
    """Refusing oversized requests must not delay other clients."""
    longest = 0.0
    is_over = threading.Event()

    def watch() -> None:
        nonlocal longest
        while not is_over.is_set():
            began = time.monotonic()
            assert call(small.url, "GET", "/health").status == 200
            longest = max(longest, time.monotonic() - began)

    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watch)
        try:
            for path in (COMPLETIONS, "/tokenize"):
                call(small.url, "POST", path, {"prompt": "word " * (1 << 20)})
        finally:
            is_over.set()
        watching.result()
    assert longest < 2


def test_many_errors_in_one_body_need_little_memory(small: ServerProcess) -> None:
    """Only the first error is reported, so only that may be stored."""
    memory = resident_bytes(small.pid)
    answer = call(small.url, "POST", COMPLETIONS, {"prompt": [[]] * 500_000})
    assert answer.status == 400
    assert answer.error["param"] == "prompt"
    assert resident_bytes(small.pid) < memory + (128 << 20)


def test_invalid_http_is_answered(small: ServerProcess) -> None:
    for data in (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", b"GET\r\n\r\n", b"\r\n\r\n\x00\x00 / HTTP/1.1\r\n\r\n"):
        assert send_raw(small.url, data).status == 400
    assert call(small.url, "GET", "/health").status == 200


def test_a_request_that_offers_http_2_is_answered_over_http_1(small: ServerProcess) -> None:
    """Java's client and `curl --http2` offer it; the body comes with the head, or later and in parts."""
    offer = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAMAAABkAAQAoAAAAAIAAAAA"}
    body = {"prompt": "Once", "max_tokens": 2, "temperature": 0}
    expected = call(small.url, "POST", COMPLETIONS, body).json()["choices"]
    assert call(small.url, "POST", COMPLETIONS, body, offer).json()["choices"] == expected
    data = post_bytes(COMPLETIONS, body, offer)
    with connect(small.url) as connection:
        # Twice on one connection.
        for _ in range(2):
            head = data.index(b"\r\n\r\n") + 4
            for part in (data[: head - 3], data[head - 3 : head + 5], data[head + 5 :]):
                connection.sendall(part)
                time.sleep(0.05)
            response = http.client.HTTPResponse(connection)
            response.begin()
            assert json.loads(response.read())["choices"] == expected
    assert send_raw(small.url, b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n").status == 400

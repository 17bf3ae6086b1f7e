"""A server that only has a dashboard: the real page, a fake engine, and a chat that repeats its input.

`python -m tests.integration.dashboard_fake [--idle] [--transfers] [--experts] [--api-key KEY] [--port 8009]` serves it
for development of the page.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import threading
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

import penstock
from penstock.kv_transfer.p2p.consumer import ConsumerCounts
from penstock.kv_transfer.p2p.producer import ProducerCounts

PAGE = Path(penstock.__file__).parent / "server" / "static" / "dashboard.html"
MODEL = "demo"
TICK_S = 0.05
EVENT_S = 0.25


@dataclass
class FakeRequest:
    """A request's life so far; `blocks` are the indices it owns."""

    id: str
    num_prompt_tokens: int
    target: int
    finish_reason: str
    events: list[tuple[str, float]]
    num_cached_tokens: int
    num_computed: int = 0
    num_output_tokens: int = 0
    blocks: list[int] = field(default_factory=list)

    @property
    def state(self) -> str:
        return self.events[-1][0]


class FakeTransfers:
    """The counters of a connector that reads KV from other engines and pins it for others.

    `step` simulates `TICK_S` of an engine for which two others prefill, and which prefills for another one.
    """

    def __init__(self, seed: int = 7) -> None:
        self.peers: dict[str, float] = {}
        self.producer = ProducerCounts()
        self.consumer = ConsumerCounts()
        self.num_held = 0
        self._random = random.Random(seed)

    def counters(self) -> dict[str, float]:
        """Returns the counters with their names in `penstock.kv_transfer.p2p`."""
        return {
            "p2p_held": self.num_held,
            **{f"p2p_producer_{name[4:]}": value for name, value in asdict(self.producer).items()},
            **{f"p2p_consumer_{name[4:]}": value for name, value in asdict(self.consumer).items()},
            **self.peers,
        }

    def on_moved(self, direction: str, engine_id: str, num_tokens: int, num_bytes: int, seconds: float) -> None:
        self._add(direction, engine_id, transfers=1, tokens=num_tokens, bytes=num_bytes, seconds=seconds)

    def on_failed(self, engine_id: str) -> None:
        self._add("from", engine_id, failed=1)

    def step(self) -> None:
        if self._random.random() < TICK_S:
            self.consumer.num_loads += 1
            source = self._random.choice(["prefill-0", "a3f4c9d2e8b14c7f90d65b1e2c3a4f58"])
            if self._random.random() < 0.05:
                self.consumer.num_refused += 1
                self.on_failed(source)
            else:
                self._move("from", source)
        if self._random.random() < TICK_S / 2:
            self.producer.num_granted += 1
            self._move("to", "decode-0")
        self.num_held = max(0, self.num_held + self._random.choice([-1, 0, 0, 0, 1]))

    def _move(self, direction: str, engine_id: str) -> None:
        num_tokens = self._random.randrange(40, 900)
        self.on_moved(direction, engine_id, num_tokens, num_tokens << 17, num_tokens * 9e-5)

    def _add(self, direction: str, engine_id: str, **amounts: float) -> None:
        for counter, amount in amounts.items():
            name = f"p2p_{direction}/{engine_id}/{counter}"
            self.peers[name] = self.peers.get(name, 0) + amount


class FakeEngine:
    """Simulates a small engine at `TICK_S` a step: admission, chunked prefill, decode, preemption, prefix caching.

    With `idle` set no request arrives; with `paused` set its server makes no steps.
    """

    def __init__(self, *, idle: bool = False, num_blocks: int = 960, seed: int = 7) -> None:
        self.idle = idle
        self.paused = False
        self.speculation = {"num_drafts": 0, "num_draft_tokens": 0, "num_accepted_per_position": []}
        self.connector: dict[str, float] = {}
        self.experts: dict[str, Any] = {}
        # The states of recurrent layers: how many of 100 are held, and how many are checkpoints.
        self.states: dict[str, int] = {}
        self.transfers: FakeTransfers | None = None
        self.health: dict[str, str | None] = {"status": "ok", "reason": None}
        self.requests: list[FakeRequest] = []
        self.stats = dict.fromkeys(
            ("prefix_cache_queries", "prefix_cache_hits", "num_preemptions", "prompt_tokens", "generation_tokens"), 0
        )
        self._random = random.Random(seed)
        self._now = 100.0
        self._cells = ["p"] * 6 + ["f"] * (num_blocks - 6)
        self._free = deque(range(6, num_blocks))
        self._tokens: deque[tuple[float, int]] = deque()
        self._first: deque[tuple[float, float]] = deque()

    def step(self) -> None:
        """Simulates one tick."""
        self._now += TICK_S
        self._cells = ["o" if cell == "l" and self._random.random() < 0.15 else cell for cell in self._cells]
        self.requests = [r for r in self.requests if r.state != "finished" or r.events[-1][1] > self._now - 30]
        if not self.idle and self._random.random() < TICK_S * 0.75:
            self._arrive()
        running = [r for r in self.requests if r.state in ("prefill", "decode")]
        for request in [r for r in self.requests if r.state in ("preempted", "queued")][: max(0, 9 - len(running))]:
            if self._now - request.events[-1][1] > 0.4 and self._random.random() < 0.3:
                request.events.append(("prefill", self._now))
        for request in running:
            self._compute(request)
        if self.transfers is not None:
            self.transfers.step()
            self.connector = self.transfers.counters()
        for window in (self._tokens, self._first):
            while window and window[0][0] < self._now - 10:
                window.popleft()

    def event(self) -> dict[str, Any]:
        """Returns the engine's state as the page receives it."""
        states = [request.state for request in self.requests]
        used = sum(cell in "olp" for cell in self._cells) / len(self._cells)
        waits = sorted(wait for _, wait in self._first)
        busy = bool(self._tokens)
        return {
            "time": self._now,
            "model": MODEL,
            "version": "0.1.0",
            "engine": {
                "dtype": "bfloat16",
                "device": "cpu",
                "device_name": "",
                "kernels": "avx512",
                "num_threads": 8,
                "max_model_len": 4096,
                "num_blocks": len(self._cells),
                "block_size": 16,
                "kv_cache_bytes": len(self._cells) << 21,
                "num_states": 100 if self.states else 0,
                "state_cache_bytes": 3 << 30 if self.states else 0,
                "load_seconds": 2.0,
            },
            "uptime": self._now + 11_900,
            "health": self.health,
            "stats": {
                "num_running": states.count("prefill") + states.count("decode"),
                "num_waiting": states.count("queued") + states.count("preempted"),
                "kv_cache_usage": used,
                **self.stats,
                **self._ends(),
                "speculation": self.speculation,
                "connector": self.connector,
                "states": self.states,
            },
            "rates": {
                "window": 10.0,
                "requests_per_second": 0.7 if busy else 0.0,
                "e2e_p50": 3.21 if busy else None,
                "e2e_p90": 9.87 if busy else None,
                "queue_p50": 0.012 if busy else None,
                "queue_p90": 0.345 if busy else None,
                "tokens_per_second": sum(count for _, count in self._tokens) / 10 if busy else None,
                "ttft_p50": waits[len(waits) // 2] if waits else None,
                "ttft_p90": waits[len(waits) * 9 // 10] if waits else None,
                "itl_p50": 0.0213 if busy else None,
                "itl_p90": 0.0487 if busy else None,
            },
            "experts": self.experts,
            "requests": [self._describe(request) for request in self.requests],
            "num_requests_not_shown": 0,
            "blocks": {
                "num_blocks": len(self._cells),
                "block_size": 16,
                "blocks_per_cell": 1,
                "cells": "".join(self._cells),
                "counts": {letter: self._cells.count(letter) for letter in "fcpol"},
            },
        }

    def _ends(self) -> dict[str, int]:
        reasons = [request.finish_reason for request in self.requests if request.state == "finished"]
        return {
            "num_errors": reasons.count("error"),
            "num_aborts": reasons.count("abort"),
        }

    @staticmethod
    def _describe(request: FakeRequest) -> dict[str, Any]:
        return {
            "id": request.id,
            "state": request.state,
            "finish_reason": request.finish_reason if request.state == "finished" else None,
            "events": request.events,
            "num_prompt_tokens": request.num_prompt_tokens,
            "num_output_tokens": request.num_output_tokens,
            "num_cached_tokens": request.num_cached_tokens,
        }

    def _arrive(self) -> None:
        prompt = self._random.randrange(40, 900)
        cached = self._random.choice([0, 0, prompt // 32 * 16, prompt // 20 * 16])
        request = FakeRequest(
            id=f"cmpl-{self._random.getrandbits(96):024x}",
            num_prompt_tokens=prompt,
            target=self._random.randrange(30, 420),
            finish_reason=self._random.choice(["stop"] * 8 + ["length", "length", "abort", "error", "tool_calls"]),
            events=[("queued", self._now)],
            num_cached_tokens=cached,
        )
        self.requests.append(request)
        self.stats["prefix_cache_queries"] += prompt
        self.stats["prefix_cache_hits"] += cached

    def _compute(self, request: FakeRequest) -> None:
        length = request.num_prompt_tokens + request.num_output_tokens
        if request.state == "prefill":
            request.num_computed = min(length, max(request.num_computed, request.num_cached_tokens) + 32)
            if request.num_computed == length:
                request.events.append(("decode", self._now))
                if request.num_output_tokens == 0:
                    self.stats["prompt_tokens"] += request.num_prompt_tokens
                    self._first.append((self._now, self._now - request.events[0][1]))
        else:
            request.num_output_tokens += 2
            self.stats["generation_tokens"] += 2
            self._tokens.append((self._now, 2))
            if self._random.random() < 0.004:
                self.stats["num_preemptions"] += 1
                request.events.append(("preempted", self._now))
                request.num_computed = 0
                self._release(request)
                return
            if request.num_output_tokens >= request.target:
                request.events.append(("finished", self._now))
                self._release(request)
                return
        self._hold(request, (length + 15) // 16)

    def _hold(self, request: FakeRequest, count: int) -> None:
        while len(request.blocks) < count and self._free:
            block = self._free.popleft()
            self._cells[block] = "l" if request.state == "prefill" else "o"
            request.blocks.append(block)

    def _release(self, request: FakeRequest) -> None:
        for block in request.blocks:
            self._cells[block] = self._random.choice("ccf")
        self._free.extend(request.blocks)
        request.blocks = []


def fake_experts(num_layers: int = 24, num_ranks: int = 4, num_slots: int = 128) -> dict[str, Any]:
    """Returns the map of experts whose load was skewed and is balanced."""
    rng = random.Random(1)

    def loads(spread: int) -> dict[str, Any]:
        rows = [[min(25, max(0, round(rng.gauss(8, spread)))) for _ in range(num_slots)] for _ in range(num_layers)]
        size = num_slots // num_ranks
        sums = [[sum(row[first : first + size]) for first in range(0, num_slots, size)] for row in rows]
        peaks = [max(of_ranks) * num_ranks / sum(of_ranks) for of_ranks in sums]
        return {"cells": ["".join(chr(ord("a") + level) for level in row) for row in rows], "peaks": peaks}

    names = [f"model.layers.{layer}.mlp" for layer in range(num_layers)]
    return {"layers": names, "num_ranks": num_ranks, "before": loads(7), "now": loads(1)}


class FakeServer:
    """Serves the fake engine over HTTP in a thread of its own; `url` is its address within the `with` block.

    `api_key` (None: not required) is checked on every route; with `cut` set, event streams break.
    `chats` collects the bodies of chat requests, `num_chats_left` counts the chats whose client disconnected.
    """

    def __init__(self, engine: FakeEngine, *, api_key: str | None = None, port: int = 0) -> None:
        self.engine = engine
        self.api_key = api_key
        self.cut = False
        self.num_streams = 0
        self.chats: list[dict[str, Any]] = []
        self.num_chats_left = 0
        self.url = ""
        self._port = port
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))

    def __enter__(self) -> FakeServer:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        self._loop.close()

    async def _serve(self) -> None:
        app = web.Application()
        app.router.add_get("/dashboard", self._page)
        app.router.add_get("/dashboard/events", self._events)
        app.router.add_post("/v1/chat/completions", self._chat)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", self._port)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ticking = asyncio.ensure_future(self._tick())
        self._ready.set()
        await self._stop.wait()
        ticking.cancel()
        await runner.cleanup()

    async def _tick(self) -> None:
        started = time.monotonic()
        for number in itertools.count(1):
            await asyncio.sleep(max(0.0, started + number * TICK_S - time.monotonic()))
            if not self.engine.paused:
                self.engine.step()

    def _refused(self, request: web.Request) -> bool:
        return self.api_key is not None and request.headers.get("Authorization") != f"Bearer {self.api_key}"

    async def _page(self, request: web.Request) -> web.Response:
        status = 401 if self._refused(request) else 200
        return web.Response(text=PAGE.read_text(encoding="utf-8"), status=status, content_type="text/html")

    async def _events(self, request: web.Request) -> web.StreamResponse:
        if self._refused(request):
            return _error(401, "Incorrect API key provided.")
        response = await _open_stream(request)
        self.num_streams += 1
        try:
            while not self.cut:
                await _send(response, self.engine.event())
                await asyncio.sleep(EVENT_S)
        finally:
            self.num_streams -= 1
        assert request.transport is not None
        request.transport.abort()
        return response

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        if self._refused(request):
            return _error(401, "Incorrect API key provided.")
        body = await request.json()
        self.chats.append(body)
        said = body["messages"][-1]["content"]
        if said.startswith("fail"):
            return _error(400, "This model's maximum context length is 512 tokens.")
        response = await _open_stream(request)
        words = said.split(" ") if not said.startswith("endless") else itertools.repeat("on and on")
        count = 0
        try:
            for word in words:
                await _send(response, _chunk({"content": f"{word} "}, None))
                count += 1
                await asyncio.sleep(0.02)
        except (ConnectionResetError, asyncio.CancelledError):
            self.num_chats_left += 1
            raise
        if said.startswith("break"):
            return response
        await _send(response, _chunk({}, "stop"))
        await _send(response, {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": count}})
        await response.write(b"data: [DONE]\n\n")
        return response


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "invalid_request_error"}}, status=status)


def _chunk(delta: dict[str, str], finish_reason: str | None) -> dict[str, Any]:
    return {"model": MODEL, "choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}


async def _open_stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
    await response.prepare(request)
    return response


async def _send(response: web.StreamResponse, data: dict[str, Any]) -> None:
    await response.write(f"data: {json.dumps(data)}\n\n".encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--idle", action="store_true", help="no requests arrive")
    parser.add_argument("--transfers", action="store_true", help="KV moves between the engine and others")
    parser.add_argument("--experts", action="store_true", help="the engine balances experts")
    parser.add_argument("--api-key", help="require this key")
    parser.add_argument("--port", type=int, default=8009)
    args = parser.parse_args()
    engine = FakeEngine(idle=args.idle)
    engine.transfers = FakeTransfers() if args.transfers else None
    engine.experts = fake_experts() if args.experts else {}
    with FakeServer(engine, api_key=args.api_key, port=args.port):
        threading.Event().wait()


if __name__ == "__main__":
    main()

"""A server with a made-up language model, for `penstock audit`: correct, imprecise, or with a planted fault.

The model's log probabilities are a function of the text before a token, so a fault is a wrong text before it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

_WORDS = [f" {a}{b}" for a in "bcdfghjk" for b in ("am", "en", "ir", "ot", "us", "ax", "ey", "ov")]
_MADE_UP = re.compile(r"\b[A-Z][a-z]{7}\b")
_NUM_TOP = 20
FAULTS = ("foreign", "foreign words", "stale", "lost rewind", "always", "moved")


def log_probabilities(context: str, copies: bool) -> dict[str, float]:
    """The model: one token is nearly certain, but at every fifth position two are nearly equal."""
    seed = hashlib.sha256(context.encode()).digest()
    rng = random.Random(seed)
    names = rng.sample(_WORDS, _NUM_TOP)
    if copies and seed[0] % 3 == 0 and (found := _MADE_UP.findall(context)):
        names[0] = f" {rng.choice(found)}"
    values = [-0.02, *(-5.0 - 0.2 * rank for rank in range(_NUM_TOP - 1))]
    if seed[1] % 5 == 0:
        values[:2] = [-0.70, -0.705]
    return dict(zip(names, values, strict=True))


@dataclass
class Stub:
    """`fault` is one of FAULTS, or empty; `noise` changes each log probability at random by up to so much; with
    `draws_ties` tokens within 0.01 of the best are drawn, with `samples` now and then any token. `form` is that of the
    log probabilities: lists, llama (which needs n_probs), chat (no completions) or none. `dies_after` is a number of
    requests.
    """

    fault: str = ""
    noise: float = 0.0
    draws_ties: bool = False
    samples: bool = False
    form: str = "lists"
    has_echo: bool = False
    dies_after: int = 1 << 60
    num_top: int = 20
    bodies: list[dict[str, Any]] = field(default_factory=list)
    most_in_flight: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random()
        self.seen: dict[str, int] = {}
        self.in_flight: list[str] = []

    # ---- The engine ----

    def context(self, prompt: str, output: list[str], beside: str | None) -> str:
        """What the model reads at a position: with a fault, not always the prompt and the output."""
        if self.fault.startswith("foreign") and beside is not None and len(output) >= 5:
            return beside + "".join(output)
        if self.fault == "stale" and self.seen.get(prompt, 0) > 1 and len(output) >= 2:
            return prompt[:40] + "an older block" + prompt[80:] + "".join(output)
        if (self.fault == "always" or (self.fault == "lost rewind" and beside is not None)) and len(output) >= 6:
            return prompt + "".join(output[:6]) + " zz" + "".join(output[6:])
        return prompt + "".join(output)

    def generate(self, prompt: str, count: int, beside: str | None) -> list[tuple[str, dict[str, float]]]:
        found: list[tuple[str, dict[str, float]]] = []
        for _ in range(count):
            context = self.context(prompt, [text for text, _ in found], beside)
            top = log_probabilities(context, self.fault == "foreign words")
            top = {text: value + self.rng.uniform(-self.noise, self.noise) for text, value in top.items()}
            best = max(top.values())
            close = [text for text, value in top.items() if value == best or (self.draws_ties and best - value < 0.01)]
            token = self.rng.choice(list(top) if self.samples and self.rng.random() < 0.1 else close)
            if self.fault == "moved" and beside is not None and len(found) == 5:
                top[token] -= 2
            found.append((token, dict(list(top.items())[: self.num_top]) | {token: top[token]}))
        return found

    # ---- The API ----

    async def models(self, _: web.Request) -> web.Response:
        if len(self.bodies) > self.dies_after:
            return web.json_response({"error": {"message": "the engine is dead"}}, status=503)
        return web.json_response({"object": "list", "data": [{"id": "stub", "max_model_len": 4096}]})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        is_chat = request.path.endswith("chat/completions")
        if len(self.bodies) > self.dies_after:
            return web.json_response({"error": {"message": "the engine is dead"}}, status=503)
        if self.form == "chat" and not is_chat:
            raise web.HTTPNotFound
        if "return_token_ids" in body or (body.get("echo") and not self.has_echo):
            return web.json_response({"error": {"message": "unsupported field"}}, status=400)
        prompt = body["prompt"] if "prompt" in body else "|".join(each["content"] for each in body["messages"])
        self.seen[prompt] = self.seen.get(prompt, 0) + 1
        self.in_flight.append(prompt)
        self.most_in_flight = max(self.most_in_flight, len(self.in_flight))
        try:
            await asyncio.sleep(0.002)
            beside = next((each for each in self.in_flight if each != prompt), None)
            tokens = self.generate(prompt, body["max_tokens"], beside)
        finally:
            self.in_flight.remove(prompt)
        if body.get("echo"):
            tokens = [*self.scored(prompt), *tokens]
        usage = {"prompt_tokens": prompt.count(" ") + 1, "completion_tokens": len(tokens)}
        if not body.get("stream"):
            return web.json_response({"choices": [self.choice(tokens, body, is_chat)], "usage": usage})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        events = [{"choices": [self.choice([token], body, is_chat)]} for token in tokens]
        for event in (*events, {"choices": [], "usage": usage}):
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    def scored(self, prompt: str) -> list[tuple[str, dict[str, float]]]:
        texts = re.findall(r" ?[^ ]+", prompt)
        offsets = [sum(map(len, texts[:number])) for number in range(len(texts))]
        tops = [log_probabilities(prompt[:offset], False) for offset in offsets]
        return [(text, {text: top.get(text, -20.0)}) for text, top in zip(texts, tops, strict=True)]

    def choice(
        self, tokens: list[tuple[str, dict[str, float]]], body: Mapping[str, Any], is_chat: bool
    ) -> dict[str, Any]:
        text = "".join(each for each, _ in tokens)
        has_content = self.form in ("llama", "chat")
        entries = [
            {
                "token": token,
                "logprob": top[token],
                "top_logprobs": [{"token": each, "logprob": value} for each, value in top.items()],
            }
            for token, top in tokens
        ]
        lists = {
            "tokens": [token for token, _ in tokens],
            "token_logprobs": [top[token] for token, top in tokens],
            "top_logprobs": [top for _, top in tokens],
        }
        wanted = "n_probs" if self.form == "llama" else "logprobs"
        logprobs = None if wanted not in body or self.form == "none" else {"content": entries} if has_content else lists
        said = {"delta" if body.get("stream") else "message": {"content": text}} if is_chat else {"text": text}
        return {"index": 0, **said, "logprobs": logprobs, "finish_reason": "length"}


class StubServer:
    """Serves a stub from a thread; a context manager. `routes` replaces the handlers of POST requests."""

    def __init__(self, stub: Stub, handler: Any = None) -> None:
        self._stub = stub
        self._handler = handler or stub.answer
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def __enter__(self) -> str:
        self._thread.start()
        assert self._is_ready.wait(10)
        return self._url

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application()
        app.router.add_get("/v1/models", self._stub.models)
        app.router.add_post("/v1/completions", self._handler)
        app.router.add_post("/v1/chat/completions", self._handler)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self._url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._is_ready.set()
        await self._stop.wait()
        await runner.cleanup()

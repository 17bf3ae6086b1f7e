"""The real server with a scripted engine, for answers that the built-in model cannot give."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import uvicorn

import penstock
from penstock.config.server import ServerArgs
from penstock.frontend.text_work import TextWork
from penstock.messages.outputs import CompletionOutput, RequestOutput
from penstock.messages.sampling_params import SamplingParams
from penstock.metrics.prometheus import PrometheusMetrics
from penstock.metrics.rates import RecentRates
from penstock.server.app import create_app
from penstock.server.openai.reasoning_formats import make_reasoning_format
from penstock.server.openai.tool_calls.registry import make_format
from penstock.server.service import Service
from penstock.tokenizer.tokenizer import Tokenizer
from penstock.utils.clock import SystemClock

VOCAB_SIZE = 4096


@dataclass
class Script:
    """The answer to every request from now on: `text` is streamed in pieces of `step` characters."""

    text: str = ""
    step: int = 3
    finish_reason: str = "stop"
    stop_reason: str | None = None
    error: str | None = None


class ScriptedStream:
    """A request's stream, as `AsyncLLM.submit` returns it."""

    def __init__(self, script: Script, output: RequestOutput, tokenizer: Tokenizer) -> None:
        self.output = output
        self._pieces = [script.text[start : start + script.step] for start in range(0, len(script.text), script.step)]
        self._script = script
        self._tokenizer = tokenizer
        self._is_over = False

    def __aiter__(self) -> ScriptedStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._is_over:
            raise StopAsyncIteration
        (completion,) = self.output.outputs
        if self._pieces:
            piece = self._pieces.pop(0)
            completion.text += piece
            completion.token_ids += self._tokenizer.encode(piece, add_special_tokens=False)
        if not self._pieces:
            self._is_over = self.output.finished = True
            completion.finish_reason = "error" if self._script.error else self._script.finish_reason
            completion.stop_reason = self._script.stop_reason
            self.output.error = self._script.error
        return self.output

    def close(self) -> None:
        self._is_over = True


class ScriptedLLM:
    """The part of `AsyncLLM` that answers need. `prompts` and `params` are those of the requests so far."""

    max_model_len = 2048
    has_tokenizer = True
    loras = {}  # noqa: RUF012
    death = None
    num_unfinished = 0
    eos_token_ids = frozenset({2})
    config = SimpleNamespace(pooling=None, kv_transfer=None)

    def __init__(self, folder: Path) -> None:
        self.script = Script()
        self.prompts: list[str] = []
        self.params: list[SamplingParams] = []
        self._tokenizer = Tokenizer(folder, VOCAB_SIZE)
        self.text_work = TextWork()

    def get_tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=None)

    def check_count(self, count: int, data_parallel_rank: int | None = None) -> None: ...

    async def submit(self, prompt: Any, params: SamplingParams, request_id: str, **_: Any) -> ScriptedStream:
        token_ids = prompt["prompt_token_ids"]
        self.prompts.append(self._tokenizer.decode(token_ids, skip_special_tokens=False))
        self.params.append(params)
        output = RequestOutput(request_id, None, token_ids, [CompletionOutput(0)], num_cached_tokens=3)
        return ScriptedStream(self.script, output, self._tokenizer)


@dataclass
class ScriptedServer:
    url: str
    llm: ScriptedLLM
    service: Service

    def answers(self, text: str, **fields: Any) -> None:
        """Sets the answers to requests from now on."""
        self.llm.script = Script(text, **fields)


class _Uvicorn(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_up = threading.Event()

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        self.is_up.set()


@dataclass(frozen=True)
class Setup:
    """The configuration of the server."""

    tool_call_parser: str = "auto"
    reasoning_parser: str = "none"
    api_key: tuple[str, ...] = ()
    folder: Path = field(default_factory=lambda: Path(penstock.__file__).parent / "demo")


@contextlib.contextmanager
def scripted_server(setup: Setup) -> Iterator[ScriptedServer]:
    llm = ScriptedLLM(setup.folder)
    tokenizer = llm.get_tokenizer()
    service = Service(
        llm=llm,  # pyright: ignore[reportArgumentType]
        args=ServerArgs(api_key=setup.api_key),
        model_names=("demo",),
        tool_format=make_format(setup.tool_call_parser, tokenizer),
        reasoning=make_reasoning_format(setup.reasoning_parser, tokenizer),
        metrics=PrometheusMetrics("demo"),
        rates=RecentRates(),
        clock=SystemClock(),
        started=0,
        closing=asyncio.Event(),
    )
    config = uvicorn.Config(create_app(service), port=0, lifespan="off", ws="none", log_config=None)
    server = _Uvicorn(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        assert server.is_up.wait(30), "the server did not start"
        port = server.servers[0].sockets[0].getsockname()[1]
        yield ScriptedServer(f"http://127.0.0.1:{port}", llm, service)
    finally:
        server.should_exit = True
        thread.join(30)

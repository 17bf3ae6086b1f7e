"""Prompts that are far too long are refused at once, with little memory, all of which is freed."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, OverloadedError, RequestError
from penstock.frontend import text_work
from penstock.frontend.text_work import TextWork
from penstock.tokenizer.tokenizer import LARGE_CHARACTERS
from tests.integration.raw_http import Answer, call, eventually
from tests.integration.server_probes import resident_bytes
from tests.integration.server_process import ServerProcess, serve

pytestmark = pytest.mark.alone

TEXT = "once upon a time there was a fox and " * (14_000_000 // 37)
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}]}),
    "completion": ("/v1/completions", {"prompt": TEXT}),
    "batch": ("/v1/completions", {"prompt": [TEXT[: len(TEXT) // 16]] * 16}),
    "many": ("/v1/completions", {"prompt": [TEXT[: len(TEXT) // 256]] * 256}),
    "tokenize": ("/tokenize", {"prompt": TEXT}),
    "tokenize messages": ("/tokenize", {"messages": [{"role": "user", "content": TEXT}]}),
}
PEAK = 600 << 20
# The allocator returns only free memory at the end of its arenas, and some of it late.
KEPT = 128 << 20


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serve() as process:
        yield process


def _peak_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return int(status.split("VmHWM:")[1].split()[0]) << 10


@pytest.mark.parametrize("kind", BODIES)
def test_four_at_once_need_little_memory_and_free_it(server: ServerProcess, kind: str) -> None:
    before = resident_bytes(server.pid)
    began = time.monotonic()

    def send(_: int) -> Answer:
        return call(server.url, "POST", *BODIES[kind])

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(send, range(4)))
    assert time.monotonic() - began < 10
    for answer in answers:
        assert answer.status == 400
        assert answer.error["code"] == "context_length_exceeded"
        assert "max_model_len=2048" in answer.error["message"]
    assert _peak_bytes(server.pid) < PEAK
    eventually(lambda: resident_bytes(server.pid) < before + KEPT, 20)


def test_large_texts_of_programs_are_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM()
    try:
        tokenizer = llm.get_tokenizer()
        with monkeypatch.context() as patch:
            patch.setattr(tokenizer, "backend", None)
            for ask in (lambda: llm.generate(TEXT), lambda: llm.chat([{"role": "user", "content": TEXT}])):
                with pytest.raises(RequestError, match="characters, which are at least"):
                    ask()
    finally:
        llm.shutdown()


def test_large_texts_are_tokenized_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_work, "_MAX_WAITING", 3)
    asyncio.run(_check_turns())


async def _check_turns() -> None:
    work, running, peak = TextWork(), 0, 0
    lock, go_on = threading.Lock(), threading.Event()

    def tokenize() -> str:
        nonlocal running, peak
        with lock:
            running += 1
            peak = max(peak, running)
        go_on.wait(10)
        with lock:
            running -= 1
        return "done"

    large = [asyncio.ensure_future(work.run(LARGE_CHARACTERS, tokenize)) for _ in range(3)]
    await asyncio.sleep(0.05)
    with pytest.raises(OverloadedError, match="3 large prompts"):
        await work.run(LARGE_CHARACTERS, tokenize)
    assert await work.run(10_000, str, "smaller ones pass") == "smaller ones pass"
    # After a client has disconnected, the next one must wait until its thread has ended.
    large[0].cancel()
    await asyncio.sleep(0.05)
    assert running == 1
    go_on.set()
    assert await asyncio.gather(*large[1:]) == ["done", "done"]
    assert peak == 1
    assert await work.run(LARGE_CHARACTERS, tokenize) == "done", "the queue has room again"

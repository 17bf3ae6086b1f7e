"""Large requests and answers of one client, beside which other tasks of the event loop have their turn."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.frontend.async_llm import AsyncLLM
from penstock.frontend.text_work import TextWork
from penstock.messages.outputs import CompletionOutput, Logprob, Logprobs, RequestOutput
from penstock.messages.pooling_params import PoolingParams
from penstock.server.openai.generation import respond
from penstock.server.openai.prompts import Tokenizing, encode_prompts
from penstock.tokenizer.tokenizer import LARGE_CHARACTERS

COUNT = 20


class Turns:
    """Counts those of another task, and notes the count for each prompt."""

    def __init__(self) -> None:
        self.count = 0
        self.noted: list[int] = []

    def encode(self, *_: object) -> list[int]:
        self.noted.append(self.count)
        return [1]

    async def go_on(self) -> None:
        while True:
            self.count += 1
            await asyncio.sleep(0)


async def encode_all(turns: Turns) -> None:
    async def encode(*args: object, **_: object) -> object:
        return turns.encode(*args)

    llm = cast(AsyncLLM, SimpleNamespace(check_count=lambda *_: None, encode=encode))
    await AsyncLLM.encode_all(llm, [([1], PoolingParams())] * COUNT)


async def encode_large(turns: Turns) -> None:
    """More than may wait at a time."""
    work = TextWork()

    async def encode(prompt: str, *_: object, **__: object) -> object:
        return await work.run(len(prompt), turns.encode)

    llm = cast(AsyncLLM, SimpleNamespace(check_count=lambda *_: None, encode=encode))
    await AsyncLLM.encode_all(llm, [(LARGE_CHARACTERS * "a", PoolingParams())] * COUNT)


async def encode_completions(turns: Turns) -> None:
    llm = SimpleNamespace(text_work=TextWork(), get_tokenizer=lambda: turns, check_prompt=lambda _: None)
    await encode_prompts(cast(Any, SimpleNamespace(llm=llm)), ["text"] * COUNT, Tokenizing())


@pytest.mark.parametrize("encode", [encode_all, encode_large, encode_completions])
def test_other_tasks_have_their_turn_between_prompts(encode: Any) -> None:
    async def main() -> None:
        turns = Turns()
        other = asyncio.create_task(turns.go_on())
        await encode(turns)
        other.cancel()
        assert len(set(turns.noted)) == COUNT

    asyncio.run(main())


@pytest.mark.parametrize("logprobs", [None, [{1: Logprob(0.0)}]])
def test_an_answer_with_log_probabilities_is_written_on_a_thread(logprobs: Logprobs | None) -> None:
    """It may be a hundred megabytes; all others are short, and some change what belongs to the event loop."""
    threads: list[threading.Thread] = []

    def whole() -> dict[str, Any]:
        threads.append(threading.current_thread())
        return {}

    async def main() -> None:
        output = RequestOutput("r", None, [1], [CompletionOutput(0, logprobs=logprobs)])

        async def finish() -> None:
            pass

        started = SimpleNamespace(outputs=[output], finish=finish, close=lambda: None)
        request = SimpleNamespace(receive=asyncio.Event().wait)
        answer = SimpleNamespace(whole=whole)
        response = await respond(cast(Any, request), cast(Any, started), cast(Any, answer), "r", is_stream=False)
        assert response.body == b"{}"

    asyncio.run(main())
    assert [thread is threading.main_thread() for thread in threads] == [logprobs is None]

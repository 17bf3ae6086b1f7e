"""Large requests and answers of one client, beside which other tasks of the event loop have their turn."""

from __future__ import annotations

import asyncio
import json
import threading
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from penstock.frontend.async_llm import AsyncLLM
from penstock.frontend.text_work import TextWork
from penstock.messages.outputs import CompletionOutput, Logprob, Logprobs, RequestOutput
from penstock.messages.pooling_params import PoolingParams
from penstock.server.errors import JSONResponse
from penstock.server.openai.generation import respond
from penstock.server.openai.prompts import Tokenizing, encode_prompts
from penstock.server.pooling import vectors
from penstock.tokenizer.tokenizer import LARGE_CHARACTERS
from penstock.utils.clock import SystemClock
from penstock.utils.errors import OverloadedError, RequestError

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


class Stream:
    """A request that has ended when it is waited for, and takes room until then."""

    def __init__(self, running: list[Stream]) -> None:
        self.output = SimpleNamespace(number=len(running))
        self.running = running
        running.append(self)

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> None:
        self.close()
        raise StopAsyncIteration

    def close(self) -> None:
        if self in self.running:
            self.running.remove(self)


def pooling_engine(encode: Any, room: int = COUNT) -> tuple[AsyncLLM, list[Stream]]:
    """Returns an engine that holds `room` requests, and those that it holds."""
    running: list[Stream] = []

    async def take(*_: object) -> Stream:
        if len(running) >= room:
            raise OverloadedError("the engine is full")
        return Stream(running)

    engine = SimpleNamespace(
        check_count=lambda *_: None,
        pooling=SimpleNamespace(check=lambda *_: None, make=lambda output, _: output),
        text_work=TextWork(),
        _clock=SystemClock(),
        _front_end=SimpleNamespace(input_processor=SimpleNamespace(process_pooling=encode)),
        _take=take,
    )
    return cast(AsyncLLM, engine), running


async def encode_all(turns: Turns) -> None:
    await AsyncLLM.encode_all(pooling_engine(turns.encode)[0], [([1], PoolingParams())] * COUNT)


async def encode_large(turns: Turns) -> None:
    """More than may wait at a time."""
    prompts = [(LARGE_CHARACTERS * "a", PoolingParams())] * COUNT
    await AsyncLLM.encode_all(pooling_engine(turns.encode)[0], prompts)


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


def test_two_long_texts_are_tokenized_on_a_thread() -> None:
    threads: list[threading.Thread] = []
    engine, _ = pooling_engine(lambda *_: threads.append(threading.current_thread()))
    pairs = [
        ({"prompt": "a" * first, "second_text": "b" * second}, PoolingParams()) for first, second in ((9, 9), (9, 5000))
    ]
    asyncio.run(AsyncLLM.encode_all(engine, pairs))
    assert [thread is threading.main_thread() for thread in threads] == [True, False]


@pytest.mark.parametrize("room", [1, 3, COUNT])
def test_prompts_for_which_there_is_no_room_wait_for_those_before_them(room: int) -> None:
    engine, running = pooling_engine(lambda *_: [1], room)
    outputs = asyncio.run(AsyncLLM.encode_all(engine, [([1], PoolingParams())] * COUNT))
    assert (len(outputs), running) == (COUNT, [])


def test_without_room_for_the_first_prompt_none_waits() -> None:
    engine, _ = pooling_engine(lambda *_: [1], room=0)
    with pytest.raises(OverloadedError):
        asyncio.run(AsyncLLM.encode_all(engine, [([1], PoolingParams())] * COUNT))


def test_one_prompt_that_is_refused_ends_those_before_it() -> None:
    def encode(name: str, *_: object) -> list[int]:
        if name.endswith("-7"):
            raise RequestError("no")
        return [1]

    engine, running = pooling_engine(encode)
    with pytest.raises(RequestError, match="no"):
        asyncio.run(AsyncLLM.encode_all(engine, [([1], PoolingParams())] * COUNT))
    assert running == []


def test_numbers_of_many_vectors_are_written_in_turns() -> None:
    turns, vector = Turns(), np.array([0.5, 2], np.float32)

    class Noting:
        @property
        def outputs(self) -> Any:
            turns.encode()
            return SimpleNamespace(data=vector)

    async def main() -> Any:
        other = asyncio.create_task(turns.go_on())
        rows = await vectors._rows(cast(Any, [Noting()] * COUNT), "embedding", "embedding", "float")
        other.cancel()
        return rows

    rows = asyncio.run(main())
    assert len(set(turns.noted)) == COUNT
    assert json.loads(JSONResponse(rows[-1]).body) == {"object": "embedding", "index": COUNT - 1, "embedding": [0.5, 2]}


@pytest.mark.parametrize(("logprobs", "num_tokens"), [(None, 1023), (None, 1024), ([{1: Logprob(0.0)}], 1)])
def test_a_large_answer_is_written_on_a_thread(logprobs: Logprobs | None, num_tokens: int) -> None:
    """With log probabilities it may be a hundred megabytes."""
    threads: list[threading.Thread] = []

    def whole() -> dict[str, Any]:
        threads.append(threading.current_thread())
        return {}

    async def main() -> None:
        output = RequestOutput("r", None, [1], [CompletionOutput(0, logprobs=logprobs)])

        async def finish() -> None:
            pass

        usage = {"completion_tokens": num_tokens}
        started = SimpleNamespace(outputs=[output], finish=finish, close=lambda: None, usage=lambda: usage)
        request = SimpleNamespace(receive=asyncio.Event().wait)
        answer = SimpleNamespace(whole=whole)
        response = await respond(cast(Any, request), cast(Any, started), cast(Any, answer), "r", is_stream=False)
        assert response.body == b"{}"

    asyncio.run(main())
    assert [thread is threading.main_thread() for thread in threads] == [num_tokens == 1023]

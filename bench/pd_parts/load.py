"""Requests with known answers, and the outcome of each."""

from __future__ import annotations

import asyncio
import enum
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from penstock import LLM, SamplingParams

VOCABULARY = 1000
BLOCK_SIZE = 16


class Outcome(enum.StrEnum):
    RIGHT = "right"
    WRONG = "wrong"
    ERROR = "error"
    CUT = "cut"
    LATE = "late"


@dataclass(frozen=True, slots=True)
class Case:
    """`expected`: the tokens of one engine that computes everything itself, or with a `question`, to the API at `path`,
    the characters. `n`: how many choices must be so.
    """

    prompt: tuple[int, ...]
    expected: tuple[int, ...]
    n: int = 1
    path: str = "/v1/completions"
    question: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """`is_recomputed`: the decode instance has computed blocks of the prompt that the other one has computed too."""

    outcome: Outcome
    seconds: float
    is_recomputed: bool = False
    detail: str = ""


def make_prompts(count: int, seed: int) -> list[list[int]]:
    """Makes prompts of many lengths; most of them share a prefix with others."""
    rng = random.Random(seed)
    prefixes = [[rng.randrange(VOCABULARY) for _ in range(length)] for length in (0, 40, 96, 200)]
    return [
        rng.choice(prefixes) + [rng.randrange(VOCABULARY) for _ in range(rng.choice((3, 16, 33, 70, 160)))]
        for _ in range(count)
    ]


def make_cases(count: int, seed: int, max_tokens: int = 12) -> list[Case]:
    """Adds the answers of one engine without a connector, in this process."""
    prompts = make_prompts(count, seed)
    llm = LLM(device="cpu", max_model_len=512, num_gpu_blocks_override=1500, num_threads=1)
    try:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        outputs = llm.generate(prompts, params, use_tqdm=False)
    finally:
        llm.shutdown()
    return [
        Case(tuple(prompt), tuple(output.outputs[0].token_ids)) for prompt, output in zip(prompts, outputs, strict=True)
    ]


def make_text_cases(max_tokens: int = 24) -> list[Case]:
    """Makes questions to the APIs whose answers have no token ids."""
    questions = [f"What is {word}?" for word in ("rain", "a river", "the sun", "snow")]
    llm = LLM(device="cpu", max_model_len=512, num_gpu_blocks_override=1500, num_threads=1)
    try:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        outputs = [llm.chat([{"role": "user", "content": each}], params, use_tqdm=False) for each in questions]
    finally:
        llm.shutdown()
    texts = [tuple(map(ord, output.outputs[0].text)) for (output,) in outputs]
    paths = ("/v1/responses", "/v1/messages")
    return [
        Case((), text, path=path, question=question)
        for path in paths
        for question, text in zip(questions, texts, strict=True)
    ]


@dataclass(slots=True)
class _Stream:
    """The received part of one answer: its tokens, or characters, by choice."""

    choices: dict[int, list[int]]
    num_cached: int = 0
    error: str = ""
    is_done: bool = False

    def take(self, line: bytes) -> None:
        if not line.startswith(b"data: "):
            return
        data = line[6:].strip()
        if data == b"[DONE]":
            self.is_done = True
            return
        event = json.loads(data)
        if "error" in event:
            self.error = event["error"]["message"]
        for choice in event.get("choices", ()):
            self.choices.setdefault(choice["index"], []).extend(choice.get("token_ids") or ())
        self._take_typed(event)
        if usage := event.get("usage"):
            self.num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0

    def _take_typed(self, event: dict[str, Any]) -> None:
        """Takes an event of the Responses or the Messages API."""
        delta = event.get("delta", "")
        text = delta.get("text", "") if isinstance(delta, dict) else delta
        if text and event["type"] in ("response.output_text.delta", "content_block_delta"):
            self.choices.setdefault(0, []).extend(map(ord, text))
        self.is_done |= event.get("type") in ("response.completed", "response.incomplete", "message_stop")


async def ask(session: aiohttp.ClientSession, url: str, case: Case, deadline: float) -> Answer:
    """Takes at most `deadline` seconds."""
    started = time.monotonic()
    stream = _Stream({})
    try:
        async with asyncio.timeout(deadline):
            await _read(session, url, case, stream)
        outcome, detail = judge_choices(case, stream, stream.is_done, stream.error)
    except TimeoutError:
        outcome, detail = Outcome.LATE, f"{stream.choices} of {case.path}"
    except (aiohttp.ClientError, OSError) as error:
        outcome, detail = judge_choices(case, stream, False, "")
        detail = detail or repr(error)
    is_recomputed = case.n == 1 and stream.num_cached < (len(case.prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
    seconds = time.monotonic() - started
    return Answer(outcome, seconds, outcome is Outcome.RIGHT and is_recomputed, detail)


async def _read(session: aiohttp.ClientSession, url: str, case: Case, stream: _Stream) -> None:
    async with session.post(url + case.path, json=_body(case)) as response:
        if response.status != 200:
            stream.error = f"{response.status} {(await response.text())[:200]}"
            return
        async for line in response.content:
            stream.take(line)


def _body(case: Case) -> dict[str, Any]:
    fields: dict[str, Any] = {"model": "demo", "temperature": 0.0, "ignore_eos": True, "stream": True}
    if case.path == "/v1/responses":
        return {**fields, "input": case.question, "max_output_tokens": 24, "store": False}
    if case.path == "/v1/messages":
        return {**fields, "messages": [{"role": "user", "content": case.question}], "max_tokens": 24}
    return {
        **fields,
        "prompt": list(case.prompt),
        "max_tokens": len(case.expected),
        "n": case.n,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }


def judge_choices(case: Case, stream: _Stream, is_done: bool, error: str) -> tuple[Outcome, str]:
    """Returns the outcome of the first choice that is not right."""
    found = [judge(case, stream.choices.get(index, []), is_done, error) for index in range(case.n)]
    return next((each for each in found if each[0] is not Outcome.RIGHT), found[0])


def judge(case: Case, tokens: Sequence[int], is_done: bool, error: str) -> tuple[Outcome, str]:
    """The received tokens must be right, however the answer ended."""
    if tuple(tokens) != case.expected[: len(tokens)]:
        return Outcome.WRONG, f"{list(tokens)} instead of {list(case.expected)}"
    if error:
        return Outcome.ERROR, error
    if not is_done:
        return Outcome.CUT, f"after {len(tokens)} tokens"
    if len(tokens) < len(case.expected):
        return Outcome.WRONG, f"{len(tokens)} tokens instead of {len(case.expected)}"
    return Outcome.RIGHT, ""

"""Makes requests from random prompts, first exchanges of ShareGPT conversations, or a recorded trace."""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.loadgen.stream import MALFORMED
from penstock.loadgen.tokens import Tokenizer
from penstock.utils.errors import ConfigError

TRACE_BLOCK = 512
"""Tokens per hash id of a Mooncake trace."""

_FIT_ATTEMPTS = 10
# Exchanges outside these bounds are skipped, as in other load generators, so that figures are comparable.
_SHAREGPT_MIN_LEN, _SHAREGPT_MAX_PROMPT_LEN, _SHAREGPT_MAX_TOTAL_LEN = 4, 1024, 2048


@dataclass(frozen=True, slots=True)
class Sample:
    """One request; lengths in tokens. `at` is its time in seconds after the start, None if the request rate decides."""

    prompt: str | list[int]
    prompt_len: int
    output_len: int
    at: float | None = None

    def backwards(self) -> Sample:
        """Returns a request of about this length without a common prefix, so that no prefix cache learns this one."""
        prompt = self.prompt
        return replace(self, prompt=" ".join(prompt.split(" ")[::-1]) if isinstance(prompt, str) else prompt[::-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomShape:
    """Lengths in tokens. `range_ratio` r draws each length evenly from [length (1 - r), length (1 + r)].

    `prefix_len` tokens, the same for every prompt, come before the `input_len` that differ.
    """

    num_prompts: int
    input_len: int
    output_len: int
    range_ratio: float = 0.0
    prefix_len: int = 0


async def random_samples(tokenizer: Tokenizer, shape: RandomShape, seed: int, as_text: bool) -> list[Sample]:
    """Returns prompts of random tokens: ids, whose number is exact, or text whose encoding was fitted to the length."""
    vocabulary = await tokenizer.vocabulary()
    prefix = random.Random(f"{seed}:prefix").choices(vocabulary, k=shape.prefix_len)

    async def sample(index: int) -> Sample:
        rng = random.Random(f"{seed}:{index}")
        own_len, output_len = (_near(length, shape.range_ratio, rng) for length in (shape.input_len, shape.output_len))
        token_ids = prefix + rng.choices(vocabulary, k=own_len)
        if not as_text:
            return Sample(token_ids, len(token_ids), output_len)
        text, length = await _fitted_text(tokenizer, token_ids, vocabulary, rng)
        return Sample(text, length, output_len)

    return await asyncio.gather(*map(sample, range(shape.num_prompts)))


async def sharegpt_samples(
    tokenizer: Tokenizer, path: Path, num_prompts: int, output_len: int | None, seed: int
) -> list[Sample]:
    """Returns first exchanges of conversations, shuffled: the human's turn is the prompt, the answer sets the length.

    `output_len` overrides the answers' lengths. Returns fewer than `num_prompts` if the file has no more.
    """
    try:
        exchanges = [pair for entry in json.loads(_read(path)) if (pair := _first_exchange(entry)) is not None]
    except (*MALFORMED, ValueError) as error:
        raise ConfigError(f"--dataset-path {path} is not a ShareGPT file: {error}") from None
    random.Random(seed).shuffle(exchanges)

    async def sample(prompt: str, answer: str) -> Sample | None:
        prompt_len = len(await tokenizer.encode(prompt))
        length = output_len or len(await tokenizer.encode(answer))
        too_short = prompt_len < _SHAREGPT_MIN_LEN or (output_len is None and length < _SHAREGPT_MIN_LEN)
        too_long = prompt_len > _SHAREGPT_MAX_PROMPT_LEN or prompt_len + length > _SHAREGPT_MAX_TOTAL_LEN
        return None if too_short or too_long else Sample(prompt, prompt_len, length)

    samples: list[Sample] = []
    rest = iter(exchanges)
    while batch := list(itertools.islice(rest, num_prompts - len(samples))):
        samples += [found for found in await asyncio.gather(*(sample(*pair) for pair in batch)) if found]
    return samples


def trace_samples(
    vocabulary: Sequence[int], path: Path, num_prompts: int | None, scale: float, seed: int
) -> list[Sample]:
    """Returns the first requests of a Mooncake trace (JSON lines), `scale` times as fast as they were recorded.

    Equal hash ids become equal blocks of tokens, so that prefixes are shared as in the trace; tokens that no hash id
    covers are not shared.
    """

    @functools.lru_cache(maxsize=16384)
    def block(name: str) -> list[int]:
        return random.Random(f"{seed}:{name}").choices(vocabulary, k=TRACE_BLOCK)

    samples: list[Sample] = []
    for number, line in enumerate(itertools.islice(_read(path).splitlines(), num_prompts), start=1):
        try:
            row = json.loads(line)
            length, output_len, at = int(row["input_length"]), int(row["output_length"]), float(row["timestamp"])
            names = [f"hash {hash_id}" for hash_id in row.get("hash_ids", ())]
        except (*MALFORMED, ValueError) as error:
            raise ConfigError(f"--dataset-path {path}, line {number}: not a valid trace request ({error!r})") from None
        num_blocks = -(-length // TRACE_BLOCK)
        names += [f"line {number}, block {index}" for index in range(len(names), num_blocks)]
        token_ids = list(itertools.chain.from_iterable(map(block, names[:num_blocks])))[:length]
        samples.append(Sample(token_ids, length, max(output_len, 1), at / 1000 / scale))
    samples.sort(key=lambda sample: sample.at or 0.0)
    first = samples[0].at or 0.0 if samples else 0.0
    return [replace(sample, at=(sample.at or 0.0) - first) for sample in samples]


def _near(length: int, ratio: float, rng: random.Random) -> int:
    return rng.randint(max(1, math.floor(length * (1 - ratio))), math.ceil(length * (1 + ratio)))


async def _fitted_text(
    tokenizer: Tokenizer, token_ids: list[int], vocabulary: Sequence[int], rng: random.Random
) -> tuple[str, int]:
    """Returns text that encodes to as many tokens as `token_ids`, and that number.

    Decoded text seldom encodes to the same tokens. If no attempt gives the exact number, the returned one is the text's
    actual number, which is close.
    """
    wanted = len(token_ids)
    for _ in range(_FIT_ATTEMPTS):
        text = await tokenizer.decode(token_ids)
        encoded = await tokenizer.encode(text)
        if len(encoded) == wanted:
            break
        token_ids = encoded[:wanted] + rng.choices(vocabulary, k=max(0, wanted - len(encoded)))
    return text, len(encoded)


def _first_exchange(entry: dict[str, Any]) -> tuple[str, str] | None:
    for turn, answer in itertools.pairwise(entry.get("conversations", ())):
        if turn["from"] in ("human", "user") and all(isinstance(each["value"], str) for each in (turn, answer)):
            return turn["value"], answer["value"]
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--dataset-path {path} cannot be read: {error}") from None

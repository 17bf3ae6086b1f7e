"""The requests of every row of the matrix: each prompt greedily and seeded, and some constrained by a grammar."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.frontend.front_end import FrontEnd
from penstock.messages.requests import EngineRequest
from penstock.messages.sampling_params import SamplingParams
from penstock.messages.structured_outputs import StructuredOutputsParams
from penstock.utils.errors import RequestError

MAX_PROMPTS = 256
_QUICK_PROMPTS = 8
# Words repeat, for n-gram drafts, and several prompts have a common beginning, for prefix hits.
_FACTS = (
    "Remember this. The key of Anna is in the red box. The key of Ben is under the old bridge. The key of Clara is "
    "behind the third door. The key of Emma is on the kitchen table. "
)
_PROMPTS = (
    _FACTS + "The key of Anna is in the red box. The key of Ben is",
    "Once upon a time there was a fox who lived at the edge of the forest. One morning the fox",
    _FACTS * 2 + "Where is the key of Clara? The key of Clara is behind",
    "What is 12 + 30? What is 7 + 5? What is 100 + 23?",
    _FACTS + _FACTS + _FACTS + "Where is the key of Emma?",
    "one two three four five one two three four five one two three four",
    "x",
    "def add(a, b):\n    return a + b\n\ndef mul(a, b):\n    return",
    "Zürich, Łódź, 東京 and São Paulo are cities. Write them again: Zürich, Łódź,",
    _FACTS + "Tell a story about Anna and Ben.",
    "The quick brown fox jumps over the lazy dog. " * 9,
    '{"name": "Anna", "place": "red box"}\n{"name": "Ben", "place":',
)
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "count": {"type": "integer"}},
    "required": ["name", "count"],
    "additionalProperties": False,
}
_STRUCTURED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("Write as JSON: name Anna, count 3. ", {"json": _SCHEMA}),
    (_FACTS + "Where is the key of Ben? ", {"choice": ["in the red box", "under the old bridge", "nowhere"]}),
    ("Name a city and a number. ", {"regex": "[A-Z][a-z]{3,8} [0-9]{2,4}"}),
)
_SAMPLED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 1.0, "top_k": 40, "repetition_penalty": 1.1},
    {"temperature": 0.7, "min_p": 0.02, "presence_penalty": 0.3},
)


@dataclass(frozen=True, slots=True)
class Case:
    """One request. `prompt` is its text, empty for one of token ids."""

    prompt: str
    request: EngineRequest

    @property
    def is_greedy(self) -> bool:
        return self.request.sampling_params.temperature == 0

    @property
    def is_structured(self) -> bool:
        return self.request.grammar is not None

    @property
    def num_tokens(self) -> int:
        """The maximum length of the request."""
        return len(self.request.prompt_token_ids) + self.request.max_tokens


def make_cases(
    front_end: FrontEnd, prompts: Sequence[str], vocab_size: int, max_tokens: int, is_quick: bool
) -> tuple[Case, ...]:
    """Makes cases from the given prompts, else from the built-in ones, or from random tokens if there is no tokenizer.
    Raises RequestError that names a prompt that cannot be run, or says why none can.
    """
    if prompts and front_end.tokenizer is None:
        raise RequestError("the prompts are text, and the engine has no tokenizer", "prompts")
    if len(prompts) > MAX_PROMPTS:
        raise RequestError(f"at most {MAX_PROMPTS} prompts can be compared, got {len(prompts)}", "prompts")
    plain: Sequence[Any] = prompts or _PROMPTS
    if front_end.tokenizer is None:
        plain = [{"prompt_token_ids": ids} for ids in _random_prompts(vocab_size)]
    wanted: list[tuple[Any, dict[str, Any]]] = [(prompt, {"ignore_eos": True}) for prompt in plain]
    if is_quick and not prompts:
        wanted = wanted[:_QUICK_PROMPTS]
    if front_end.tokenizer is not None:
        wanted += [(text, {"structured_outputs": StructuredOutputsParams(**form)}) for text, form in _STRUCTURED]
    cases: list[Case] = []
    for number, (prompt, options) in enumerate(wanted):
        chosen: dict[str, Any] = {**_SAMPLED[number % len(_SAMPLED)], "seed": number}
        for sampling in ({"temperature": 0.0}, chosen):
            params = SamplingParams(**{**options, **sampling, "max_tokens": max_tokens})
            try:
                cases.append(_make_case(front_end, len(cases), prompt, params))
            except RequestError:
                # A built-in prompt that does not fit is not an error of the user's model, unless none does.
                if prompt in prompts or (not cases and number == len(wanted) - 1):
                    raise
    return tuple(cases)


def _make_case(front_end: FrontEnd, number: int, prompt: Any, params: SamplingParams) -> Case:
    text = prompt if isinstance(prompt, str) else ""
    try:
        (request,) = front_end.input_processor.process(str(number), prompt, params).children
    except RequestError as error:
        raise RequestError(f"the prompt {text[:40]!r} cannot be run: {error}", error.field) from None
    return Case(text, request)


def _random_prompts(vocab_size: int) -> list[list[int]]:
    """Makes repetitive prompts of 1 to 160 tokens, many with the same beginning."""
    rng = random.Random(0)
    stem = [rng.randrange(vocab_size) for _ in range(60)]
    prompts: list[list[int]] = []
    for number in range(len(_PROMPTS)):
        own = [rng.randrange(vocab_size) for _ in range(1 + rng.randrange(25))]
        prompts.append(stem * (number % 3) + own * (1 + number % 2))
    return prompts

"""Converts a caller's request to engine requests: tokens, checked against the model, with every default set."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from penstock.config.pooling import PoolingConfig
from penstock.frontend.detokenizer import Detokenizer
from penstock.frontend.pooling import prompt_text
from penstock.messages.adapters import Adapter
from penstock.messages.pooling_params import PoolingParams
from penstock.messages.requests import EngineRequest
from penstock.messages.sampling_params import MAX_COUNT, SamplingParams
from penstock.tokenizer.tokenizer import Tokenizer, Truncation
from penstock.utils.errors import RequestError
from penstock.utils.names import did_you_mean, is_unicode

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or `{"prompt": ...}` / `{"prompt_token_ids": [...]}` with an optional `cache_salt`.

`output_token_ids` are output that was generated before, which the request continues; with n > 1 a list for each
completion, of which those at the places `finished_choices` have ended.
With token ids of two texts, `second_text_start` may give the start of the second one, for models that distinguish them.
For engines that pool, `second_text` beside the text `prompt` makes a pair of both.
"""

OUTPUT_TOKEN_IDS = "output_token_ids"
_SEED_MASK = 2**64 - 1
# For pooling requests: nothing is sampled, and the vector counts as one token.
_NO_SAMPLING = SamplingParams(max_tokens=1, detokenize=False)
FINISHED_CHOICES = "finished_choices"
SECOND_TEXT = "second_text"
_PROMPT_KEYS = (
    "prompt", "prompt_token_ids", "cache_salt", "second_text_start", OUTPUT_TOKEN_IDS, FINISHED_CHOICES
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ProcessedRequest:
    """One caller's request: its prompt, and one engine request per completion, None for one that had ended before.
    `given` is the output of each completion that was generated before.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    completions: tuple[EngineRequest | None, ...]
    given: tuple[tuple[int, ...], ...]

    @property
    def children(self) -> list[EngineRequest]:
        """The engine requests, at least one."""
        return [child for child in self.completions if child is not None]


class InputProcessor:
    def __init__(
        self,
        *,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        seed: int,
        has_connector: bool = False,
        pooling: PoolingConfig | None = None,
    ) -> None:
        """`pooling` is None if the engine generates."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        self._seed = seed
        self._has_connector = has_connector
        self._pooling = pooling
        self._counter = itertools.count()
        # Hundreds of prompts of one caller may have the same words.
        self._bad_words = functools.lru_cache(maxsize=8)(self._encode_bad_words)

    def process(
        self, request_id: str, prompt: Prompt, params: SamplingParams, priority: int = 0, adapter: Adapter | None = None
    ) -> ProcessedRequest:
        """Raises RequestError naming the field and its limit."""
        if self._pooling is not None:
            raise RequestError(
                "this engine pools and generates no tokens: use embed, classify or score, or start it with "
                "runner=generate"
            )
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"sampling_params must be SamplingParams, got {type(params).__name__}", "sampling_params"
            )
        text, token_ids, cache_salt = self._check(prompt, priority)
        self._check_params(params)
        if params.allowed_token_ids:
            # Each step reads them, and clients may repeat them.
            params = replace(params, allowed_token_ids=sorted(set(params.allowed_token_ids)))
        room = self._max_model_len - len(token_ids)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        if params.min_tokens > max_tokens:
            raise RequestError(
                f"min_tokens={params.min_tokens} exceeds the {room} tokens that max_model_len={self._max_model_len} "
                f"leaves after a prompt of {len(token_ids)}",
                "min_tokens",
            )
        # A grammar's output cannot continue after an end of sequence.
        eos = frozenset[int]() if params.ignore_eos and not params.structured_outputs else self.eos_token_ids
        given = _output_token_ids(prompt, params.n)
        finished = _finished_choices(prompt, given)
        ending = eos | frozenset(params.stop_token_ids or ())
        for index, output in enumerate(given):
            if output and index not in finished:
                self._check_output(token_ids, output, params, max_tokens, ending)
            elif output:
                self._check_token_ids(OUTPUT_TOKEN_IDS, output)
        # Requests without a seed get one from the engine's, so that preemption cannot change their tokens.
        seed = (self._seed << 32) + next(self._counter) if params.seed is None else int(params.seed)
        # The noise is made from 64 bits; a larger seed would not fit into a message.
        first = EngineRequest(
            request_id=request_id if params.n == 1 else f"{request_id}#0",
            prompt_token_ids=token_ids,
            # The engine reads the grammar, and a message cannot hold every number that a schema may have.
            sampling_params=replace(params, structured_outputs=None) if params.structured_outputs else params,
            max_tokens=max_tokens,
            seed=seed & _SEED_MASK,
            output_token_ids=given[0],
            eos_token_ids=eos,
            stop_token_ids=frozenset(params.stop_token_ids or ()),
            bad_words_token_ids=self._bad_words(tuple(params.bad_words or ())),
            priority=priority,
            cache_salt=cache_salt,
            grammar=None if params.structured_outputs is None else params.structured_outputs.spec(),
            adapter=adapter,
        )
        others = (
            replace(
                first,
                request_id=f"{request_id}#{index}",
                seed=seed + (index << 48) & _SEED_MASK,
                output_token_ids=given[index],
            )
            for index in range(1, params.n)
        )
        children = tuple(None if index in finished else each for index, each in enumerate((first, *others)))
        return ProcessedRequest(request_id, text, token_ids, params, children, given)

    def process_pooling(
        self, request_id: str, prompt: Prompt, params: PoolingParams, priority: int = 0
    ) -> ProcessedRequest:
        """Does the same for a pooling engine: adds the prompt that `params` names, and truncates as they specify."""
        assert self._pooling is not None, "a request that pools in an engine that generates"
        prompt = self._joined(self._with_prompt(prompt, params), params)
        if any(_output_token_ids(prompt, 1)):
            raise RequestError("a pooling engine generates no output to continue", OUTPUT_TOKEN_IDS)
        text, token_ids, cache_salt = self._check(prompt, priority, self._truncation(params))
        child = EngineRequest(
            request_id=request_id,
            prompt_token_ids=token_ids,
            sampling_params=_NO_SAMPLING,
            max_tokens=1,
            seed=0,
            priority=priority,
            cache_salt=cache_salt,
            second_text_start=_second_text_start(prompt, len(token_ids)),
        )
        return ProcessedRequest(request_id, text, token_ids, _NO_SAMPLING, (child,), ((),))

    def _with_prompt(self, prompt: Prompt, params: PoolingParams) -> Prompt:
        """Puts the named prompt before a text. Tokens stay unchanged, and naming a prompt for them is an error."""
        assert self._pooling is not None
        prefix = prompt_text(self._pooling.prompts, params.prompt_name)
        fields = prompt if isinstance(prompt, Mapping) else _as_fields(prompt)
        if isinstance(fields.get("prompt"), str) and fields.get("prompt_token_ids") is None:
            return {**fields, "prompt": prefix + fields["prompt"]} if fields["prompt"] else prompt
        if params.prompt_name is not None:
            raise RequestError("prompt_name needs a text input, and this input is token ids", "prompt_name")
        return prompt

    def _joined(self, prompt: Prompt, params: PoolingParams) -> Prompt:
        """Returns a prompt of two texts as the tokenizer joins them, or in the engine's template; others unchanged."""
        assert self._pooling is not None
        if not isinstance(prompt, Mapping) or SECOND_TEXT not in prompt:
            return prompt
        first, second, template = prompt.get("prompt"), prompt[SECOND_TEXT], self._pooling.score_template
        others = {key: value for key, value in prompt.items() if key not in ("prompt", SECOND_TEXT)}
        if not (isinstance(first, str) and isinstance(second, str) and first and second):
            raise RequestError(f"prompt and {SECOND_TEXT} must be two texts, neither of them empty", SECOND_TEXT)
        if template is not None:
            if params.truncate_prompt_tokens is not None:
                raise RequestError(
                    "truncate_prompt_tokens cannot be used here: it would cut off the end of the engine's "
                    "score_template",
                    "truncate_prompt_tokens",
                )
            return {**others, "prompt": _filled(template, first, second)}
        if self._tokenizer is None:
            raise RequestError("without a tokenizer a prompt must be prompt_token_ids", "prompt")
        token_ids, start = self._tokenizer.encode_pair(first, second, self._truncation(params))
        return {**others, "prompt_token_ids": token_ids, "second_text_start": start}

    def _truncation(self, params: PoolingParams) -> Truncation | None:
        """Returns how prompts are truncated. Raises RequestError if `params` exceed the model's length."""
        length = params.truncate_prompt_tokens
        if length is None:
            return None
        if length > self._max_model_len:
            raise RequestError(
                f"truncate_prompt_tokens must be -1 or at most max_model_len={self._max_model_len}, got {length}",
                "truncate_prompt_tokens",
            )
        return Truncation(self._max_model_len if length < 0 else length, keeps_end=False)

    def _check(
        self, prompt: Prompt, priority: int, truncation: Truncation | None = None
    ) -> tuple[str | None, tuple[int, ...], str | None]:
        """Returns what `_tokenize` does, after all checks."""
        if not isinstance(priority, int) or abs(priority) > MAX_COUNT:
            raise RequestError(f"priority must be an integer within +-{MAX_COUNT}, got {priority!r}", "priority")
        text, token_ids, cache_salt = self._tokenize(prompt, truncation)
        self.check_prompt(token_ids)
        return text, token_ids, cache_salt

    def _tokenize(
        self, prompt: Prompt, truncation: Truncation | None
    ) -> tuple[str | None, tuple[int, ...], str | None]:
        """Returns the prompt's text if it has one, its tokens, and its cache salt."""
        fields = prompt if isinstance(prompt, Mapping) else _as_fields(prompt)
        for key in fields:
            if key not in _PROMPT_KEYS:
                raise RequestError(f"unknown prompt field {key!r}{did_you_mean(str(key), _PROMPT_KEYS)}", str(key))
        text, token_ids, salt = (fields.get(key) for key in _PROMPT_KEYS[:3])
        if salt is not None and (not isinstance(salt, str) or not salt or not is_unicode(salt)):
            raise RequestError("cache_salt must be non-empty text", "cache_salt")
        if text is not None and not isinstance(text, str):
            raise RequestError(f"prompt must be text, got {type(text).__name__}", "prompt")
        if token_ids is not None:
            if isinstance(token_ids, str | bytes) or not isinstance(token_ids, Iterable):
                raise RequestError("prompt_token_ids must be a list of integers", "prompt_token_ids")
            token_ids = tuple(token_ids)
            return text, token_ids if truncation is None else truncation.cut(token_ids), salt
        if text is None:
            raise RequestError("a prompt needs prompt or prompt_token_ids", "prompt")
        if not text:
            raise RequestError("prompt must not be empty", "prompt")
        if self._tokenizer is None:
            raise RequestError("without a tokenizer a prompt must be prompt_token_ids", "prompt")
        return text, tuple(self._tokenizer.encode(text, truncation=truncation)), salt

    def check_prompt(self, token_ids: Sequence[int]) -> None:
        """Raises RequestError if a prompt is empty or too long, or has invalid token ids."""
        if not token_ids:
            raise RequestError("prompt_token_ids must not be empty", "prompt_token_ids")
        longest = self._max_model_len - (self._pooling is None)
        if len(token_ids) > longest:
            reason = ", so that one can be generated" if self._pooling is None else ""
            raise RequestError(
                f"the prompt has {len(token_ids)} tokens; max_model_len={self._max_model_len} allows at most "
                f"{longest}{reason}",
                "prompt",
                "context_length_exceeded",
            )
        self._check_token_ids("prompt_token_ids", token_ids)

    def _check_token_ids(self, field: str, token_ids: Iterable[Any]) -> None:
        size = self._vocab_size
        for token_id in token_ids:
            # Nothing is called here: there may be 100,000 tokens. A bool is no int.
            if type(token_id) is not int or not 0 <= token_id < size:
                raise RequestError(f"{field} must be integers from 0 to {size - 1}, got {token_id!r}", field)

    def _check_output(
        self,
        prompt_token_ids: Sequence[int],
        token_ids: Sequence[int],
        params: SamplingParams,
        max_tokens: int,
        ending: Set[int],
    ) -> None:
        """Raises RequestError if output to be continued could not be this request's, or has ended."""
        field = OUTPUT_TOKEN_IDS
        if params.prompt_logprobs is not None:
            raise RequestError(f"prompt_logprobs and {field} exclude each other", "prompt_logprobs")
        if len(token_ids) >= max_tokens:
            raise RequestError(
                f"{field} has {len(token_ids)} tokens, and the request may have {max_tokens}: nothing is left to "
                "generate",
                field,
            )
        self._check_token_ids(field, token_ids)
        allowed = frozenset(token_ids if params.allowed_token_ids is None else params.allowed_token_ids)
        for place, token_id in enumerate(token_ids):
            if token_id in ending:
                raise RequestError(f"{field}[{place}]={token_id} ends the output: nothing may follow it", field)
            if token_id not in allowed:
                raise RequestError(f"{field}[{place}]={token_id} is not among allowed_token_ids", field)
        if self._tokenizer is None or not params.stop_strings:
            return
        detokenizer = Detokenizer(self._tokenizer, prompt_token_ids, params)
        for place, token_id in enumerate(token_ids):
            if (stop := detokenizer.append(token_id)) is not None:
                raise RequestError(f"{field} contains the stop string {stop!r}, which ends at [{place}]", field)

    def _check_params(self, params: SamplingParams) -> None:
        self._check_token_ids("stop_token_ids", params.stop_token_ids or ())
        self._check_token_ids("allowed_token_ids", params.allowed_token_ids or ())
        self._check_token_ids("logit_bias", params.logit_bias or ())
        if self._has_connector and params.is_disaggregated and params.n > 1:
            raise RequestError(
                f"n must be 1 with do_remote_decode or do_remote_prefill, got {params.n}: the KV is handed over once",
                "n",
            )
        if self._tokenizer is None and (params.stop_strings or params.bad_words):
            field = "stop" if params.stop_strings else "bad_words"
            raise RequestError(f"{field} needs a tokenizer, and the engine was started without one", field)

    def _encode_bad_words(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Returns each word as it begins a text and as it follows a word, which many tokenizers encode differently."""
        if self._tokenizer is None:
            return ()
        spelled: dict[tuple[int, ...], None] = {}
        for word in words:
            for text in (word.lstrip(" "), " " + word.lstrip(" ")) if word.strip(" ") else (word,):
                token_ids = tuple(self._tokenizer.encode(text, add_special_tokens=False))
                if token_ids:
                    spelled[token_ids] = None
        return tuple(spelled)


def _second_text_start(prompt: Prompt, num_tokens: int) -> int:
    """Returns where the prompt says that its second text begins, 0 if it does not. Raises RequestError."""
    start = prompt.get("second_text_start") if isinstance(prompt, Mapping) else None
    if start is None:
        return 0
    if not isinstance(start, int) or isinstance(start, bool) or not 1 <= start < num_tokens:
        raise RequestError(
            f"second_text_start must be an integer from 1 to {num_tokens - 1}, within the prompt, got {start!r}",
            "second_text_start",
        )
    return start


def _output_token_ids(prompt: Prompt, n: int) -> tuple[tuple[Any, ...], ...]:
    """Returns the output that the prompt names for each of `n` completions, of any type; each () if it names none.

    Raises RequestError.
    """
    given = prompt.get(OUTPUT_TOKEN_IDS) if isinstance(prompt, Mapping) else None
    each = _listed(given, OUTPUT_TOKEN_IDS)
    if n == 1:
        return (each,)
    if not each:
        return ((),) * n
    if len(each) != n or not all(isinstance(one, Iterable) for one in each):
        raise RequestError(
            f"{OUTPUT_TOKEN_IDS} must be {n} lists of integers with n={n}, one for each", OUTPUT_TOKEN_IDS
        )
    return tuple(_listed(one, OUTPUT_TOKEN_IDS) for one in each)


def _listed(given: Any, field: str) -> tuple[Any, ...]:
    """Raises RequestError unless `given` is a list or None."""
    if isinstance(given, str | bytes) or not isinstance(given, Iterable | None):
        raise RequestError(f"{field} must be a list of integers", field)
    return () if given is None else tuple(given)


def _finished_choices(prompt: Prompt, given: Sequence[Sequence[Any]]) -> frozenset[int]:
    """Returns which completions get nothing more. Raises RequestError if that contradicts the given output."""
    named = _listed(prompt.get(FINISHED_CHOICES) if isinstance(prompt, Mapping) else None, FINISHED_CHOICES)
    for index in named:
        if type(index) is not int or not 0 <= index < len(given) or not given[index]:
            raise RequestError(
                f"{FINISHED_CHOICES} must name choices with {OUTPUT_TOKEN_IDS}, got {index!r}", FINISHED_CHOICES
            )
    finished = frozenset(named)
    if len(finished) == len(given):
        raise RequestError(f"{FINISHED_CHOICES} has all choices: nothing is left to generate", FINISHED_CHOICES)
    return finished


def _filled(template: str, query: str, document: str) -> str:
    """Substitutes both in one pass, so that braces in a text stay text."""
    texts = {"{query}": query, "{document}": document}
    for name, text in sorted(texts.items(), key=lambda item: template.index(item[0]), reverse=True):
        place = template.index(name)
        template = template[:place] + text + template[place + len(name) :]
    return template


def _as_fields(prompt: Any) -> Mapping[str, Any]:
    """Returns text or token ids as a dictionary."""
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray):
        return {"prompt_token_ids": prompt}
    raise RequestError(f"a prompt must be text, token ids or a dictionary, got {type(prompt).__name__}", "prompt")

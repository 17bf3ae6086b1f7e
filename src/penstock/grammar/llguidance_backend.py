"""Grammars by llguidance: a lexer of derivatives under an Earley parser, walked along the tokenizer's trie.

JSON is written as `json.dumps` with `ensure_ascii=False` writes it, with `, ` and `: ` and no other whitespace: if any
amount were allowed, a model could generate whitespace forever. A schema's own `x-guidance` options take precedence.

Measured with 152k tokens on one slow core: common grammars compile in 2 ms and fill a row in 0.02 to 0.1 ms. The worst
case found under the limits below, in grammars of up to 64 KiB: 0.5 s to compile (`GrammarChecker` passes half of that),
40 ms for a row and 27 ms to accept a token before the limit ends the request, and 60 MB. Items of an ambiguous grammar
take longer, up to 0.65 s for a row: so the processor time of a request's rows is limited too.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from penstock.messages.structured_outputs import GrammarKind, GrammarSpec
from penstock.utils.errors import ConfigError, GrammarError, RequestError

_MAX_PROTOTYPES = 32
_MAX_REASON_CHARACTERS = 500
_TOKENS_PER_RESTART = 256
_TOKENS_PER_MASK = 16
# The processor time that a request's masks may use, of which each mask gives back a part.
_SECONDS, _SECONDS_PER_MASK = 1.0, 0.01

# Forcing would admit only one tokenization of forced text, and process all of that text in every mask.
_OPTIONS = '\n%llguidance {"no_forcing": true}\n'
_JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
# The lines of the source under an error, and the position if the source was generated here.
_EXCERPT = re.compile(r"\n +\d+ \| ")
_PLACE = re.compile(r"^at 1\(8\): (failed to compile JSON schema: )?")

_LIMITS = LLParserLimits(
    max_items_in_row=2000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=500_000,
    verbose_errors=False,
)


class LLGuidanceBackend:
    """A `GrammarBackend`. `tokenizer_json` is the text of a `tokenizer.json`; `vocab_size` is the model's.

    Raises ConfigError if the tokenizer is of a kind that cannot be constrained, or has no end of sequence.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        eos = sorted(set(eos_token_ids))
        if not eos:
            raise ConfigError("structured outputs need a model with an end-of-sequence token")
        try:
            # A text that does not begin with a brace would be interpreted as a file path.
            tokenizer = LLTokenizer("{" + tokenizer_json.partition("{")[2], n_vocab=vocab_size, eos_token=eos)
        except ValueError as error:
            raise ConfigError(f"structured outputs are not supported with this tokenizer: {error}") from None
        self.num_words = -(-vocab_size // 32)
        self.eos_token_ids = frozenset(eos)
        # An unused id is represented by its number.
        known = [number for number in range(vocab_size) if tokenizer.decode_bytes([number]) != b"<[%d]>" % number]
        self.endings = _mask(self.num_words, known)
        self.continuations = self.endings & ~_mask(self.num_words, eos)
        self._tokenizer = tokenizer
        self._prototypes: OrderedDict[GrammarSpec, LLMatcher] = OrderedDict()
        # Grammars are compiled on a separate thread, and restarted on the thread that uses them.
        self._lock = threading.Lock()

    def compile(self, spec: GrammarSpec) -> LLGuidanceGrammar:
        """Compiles a grammar; reuses the compilation of an equal spec. Raises RequestError."""
        return LLGuidanceGrammar(self, spec, self.matcher(spec))

    def matcher(self, spec: GrammarSpec) -> LLMatcher:
        """Returns a matcher at the beginning. Raises RequestError. Equal specs share a lexer, which caches its states
        and so becomes faster, until it reaches its limit and fails for all of them: then it is replaced.
        """
        with self._lock:
            prototype = self._prototypes.get(spec)
            if prototype is None or not self._is_sound(prototype.deep_copy()):
                prototype = self._prototypes[spec] = self._compile(spec)
            self._prototypes.move_to_end(spec)
            if len(self._prototypes) > _MAX_PROTOTYPES:
                self._prototypes.popitem(last=False)
            return prototype.deep_copy()

    def _compile(self, spec: GrammarSpec) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, _source(spec), log_level=0, limits=_LIMITS)
        trial = matcher.deep_copy()
        if matcher.is_error() or not self._is_sound(trial):
            raise _refusal(_reason(matcher) or _reason(trial))
        return matcher

    def _is_sound(self, matcher: LLMatcher) -> bool:
        """Whether a mask and a rollback work. Drafts need rollback, which rules with a `stop` do not support."""
        row = np.empty(self.num_words, np.int32)
        matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if not matcher.is_error():
            allowed = np.flatnonzero(np.unpackbits((row & self.continuations).view(np.uint8), bitorder="little"))
            if len(allowed):
                matcher.consume_token(int(allowed[0]))
                matcher.rollback(1)
        return not matcher.is_error()


class LLGuidanceGrammar:
    """A `Grammar`; made by `LLGuidanceBackend.compile`."""

    def __init__(self, backend: LLGuidanceBackend, spec: GrammarSpec, matcher: LLMatcher) -> None:
        self._backend, self._spec, self._matcher = backend, spec, matcher
        self._tokens: list[int] = []
        self._next_restart, self._seconds_left = 0, _SECONDS

    @property
    def is_finished(self) -> bool:
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def accept(self, token_ids: Sequence[int]) -> None:
        for place, token_id in enumerate(token_ids, start=1):
            self._advance(token_id)
            if place % _TOKENS_PER_MASK == 0 and not self.is_finished:
                self._compute_mask(np.empty(self._backend.num_words, np.int32))

    def fill(self, drafts: Sequence[int], rows: np.ndarray) -> None:
        # The library writes through this pointer.
        assert rows.dtype == np.int32 and rows.strides[1] == rows.itemsize, (rows.dtype, rows.strides)
        assert rows.shape == (1 + len(drafts), self._backend.num_words), (rows.shape, len(drafts))
        self._fill_row(rows[0])
        start, before = len(self._tokens), self._matcher.deep_copy()
        for place, draft in enumerate(drafts):
            if not _is_set(rows[place], draft):
                rows[place + 1 :] = -1  # all
                break
            try:
                self._advance(draft)
                self._fill_row(rows[place + 1])
            except GrammarError:
                rows[place + 1 :] = 0  # none
                self._matcher, self._tokens[start:] = before, []
                break
        self._matcher.rollback(len(self._tokens) - start)
        del self._tokens[start:]

    def _advance(self, token_id: int) -> None:
        if self.is_finished:
            if token_id not in self._backend.eos_token_ids:
                raise GrammarError(f"token {token_id} follows the end of the output")
            return
        if not self._matcher.consume_token(token_id):
            self._restart()
            if not self._matcher.consume_token(token_id):
                raise GrammarError(_reason(self._matcher))
        self._tokens.append(token_id)

    def _fill_row(self, row: np.ndarray) -> None:
        self._compute_mask(row)
        if self._matcher.is_error():
            self._restart()
            self._compute_mask(row)
        can_end = self._matcher.is_stopped() or self._matcher.is_accepting()
        row &= self._backend.endings if can_end else self._backend.continuations
        if self._matcher.is_error() or not row.any():
            raise GrammarError(_reason(self._matcher) or "the grammar allows no token here")

    def _restart(self) -> None:
        """Replays the output from the beginning with a new lexer, in case the shared lexer reached its limit."""
        if len(self._tokens) < self._next_restart:
            raise GrammarError(_reason(self._matcher))
        self._next_restart = len(self._tokens) + _TOKENS_PER_RESTART
        try:
            self._matcher = self._backend.matcher(self._spec)
        except RequestError as error:
            raise GrammarError(str(error)) from None
        for start in range(0, len(self._tokens), _TOKENS_PER_MASK):
            self._compute_mask(np.empty(self._backend.num_words, np.int32))
            self._matcher.consume_tokens(self._tokens[start : start + _TOKENS_PER_MASK])

    def _compute_mask(self, row: np.ndarray) -> None:
        """The limit on the work of tokens counts from the last mask. It counts items, which take longer in ambiguous
        grammars, and a mask holds up all requests: hence the limit on their time.
        """
        started = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        self._seconds_left = min(_SECONDS, self._seconds_left + _SECONDS_PER_MASK + started - time.thread_time())
        if self._seconds_left < 0:
            raise GrammarError("the grammar takes too long to follow; make it less ambiguous")


def _source(spec: GrammarSpec) -> str:
    """Converts the spec to llguidance's form. Raises RequestError."""
    # Unwrapped, a text that begins with a brace would be parsed as llguidance's own form, which allows more.
    answer = {"lark_grammar": _lark(spec) + _OPTIONS}
    if not spec.reasoning:
        return json.dumps({"grammars": [answer]})
    whole = {"lark_grammar": f"start: reasoning @answer\n{spec.reasoning}{_OPTIONS}"}
    return json.dumps({"grammars": [whole, {"name": "answer", **answer}]})


def _lark(spec: GrammarSpec) -> str:
    match spec.kind:
        case GrammarKind.JSON_OBJECT:
            return _lark_of_schema('{"type": "object"}')
        case GrammarKind.JSON_SCHEMA:
            return _lark_of_schema(spec.text)
        case GrammarKind.REGEX:
            return f"start: /{regex_to_lark(_without_anchors(spec.text), '')}/"
        case GrammarKind.CHOICE:
            choices = (json.dumps(choice, ensure_ascii=False) for choice in json.loads(spec.text))
            return f"start: CHOICE\nCHOICE: {' | '.join(choices)}"
        case GrammarKind.GRAMMAR:
            return _to_lark(spec.text)


def _lark_of_schema(text: str) -> str:
    try:
        schema = json.loads(text)
        schema["x-guidance"] = _JSON_OPTIONS | schema.get("x-guidance", {})
        return f"start: %json {json.dumps(schema)}"
    except (TypeError, ValueError, RecursionError) as error:
        raise _refusal(str(error)) from None


def _to_lark(text: str) -> str:
    try:
        return gbnf_to_lark(text) if _GBNF_RULE.search(text) else text
    except Exception as error:  # noqa: BLE001 - the converter raises bare Exception for every malformed grammar
        raise _refusal(str(error) or type(error).__name__) from None


def _without_anchors(regex: str) -> str:
    """Removes anchors, which llguidance does not support; the whole output is matched anyway."""
    body = regex.removeprefix("^")
    escapes = len(body) - 1 - len(body[:-1].rstrip("\\"))
    return body[:-1] if body.endswith("$") and escapes % 2 == 0 else body


def _refusal(reason: str) -> RequestError:
    return RequestError(f"the grammar cannot be compiled: {reason[:_MAX_REASON_CHARACTERS]}", "structured_outputs")


def _reason(matcher: LLMatcher) -> str:
    """Returns the error in one line, without the source that llguidance repeats; "" if there is none."""
    text = " ".join(_PLACE.sub("", _EXCERPT.split(matcher.get_error().removesuffix("<non-verbose/>"))[0]).split())
    return "nothing matches it" if text == "NoExtensionBias" else text


def _mask(num_words: int, token_ids: Iterable[int]) -> np.ndarray:
    """Returns [num_words] int32 with the bits of these tokens set."""
    bits = np.zeros(num_words * 32, np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def _is_set(row: np.ndarray, token_id: int) -> bool:
    return 0 <= token_id < 32 * len(row) and bool(int(row[token_id >> 5]) >> (token_id & 31) & 1)

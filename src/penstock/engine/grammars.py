"""The engine's grammar backend, built when the first request needs it."""

from __future__ import annotations

import functools

from penstock.config.engine import EngineConfig
from penstock.grammar.backend import Grammar, GrammarBackend
from penstock.grammar.llguidance_backend import LLGuidanceBackend
from penstock.messages.structured_outputs import GrammarSpec
from penstock.tokenizer.tokenizer import eos_token_ids, load_tokenizer
from penstock.utils.math import cdiv


class LazyGrammarBackend:
    """Builds the backend on first use: reading a large vocabulary takes a second, unneeded without structured
    outputs.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self.num_words = cdiv(config.model.vocab_size, 32)

    def compile(self, spec: GrammarSpec) -> Grammar:
        return self._backend.compile(spec)

    @functools.cached_property
    def _backend(self) -> GrammarBackend:
        tokenizer = load_tokenizer(self._config)
        assert tokenizer is not None, "structured outputs without a tokenizer"
        eos = eos_token_ids(self._config, tokenizer)
        return LLGuidanceBackend(tokenizer.backend.to_str(), self._config.model.vocab_size, eos)


def make_grammar_backend(config: EngineConfig) -> GrammarBackend | None:
    """Returns None if there is no tokenizer, and so no text to constrain."""
    return None if config.tokenizer_path is None else LazyGrammarBackend(config)

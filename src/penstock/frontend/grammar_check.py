"""Checks a request's grammar before the engine accepts the request."""

from __future__ import annotations

from penstock.config.engine import EngineConfig
from penstock.grammar.checker import GrammarChecker
from penstock.messages.structured_outputs import GrammarSpec
from penstock.tokenizer.tokenizer import Tokenizer, eos_token_ids
from penstock.utils.errors import RequestError


def make_grammar_checker(config: EngineConfig, tokenizer: Tokenizer | None) -> GrammarChecker | NoGrammars:
    """What tells, before a request is taken, whether its grammar can be."""
    if tokenizer is None:
        return NoGrammars()
    return GrammarChecker(tokenizer.backend.to_str(), config.model.vocab_size, eos_token_ids(config, tokenizer))


class NoGrammars:
    """The checker of an engine without a tokenizer."""

    async def check(self, spec: GrammarSpec) -> None:
        raise RequestError("structured outputs need a tokenizer, and the engine has none", "structured_outputs")

    async def shutdown(self) -> None:
        pass

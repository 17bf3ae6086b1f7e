"""Builds the parts before the engine core: tokenizer, request checks, recommended sampling. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.config.engine import EngineConfig, SchedulerConfig
from penstock.config.model import read_json
from penstock.frontend.input_processor import InputProcessor
from penstock.frontend.pooling import PoolingProcessor
from penstock.grammar.checker import GrammarChecker
from penstock.messages.sampling_params import SamplingParams
from penstock.messages.structured_outputs import GrammarSpec
from penstock.tokenizer.tokenizer import Tokenizer, eos_token_ids, load_tokenizer
from penstock.utils.errors import ConfigError, RequestError


@dataclass(frozen=True, slots=True)
class FrontEnd:
    """Converts prompts to engine requests, and knows the sampling that the checkpoint recommends."""

    tokenizer: Tokenizer | None
    input_processor: InputProcessor
    default_sampling_params: SamplingParams
    pooling: PoolingProcessor

    def get_tokenizer(self) -> Tokenizer:
        """Returns the tokenizer. Raises RequestError if the engine was built with skip_tokenizer_init."""
        if self.tokenizer is None:
            raise RequestError("the engine was built without a tokenizer")
        return self.tokenizer


def build_front_end(config: EngineConfig, limits: SchedulerConfig, tokenizer: Tokenizer | None = None) -> FrontEnd:
    """Builds the tokenizer, if it is not given, and the request checks for a built engine core."""
    tokenizer = tokenizer or load_tokenizer(config)
    if tokenizer is not None:
        tokenizer.max_tokens = limits.max_model_len
    generation = read_json(config.model.path / "generation_config.json") or {}
    processor = InputProcessor(
        tokenizer=tokenizer,
        vocab_size=config.model.vocab_size,
        max_model_len=limits.max_model_len,
        eos_token_ids=eos_token_ids(config, tokenizer),
        seed=config.seed,
        has_connector=config.kv_transfer is not None,
        pooling=config.pooling,
    )
    pooling = PoolingProcessor(config.pooling, config.model.hidden_size)
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    defaults: dict[str, Any] = {name: generation[name] for name in names if generation.get(name) is not None}
    if generation.get("do_sample") is False:
        defaults = {"temperature": 0.0, "repetition_penalty": defaults.get("repetition_penalty", 1.0)}
    try:
        return FrontEnd(tokenizer, processor, SamplingParams(**defaults), pooling)
    except RequestError as error:
        raise ConfigError(f"{config.model.path / 'generation_config.json'}: {error}") from None


def make_grammar_checker(config: EngineConfig, tokenizer: Tokenizer | None) -> GrammarChecker | NoGrammars:
    """Builds the check of a request's grammar before the request is accepted."""
    if tokenizer is None:
        return NoGrammars()
    return GrammarChecker(tokenizer.backend.to_str(), config.model.vocab_size, eos_token_ids(config, tokenizer))


class NoGrammars:
    """The grammar checker of an engine without a tokenizer."""

    async def check(self, spec: GrammarSpec) -> None:
        raise RequestError("structured outputs need a tokenizer, and the engine has none", "structured_outputs")

    async def shutdown(self) -> None:
        pass

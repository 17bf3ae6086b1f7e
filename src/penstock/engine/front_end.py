"""Builds what stands before the engine core: tokenizer, request checks, recommended sampling. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.config.engine import EngineConfig, SchedulerConfig
from penstock.config.model import read_json
from penstock.engine.input_processor import InputProcessor
from penstock.engine.tokenizer import Tokenizer
from penstock.messages.sampling_params import SamplingParams
from penstock.utils.errors import ConfigError, RequestError


@dataclass(frozen=True, slots=True)
class FrontEnd:
    """What turns a caller's words into engine requests, and the sampling that the checkpoint recommends."""

    tokenizer: Tokenizer | None
    input_processor: InputProcessor
    default_sampling_params: SamplingParams

    def get_tokenizer(self) -> Tokenizer:
        """Raises RequestError when the engine was built with skip_tokenizer_init."""
        if self.tokenizer is None:
            raise RequestError("the engine was built without a tokenizer")
        return self.tokenizer


def load_tokenizer(config: EngineConfig) -> Tokenizer | None:
    """The configured tokenizer; None when the engine has none. Raises ConfigError."""
    if config.tokenizer_path is None:
        return None
    return Tokenizer(config.tokenizer_path, config.model.vocab_size)


def eos_token_ids(config: EngineConfig, tokenizer: Tokenizer | None) -> frozenset[int]:
    """The tokens that end a sequence, by whichever of its files the checkpoint says so. Raises ConfigError."""
    generation = read_json(config.model.path / "generation_config.json") or {}
    model = read_json(config.model.path / "config.json") or {}
    stored = generation.get("eos_token_id")
    eos = _token_ids(model.get("eos_token_id") if stored is None else stored)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        eos |= {tokenizer.eos_token_id}
    return eos


def build_front_end(config: EngineConfig, limits: SchedulerConfig) -> FrontEnd:
    """The tokenizer and the request checks for a built engine core."""
    tokenizer = load_tokenizer(config)
    generation = read_json(config.model.path / "generation_config.json") or {}
    processor = InputProcessor(
        tokenizer=tokenizer,
        vocab_size=config.model.vocab_size,
        max_model_len=limits.max_model_len,
        eos_token_ids=eos_token_ids(config, tokenizer),
        seed=config.seed,
    )
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    defaults: dict[str, Any] = {name: generation[name] for name in names if generation.get(name) is not None}
    if generation.get("do_sample") is False:
        defaults = {"temperature": 0.0}
    try:
        return FrontEnd(tokenizer, processor, SamplingParams(**defaults))
    except RequestError as error:
        raise ConfigError(f"{config.model.path / 'generation_config.json'}: {error}") from None


def _token_ids(value: Any) -> frozenset[int]:
    """An `eos_token_id` of a checkpoint: absent, one or several."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(token_id, int) for token_id in ids):
        raise ConfigError(f"eos_token_id must be token ids, got {value!r}")
    return frozenset(ids)

"""The configuration of speculative decoding: the kind and the number of drafts.

Most keys are vLLM's: `method`, `model`, `num_speculative_tokens`, `prompt_lookup_min`, `prompt_lookup_max`, and
`num_speculative_tokens_per_batch_size`, a table such as `{"4": 5, "16": 2}`: five drafts while at most 4 requests run,
two up to 16, none beyond. `draft_sample_method` and `rejection_sample_method` with `synthetic_acceptance_rates` say how
drafts are chosen and verified.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from penstock.config.eagle3 import Eagle3Config, is_eagle3, load_eagle3_config
from penstock.config.model import ModelConfig, load_model_config
from penstock.config.model_path import resolve_model_path
from penstock.config.options import Limits, Must, convert_options, read_object
from penstock.utils.errors import ConfigError

_WITH_MODEL = ("draft_model", "eagle3")
MAX_DRAFTS = 32
_ANY_BATCH_SIZE = 1 << 30


_Count = Annotated[int, Limits(ge=1, le=MAX_DRAFTS)]
_Rates = Annotated[
    tuple[Annotated[float, Limits(ge=0, le=1)], ...],
    Must("num_speculative_tokens numbers from 0 to 1, one for each draft once those before it are accepted"),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """The keys of the object that users give."""

    method: Literal["ngram", "draft_model", "mtp", "eagle3"]
    model: str = ""
    num_speculative_tokens: _Count
    num_speculative_tokens_per_batch_size: Any = None
    prompt_lookup_min: _Count = 2
    prompt_lookup_max: _Count = 5
    draft_sample_method: Literal["greedy", "probabilistic"] = "greedy"
    rejection_sample_method: Literal["standard", "synthetic"] = "standard"
    synthetic_acceptance_rates: _Rates = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """`drafts` as in `SchedulerConfig`. `draft_model` and `eagle3` are set for the methods of their names.

    `samples_drafts` is the probabilistic method: drafts are drawn, and verified by rejection sampling.
    `synthetic_acceptance_rates`, if not empty, accept each draft at random, once those before it are accepted.
    """

    method: str
    num_speculative_tokens: int
    drafts: tuple[tuple[int, int], ...]
    prompt_lookup_min: int
    prompt_lookup_max: int
    draft_model: ModelConfig | None
    eagle3: Eagle3Config | None
    samples_drafts: bool
    synthetic_acceptance_rates: tuple[float, ...]

    def for_length(self, max_model_len: int) -> SpeculativeConfig:
        """Returns the drafter of an engine with this longest context (`ModelConfig.for_length`)."""
        draft = self.draft_model
        return self if draft is None else replace(self, draft_model=draft.for_length(max_model_len))

    @property
    def shapes(self) -> list[ModelConfig]:
        """The shape of the drafter's own model, if it has one."""
        shapes = (self.draft_model, None if self.eagle3 is None else self.eagle3.shape)
        return [shape for shape in shapes if shape is not None]

    @property
    def num_lookahead_tokens(self) -> int:
        """The number of positions after a request's last computed token that the speculator writes KV for."""
        return 0 if self.method == "ngram" else self.num_speculative_tokens


def parse_speculative_config(value: str | Mapping[str, Any], target: ModelConfig) -> SpeculativeConfig:
    """Checks the configuration against the target model. Raises ConfigError naming the key and its limit."""
    given = dict(read_object("speculative_config", value))
    if "method" not in given and isinstance(given.get("model"), str):
        given["method"] = "eagle3" if is_eagle3(resolve_model_path(given["model"])) else "draft_model"
    options = convert_options(_Options, given, "in speculative_config")
    method, count = options.method, options.num_speculative_tokens
    longest = options.prompt_lookup_max
    shortest = options.prompt_lookup_min if "prompt_lookup_min" in given else min(2, longest)
    if shortest > longest:
        raise ConfigError(f"prompt_lookup_min={shortest} exceeds prompt_lookup_max={longest} in speculative_config")
    if bool(options.model) != (method in _WITH_MODEL):
        raise ConfigError(f"speculative_config needs a model for {' and '.join(_WITH_MODEL)}, and for no other method")
    model = resolve_model_path(options.model) if options.model else Path()
    samples_drafts = options.draft_sample_method == "probabilistic"
    rates = options.synthetic_acceptance_rates
    _check_rates(options)
    if samples_drafts and (method == "ngram" or rates):
        other = "rejection_sample_method=synthetic" if rates else "method=ngram"
        raise ConfigError(
            "draft_sample_method=probabilistic in speculative_config needs drafts with probabilities and a "
            f"verification that asks for them, not {other}: leave it at greedy"
        )
    return SpeculativeConfig(
        method=method,
        num_speculative_tokens=count,
        drafts=_parse_table(options.num_speculative_tokens_per_batch_size, count),
        prompt_lookup_min=shortest,
        prompt_lookup_max=longest,
        draft_model=_load_draft_model(model, target) if method == "draft_model" else None,
        eagle3=load_eagle3_config(model, target) if method == "eagle3" else None,
        samples_drafts=samples_drafts,
        synthetic_acceptance_rates=rates,
    )


def _parse_table(table: Any, count: int) -> tuple[tuple[int, int], ...]:
    if table is None:
        return ((_ANY_BATCH_SIZE, count),)
    name = "num_speculative_tokens_per_batch_size in speculative_config"
    if not isinstance(table, Mapping) or not table:
        raise ConfigError(f'{name} must be an object such as {{"4": 5, "16": 2}}, got {table!r}')
    entries: Mapping[Any, Any] = table  # pyright: ignore[reportUnknownVariableType]
    pairs: list[tuple[int, int]] = []
    for limit, drafts in entries.items():
        if not re.fullmatch("[0-9]{1,9}", str(limit)) or type(drafts) is not int or not 0 <= drafts <= count:
            raise ConfigError(
                f"{name} must map batch sizes to 0 to num_speculative_tokens={count} drafts, got {limit!r}: {drafts!r}"
            )
        pairs.append((int(limit), drafts))
    return tuple(sorted(pairs))


def _check_rates(options: _Options) -> None:
    count, rates = options.num_speculative_tokens, options.synthetic_acceptance_rates
    if (options.rejection_sample_method == "synthetic") != bool(rates):
        raise ConfigError(
            "rejection_sample_method=synthetic and synthetic_acceptance_rates in speculative_config need each other"
        )
    if rates and len(rates) != count:
        raise ConfigError(
            f"synthetic_acceptance_rates in speculative_config must be num_speculative_tokens={count} numbers from 0 "
            f"to 1, one for each draft once those before it are accepted, got {list(rates)!r}"
        )


def _load_draft_model(path: Path, target: ModelConfig) -> ModelConfig:
    model = load_model_config(path, target.dtype).with_kv_cache(target.kv_cache_dtype)
    if model.vocab_size != target.vocab_size:
        raise ConfigError(
            f"the draft model has a vocabulary of {model.vocab_size} tokens and the target one of {target.vocab_size}: "
            "they must share a tokenizer"
        )
    return model

"""The configuration of speculative decoding: the kind and the number of drafts.

Most keys are vLLM's: `method`, `model`, `num_speculative_tokens`, `prompt_lookup_min`, `prompt_lookup_max`, and
`num_speculative_tokens_per_batch_size`, a table such as `{"4": 5, "16": 2}`: five drafts while at most 4 requests run,
two up to 16, none beyond. `draft_sample_method` and `rejection_sample_method` with `synthetic_acceptance_rates` say how
drafts are chosen and verified.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.config.eagle3 import Eagle3Config, is_eagle3, load_eagle3_config
from penstock.config.model import ModelConfig, load_model_config
from penstock.utils.errors import ConfigError
from penstock.utils.names import did_you_mean

METHODS = ("ngram", "draft_model", "mtp", "eagle3")
_WITH_MODEL = ("draft_model", "eagle3")
MAX_DRAFTS = 32
DRAFT_SAMPLE_METHODS = ("greedy", "probabilistic")
REJECTION_SAMPLE_METHODS = ("standard", "synthetic")
_KEYS = (
    "method",
    "model",
    "num_speculative_tokens",
    "num_speculative_tokens_per_batch_size",
    "prompt_lookup_min",
    "prompt_lookup_max",
    "draft_sample_method",
    "rejection_sample_method",
    "synthetic_acceptance_rates",
)
_ANY_BATCH_SIZE = 1 << 30


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

    @property
    def shapes(self) -> list[ModelConfig]:
        """The shape of the drafter's own model, if it has one."""
        shapes = (self.draft_model, None if self.eagle3 is None else self.eagle3.shape)
        return [shape for shape in shapes if shape is not None]

    @property
    def model_paths(self) -> list[Path]:
        """The folders of the drafter's own weights."""
        return [shape.path for shape in self.shapes]

    @property
    def num_lookahead_tokens(self) -> int:
        """The number of positions after a request's last computed token that the speculator writes KV for."""
        return 0 if self.method == "ngram" else self.num_speculative_tokens


def read_speculative_config(value: str | Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the object, or parses its JSON text. Raises ConfigError."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ConfigError(f"speculative_config is not JSON: {error}") from None
    if not isinstance(value, Mapping):
        raise ConfigError(f"speculative_config must be an object, got {value!r}")
    for key in value:
        if key not in _KEYS:
            raise ConfigError(f"unknown key {key!r} in speculative_config{did_you_mean(key, _KEYS)}")
    return value


def parse_speculative_config(value: str | Mapping[str, Any], target: ModelConfig) -> SpeculativeConfig:
    """Checks the configuration against the target model. Raises ConfigError naming the key and its limit."""
    given = read_speculative_config(value)
    model = Path(str(given.get("model", "")))
    method = given.get("method", _method_of(model) if "model" in given else None)
    if method not in METHODS:
        raise ConfigError(f"method in speculative_config must be one of {', '.join(METHODS)}, got {method!r}")
    count = _count(given, "num_speculative_tokens", None)
    longest = _count(given, "prompt_lookup_max", 5)
    shortest = _count(given, "prompt_lookup_min", min(2, longest))
    if shortest > longest:
        raise ConfigError(f"prompt_lookup_min={shortest} exceeds prompt_lookup_max={longest} in speculative_config")
    if ("model" in given) != (method in _WITH_MODEL):
        raise ConfigError(f"speculative_config needs a model for {' and '.join(_WITH_MODEL)}, and for no other method")
    samples_drafts = _choice(given, "draft_sample_method", DRAFT_SAMPLE_METHODS) == "probabilistic"
    rates = _parse_rates(given, count)
    if samples_drafts and (method == "ngram" or rates):
        other = "rejection_sample_method=synthetic" if rates else "method=ngram"
        raise ConfigError(
            "draft_sample_method=probabilistic in speculative_config needs drafts with probabilities and a "
            f"verification that asks for them, not {other}: leave it at greedy"
        )
    return SpeculativeConfig(
        method=method,
        num_speculative_tokens=count,
        drafts=_parse_table(given.get("num_speculative_tokens_per_batch_size"), count),
        prompt_lookup_min=shortest,
        prompt_lookup_max=longest,
        draft_model=_load_draft_model(model, target) if method == "draft_model" else None,
        eagle3=load_eagle3_config(model, target) if method == "eagle3" else None,
        samples_drafts=samples_drafts,
        synthetic_acceptance_rates=rates,
    )


def _choice(given: Mapping[str, Any], key: str, choices: tuple[str, ...]) -> str:
    value = given.get(key, choices[0])
    if value not in choices:
        raise ConfigError(f"{key} in speculative_config must be one of {', '.join(choices)}, got {value!r}")
    return value


def _count(given: Mapping[str, Any], key: str, default: int | None) -> int:
    value = given.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_DRAFTS:
        raise ConfigError(f"{key} in speculative_config must be an integer from 1 to {MAX_DRAFTS}, got {value!r}")
    return value


def _parse_table(table: Any, count: int) -> tuple[tuple[int, int], ...]:
    if table is None:
        return ((_ANY_BATCH_SIZE, count),)
    name = "num_speculative_tokens_per_batch_size in speculative_config"
    if not isinstance(table, Mapping) or not table:
        raise ConfigError(f'{name} must be an object such as {{"4": 5, "16": 2}}, got {table!r}')
    entries: Mapping[Any, Any] = table  # pyright: ignore[reportUnknownVariableType]
    pairs: list[tuple[int, int]] = []
    for limit, drafts in entries.items():
        if not str(limit).isdecimal() or not isinstance(drafts, int) or not 0 <= drafts <= count:
            raise ConfigError(
                f"{name} must map batch sizes to 0 to num_speculative_tokens={count} drafts, got {limit!r}: {drafts!r}"
            )
        pairs.append((int(limit), drafts))
    return tuple(sorted(pairs))


def _parse_rates(given: Mapping[str, Any], count: int) -> tuple[float, ...]:
    is_synthetic = _choice(given, "rejection_sample_method", REJECTION_SAMPLE_METHODS) == "synthetic"
    if is_synthetic != ("synthetic_acceptance_rates" in given):
        raise ConfigError(
            "rejection_sample_method=synthetic and synthetic_acceptance_rates in speculative_config need each other"
        )
    if not is_synthetic:
        return ()
    value = given["synthetic_acceptance_rates"]
    rates: tuple[Any, ...] = tuple(value if isinstance(value, list | tuple) else ())  # pyright: ignore[reportUnknownArgumentType]
    if len(rates) != count or not all(map(_is_probability, rates)):
        raise ConfigError(
            f"synthetic_acceptance_rates in speculative_config must be num_speculative_tokens={count} numbers from 0 "
            f"to 1, one for each draft once those before it are accepted, got {value!r}"
        )
    return rates


def _is_probability(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def _method_of(model: Path) -> str:
    return "eagle3" if is_eagle3(model) else "draft_model"


def _load_draft_model(path: Path, target: ModelConfig) -> ModelConfig:
    model = load_model_config(path, target.dtype)
    if model.vocab_size != target.vocab_size:
        raise ConfigError(
            f"the draft model has a vocabulary of {model.vocab_size} tokens and the target one of {target.vocab_size}: "
            "they must share a tokenizer"
        )
    return model

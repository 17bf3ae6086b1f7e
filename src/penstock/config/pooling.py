"""Whether an engine generates or pools, and how it pools: read from the checkpoint and from `pooler_config`.

A pooling engine answers a prompt with one vector made of the model's last hidden states, or with a classifier's result
for that vector.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from penstock.config.model import ModelConfig, read_json, read_model_json
from penstock.config.options import Must, convert_options, read_object
from penstock.config.sentence_transformers import METHODS, Prompts, read_max_tokens, read_modules, read_prompts
from penstock.utils.errors import ConfigError

RUNNERS = ("auto", "generate", "pooling")
MAX_LABELS = 65536

_CLASSIFIER = "ForSequenceClassification"
_MASKED_LM = "ForMaskedLM"
_ACTIVATION_OF_PROBLEM = {
    "regression": "identity",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}
_ACTIVATION_OF_CLASS = {"Sigmoid": "sigmoid", "Identity": "identity"}


def _is_method(name: str) -> bool:
    return name.lower() in METHODS


def _has_placeholders(template: str) -> bool:
    return template.count("{query}") == template.count("{document}") == 1


@dataclass(frozen=True, slots=True)
class _Options:
    """The keys of `pooler_config`; the defaults leave the checkpoint's choice."""

    pooling_type: Annotated[str, Must(f"one of {', '.join(METHODS).upper()}", _is_method)] = ""
    normalize: bool | None = None
    classifier_from_token: Any = None
    score_template: Annotated[str, Must("a text with one {query} and one {document}", _has_placeholders)] = ""


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """A classifier of the pooled vector. `activation` is sigmoid, softmax or identity.

    With `token_ids`, of a rejecting and an accepting token, it has one label: the logarithm of the second one's
    probability as the next token relative to the first one's.
    """

    labels: tuple[str, ...]
    activation: str
    token_ids: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class PoolingConfig:
    """`method` is one of METHODS: the hidden state of the last or of the first token, or the mean of all. `normalize`
    divides a vector by its Euclidean length. `score_template` is the text of a query and a document to be scored.
    """

    method: str = "last"
    normalize: bool = True
    head: HeadConfig | None = None
    prompts: Prompts = Prompts({})  # noqa: RUF009 - immutable
    score_template: str | None = None
    max_tokens: int | None = None
    is_encoder: bool = False

    @property
    def needs_whole_prompts(self) -> bool:
        """Whether a step must compute all tokens of a prompt: in a decoder only the last token's state needs no other
        token of the same step.
        """
        return self.is_encoder or self.method != "last"

    @property
    def reason_for_whole_prompts(self) -> str:
        """The reason why a step must compute them all, for display."""
        if self.is_encoder:
            return "the model is an encoder, whose tokens attend to the whole prompt"
        return f"the checkpoint's {self.method} pooling needs all tokens of a prompt in one step"

    @property
    def summary(self) -> str:
        """The engine's kind of result, for display."""
        if self.head is not None:
            count = len(self.head.labels)
            return "scores" if count == 1 else f"probabilities of {count} labels"
        source = {"last": "the last token", "mean": "the mean of all tokens", "cls": "the first token"}[self.method]
        length = "of length 1" if self.normalize else "as they are"
        is_uncached = self.needs_whole_prompts and not self.is_encoder
        return f"vectors from {source}, {length}{'; no prefix cache' if is_uncached else ''}"


def find_pooling(runner: str, asked: str | Mapping[str, Any] | None, model: ModelConfig) -> PoolingConfig | None:
    """Returns how an engine of this model pools; None if it generates.

    `runner` is one of RUNNERS, `asked` the engine argument `pooler_config`. Raises ConfigError if the checkpoint does
    not support it.
    """
    given = _parse(asked)
    path, architecture, raw = model.path, model.architecture, read_model_json(model.path)
    is_classifier, is_encoder = architecture.endswith(_CLASSIFIER), model.encoder is not None
    has_logits = not is_classifier and (not architecture.endswith("Model") or architecture.endswith("LMHeadModel"))
    has_logits = has_logits and not is_encoder
    if runner == "generate":
        if not has_logits:
            why = "is an encoder and generates nothing" if is_encoder else "has no output head"
            raise ConfigError(f"{path} holds a {architecture}, which {why}: use runner=pooling")
        if asked is not None:
            raise ConfigError("pooler_config needs an engine that pools, not runner=generate")
        return None
    if is_classifier and model.model_type == "modernbert":
        raise ConfigError(f"{path} holds a {architecture}, whose classifier is not supported: only its vectors are")
    if not is_classifier:
        _check_no_other_head(path, architecture, is_encoder)
    tokens = raw.get("classifier_from_token") if given.classifier_from_token is None else given.classifier_from_token
    modules = None if is_classifier or tokens is not None else read_modules(path)
    if runner == "auto" and has_logits and modules is None and tokens is None and asked is None:
        return None
    default = "cls" if is_encoder else "last"
    config = PoolingConfig(
        method=default if modules is None else modules.method,
        normalize=True if modules is None else modules.normalize,
        prompts=read_prompts(path),
        max_tokens=read_max_tokens(path),
        score_template=given.score_template or None,
        is_encoder=is_encoder,
        head=_find_head(raw, model, tokens, has_logits),
    )
    method = (given.pooling_type or config.method).lower()
    if given.score_template if config.head is None else given.normalize is not None:
        raise ConfigError("pooler_config: score_template needs a classifier (classifier_from_token), normalize vectors")
    if config.head is not None and method != default:
        raise ConfigError(f"pooling_type must be {default.upper()} for the classifier in {path}, got {method.upper()}")
    return replace(config, method=method, normalize=config.normalize if given.normalize is None else given.normalize)


def _find_head(raw: Mapping[str, Any], model: ModelConfig, tokens: Any, has_logits: bool) -> HeadConfig | None:
    """Returns the classifier of the checkpoint, or of two tokens; None for vectors. Raises ConfigError."""
    holds = f"{model.path} holds a {model.architecture}, "
    if model.architecture.endswith(_CLASSIFIER):
        if tokens is not None:
            raise ConfigError(holds + "which has a classifier: leave classifier_from_token out")
        return _read_head(model.path, raw)
    if tokens is None:
        return None
    if not has_logits or model.multipliers.logits_cap:
        what = "capped logits" if has_logits else "no output head"
        raise ConfigError(f"{holds}which has {what} for classifier_from_token")
    return HeadConfig(("score",), "sigmoid", _token_ids(model, tokens))


def _check_no_other_head(path: Path, architecture: str, is_encoder: bool) -> None:
    """Raises ConfigError for an architecture with a head that Penstock does not support."""
    if "Classification" in architecture or architecture.endswith("RewardModel"):
        raise ConfigError(f"{path} holds a {architecture}; the only classifiers supported are *{_CLASSIFIER}")
    if is_encoder and not architecture.endswith(("Model", _MASKED_LM)):
        raise ConfigError(f"{path} holds a {architecture}; encoders served: *Model, *{_MASKED_LM} and *{_CLASSIFIER}")


def _parse(asked: str | Mapping[str, Any] | None) -> _Options:
    """Returns the engine argument's options; null is the same as absent. Raises ConfigError."""
    given = read_object("pooler_config", {} if asked is None else asked)
    return convert_options(_Options, {k: v for k, v in given.items() if v is not None}, "in pooler_config")


def _read_head(path: Path, raw: Mapping[str, Any]) -> HeadConfig:
    """Reads the classifier of a `*ForSequenceClassification`; two labels if `config.json` names none."""
    names = _object(raw.get("id2label"))
    count = len(names) or raw.get("num_labels") or 2
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MAX_LABELS:
        raise ConfigError(f"num_labels must be an integer from 1 to {MAX_LABELS}, got {count!r}")
    labels = tuple(str(names.get(str(number), f"LABEL_{number}")) for number in range(count))
    return HeadConfig(labels, _read_activation(path, raw, count))


def _read_activation(path: Path, raw: Mapping[str, Any], count: int) -> str:
    """Reads the activation on the logits. A cross encoder of sentence-transformers names a class of PyTorch, since its
    version 5.4 in a file of its own.
    """
    stored = read_json(path / "config_sentence_transformers.json") or {}
    named = stored.get("activation_fn") or _object(raw.get("sentence_transformers")).get("activation_fn")
    named = named or raw.get("sbert_ce_default_activation_function")
    if named is not None:
        activation = _ACTIVATION_OF_CLASS.get(str(named).rpartition(".")[2])
        if activation is None:
            raise ConfigError(f"{path} names the activation {named!r}; supported: {', '.join(_ACTIVATION_OF_CLASS)}")
        return activation
    problem = raw.get("problem_type")
    activation = "softmax" if problem is None else _ACTIVATION_OF_PROBLEM.get(str(problem))
    if activation is None:
        raise ConfigError(f"{path} has problem_type {problem!r}; supported: {', '.join(_ACTIVATION_OF_PROBLEM)}")
    # The softmax of a single number is always 1.
    return "sigmoid" if activation == "softmax" and count == 1 else activation


def _token_ids(model: ModelConfig, tokens: Any) -> tuple[int, int]:
    """Returns the ids of two tokens, given as ids or as their spelling in `tokenizer.json`. Raises ConfigError."""
    pair: list[Any] = list(tokens) if isinstance(tokens, list | tuple) else []  # pyright: ignore[reportUnknownArgumentType]
    if len(pair) != 2:
        raise ConfigError(f'classifier_from_token must be two tokens, such as ["no", "yes"], got {tokens!r}')
    known = {} if not any(isinstance(token, str) for token in pair) else _read_vocabulary(model.path)
    found: list[Any] = [known.get(token) if isinstance(token, str) else token for token in pair]
    is_known = [type(token) is int and 0 <= token < model.vocab_size for token in found]
    if not all(is_known) or found[0] == found[1]:
        raise ConfigError(
            f"classifier_from_token must be two different tokens, as {model.path / 'tokenizer.json'} spells them or as "
            f"ids below {model.vocab_size}, got {tokens!r}"
        )
    return found[0], found[1]


def _read_vocabulary(path: Path) -> dict[str, Any]:
    """Returns spelling -> id of the tokens that `tokenizer.json` lists one by one."""
    raw = read_json(path / "tokenizer.json") or {}
    vocabulary = _object(_object(raw.get("model")).get("vocab"))
    added: Any = raw.get("added_tokens")
    tokens = [_object(token) for token in added] if isinstance(added, list) else []  # pyright: ignore[reportUnknownVariableType]
    return vocabulary | {str(token.get("content")): token.get("id") for token in tokens}


def _object(value: Any) -> dict[str, Any]:
    """Returns a JSON object, or an empty one in place of anything else."""
    return value if isinstance(value, dict) else {}  # pyright: ignore[reportUnknownVariableType]

"""sentence-transformers' files beside a checkpoint: how it pools, the prompts by name, the longest input.

`modules.json` lists the modules that process a text; the pooling module has a separate `config.json`.
`config_sentence_transformers.json` holds texts to put in front of inputs, by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.config.model import read_json
from penstock.utils.errors import ConfigError

METHODS = ("last", "mean", "cls")

_MODULES = ("Transformer", "Pooling", "Normalize")
_METHOD_FLAGS = {"pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
_METHOD_OF_NAME = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
_LENGTH_FILES = ("sentence_bert_config.json", "sentence_roberta_config.json", "sentence_xlm-roberta_config.json")


@dataclass(frozen=True, slots=True)
class Modules:
    """The pooling method, one of METHODS, and whether vectors are normalised."""

    method: str
    normalize: bool


@dataclass(frozen=True, slots=True)
class Prompts:
    """Texts to put in front of an input, by name; `default` names the one that is used unless another is requested."""

    texts: Mapping[str, str]
    default: str | None = None


def read_modules(path: Path) -> Modules | None:
    """Reads the checkpoint folder `path`; None if it has no `modules.json` and is not of a GGUF file that names a
    method (llama.cpp normalises its vectors). Raises ConfigError for unsupported modules.
    """
    file = path / "modules.json"
    if not file.is_file():
        method = (read_json(path / "config.json") or {}).get("gguf_pooling")
        return Modules(method, normalize=True) if method in METHODS else None
    try:
        found: Any = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not valid JSON: {error}") from None
    modules: list[Any] = found if isinstance(found, list) else [None]  # pyright: ignore[reportUnknownVariableType]
    if not all(isinstance(module, dict) and isinstance(module.get("type"), str) for module in modules):  # pyright: ignore[reportUnknownMemberType]
        raise ConfigError(f"{file} must hold a list of modules with a type each")
    kinds = [str(module["type"]).rpartition(".")[2] for module in modules]
    for kind in kinds:
        if kind not in _MODULES:
            raise ConfigError(f"{file} lists a module {kind!r}; supported: {', '.join(_MODULES)}")
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise ConfigError(
            f"{file} lists {', '.join(kinds) or 'no modules'}; supported: Transformer, Pooling and, after them, "
            "Normalize"
        )
    folder = path / str(modules[1].get("path", ""))
    return Modules(_read_method(folder / "config.json"), "Normalize" in kinds)


def _read_method(file: Path) -> str:
    """Returns the method in a pooling module's `config.json`. Raises ConfigError if it is not in METHODS."""
    raw = read_json(file)
    if raw is None:
        raise ConfigError(f"{file} is missing: modules.json refers to it")
    name = raw.get("pooling_mode")
    flags = [flag for flag, value in raw.items() if flag.startswith("pooling_mode_") and value is True]
    names = [str(name)] if name is not None else flags
    known = _METHOD_OF_NAME if name is not None else _METHOD_FLAGS
    if len(names) != 1 or names[0] not in known:
        raise ConfigError(
            f"{file} asks for {' and '.join(names) or 'no pooling mode'}; supported: one of lasttoken, mean_tokens, "
            "cls_token"
        )
    method = known[names[0]]
    if method != "last" and raw.get("include_prompt") is False:
        raise ConfigError(f"{file} leaves prompts out of the result (include_prompt is false), which is not supported")
    return method


def read_prompts(path: Path) -> Prompts:
    """Reads the checkpoint's prompts; empty texts do not count. Raises ConfigError if the file is malformed."""
    file = path / "config_sentence_transformers.json"
    raw = read_json(file) or {}
    texts: Any = raw.get("prompts") or {}
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        raise ConfigError(f"{file} must map the names of prompts to texts")
    default: Any = raw.get("default_prompt_name")
    if default is not None and (not isinstance(default, str) or default not in texts):
        raise ConfigError(f"{file} has default_prompt_name {default!r}, which is not in prompts")
    return Prompts({str(name): str(text) for name, text in texts.items()}, default)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


def read_max_tokens(path: Path) -> int | None:
    """Returns the longest input in tokens for which the checkpoint was trained; None if it does not say."""
    for name in _LENGTH_FILES:
        length = (read_json(path / name) or {}).get("max_seq_length")
        if isinstance(length, int) and not isinstance(length, bool) and length >= 2:
            return length
    return None

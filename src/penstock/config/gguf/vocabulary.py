"""A GGUF file's vocabulary as the contents of `tokenizer.json` and `tokenizer_config.json`.

llama.cpp stores a vocabulary by its model: "gpt2" is byte-level byte pair encoding with a list of merges and the name
of the rule that divides a text into words (`tokenizer.ggml.pre`); "llama" is that of SentencePiece, with scores, and
"gemma4" the same with a list of merges.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.config.gguf.file import GGUFFile
from penstock.utils.errors import ConfigError

# Token types of llama.cpp.
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6
_END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>")
_END_OF_TURN = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<turn|>", "<|observation|>")
# gpt-oss has these, and "<|end|>" between the messages of an answer.
_HARMONY = {"<|return|>", "<|call|>"}
# The chat templates by the names that `tokenizer_config.json` gives them.
_TEMPLATES = {"default": "tokenizer.chat_template", "tool_use": "tokenizer.chat_template.tool_use"}
_RENAMED = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}
# Tokens of Phi-3 that leave the spaces after them.
_KEEP_SPACES = ("<unk>", "<s>", "<|endoftext|>")
# Words of models whose prompts begin with a token for it.
_BEGINNING = ("llama-bpe", "llama3", "llama-v3", "lfm2", "tekken")
# Longer tokens are no words, and splitting one takes time that grows with the square of its length.
_MOST_CHARACTERS = 1024
_SPACE = "\u2581"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_AFTER_WORDS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# The words of a text, as the families' own tokenizers divide it: numbers of up to three digits, or single digits.
_BY_THREE = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _AFTER_WORDS
_BY_DIGIT = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _AFTER_WORDS
# The same with marks as parts of words.
_BY_DIGIT_WITH_MARKS = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LOWER, _UPPER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"


def _by_case(contractions: str, numbers: str) -> str:
    """The words of GPT-4o and others: a word ends before an upper-case letter that follows a lower-case one."""
    before = r"[^\r\n\p{L}\p{N}]?"
    words = f"{before}{_UPPER}*{_LOWER}+{contractions}|{before}{_UPPER}+{_LOWER}*{contractions}"
    return words + rf"|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


_CASED = r"[[\p{Lu}\p{Ll}\p{Lt}]&&[^" + "\u10d0-\u10ff]]"
_IDEOGRAPHS, _KANA = "\u4e00-\u9fa5", "\u3040-\u309f\u30a0-\u30ff"
# Letters, and punctuation with the letters after it; of DeepSeek-V3.
_LETTERS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_HANGUL = "\uac00-\ud7a3\u3131-\u318e"
_PUNCTUATION = "\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f"


@dataclass(frozen=True, slots=True)
class _Words:
    """How a vocabulary divides a text: by one pattern after another, and with `is_gpt2` as GPT-2 does. `is_normalized`:
    in the form NFC. `takes_whole`: a word that is a token is not merged from its parts.
    """

    patterns: tuple[str, ...] = ()
    is_gpt2: bool = False
    is_normalized: bool = False
    takes_whole: bool = False


# tokenizer.ggml.pre -> the words.
_WORDS = {
    # smaug-bpe: SmolLM3.
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "smaug-bpe", "lfm2"), _Words((_BY_THREE,), takes_whole=True)),
    # deepseek-r1-qwen: DeepSeek-R1's distillations into Qwen2.5, whose vocabulary differs in special tokens alone.
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _Words((_BY_DIGIT,), is_normalized=True)),
    "qwen35": _Words((_BY_DIGIT_WITH_MARKS,), is_normalized=True),
    # dbrx: OLMo 2, Phi-4.
    **dict.fromkeys(("dbrx", "glm4", "chatglm-bpe"), _Words((_BY_THREE,))),
    "gpt-4o": _Words((_by_case(rf"{_CONTRACTIONS}?", r"\p{N}{1,3}"),)),  # gpt-oss, Phi-4-mini
    "tekken": _Words((_by_case("", r"\p{N}"),), takes_whole=True),  # Mistral
    "gpt-2": _Words(is_gpt2=True),
    "exaone4": _Words(is_gpt2=True),
    # refact: Granite 3.
    **dict.fromkeys(("refact", "smollm"), _Words((r"\p{N}",), is_gpt2=True)),
    "command-r": _Words((r"\p{N}",), is_gpt2=True, is_normalized=True),
    "deepseek-llm": _Words(
        (
            r"[\r\n]",
            rf"\s?{_CASED}+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            "[\u0800-\u9fa5\uac00-\ud7ff]+",
            r"\p{N}+",
        )
    ),
    "deepseek-v3": _Words((r"\p{N}{1,3}", f"[{_IDEOGRAPHS}{_KANA}]+", _LETTERS)),
    "youtu": _Words(
        (
            f"[{_HANGUL}]+|[{_PUNCTUATION}]+|[\u3105-\u312f]+|[{_IDEOGRAPHS}{_KANA}]+",
            _by_case(rf"{_CONTRACTIONS}?", r"\p{N}"),
        ),
        takes_whole=True,
    ),
}


def read_tokenizer(file: GGUFFile) -> dict[str, Any]:
    """Returns the contents of `tokenizer.json`. Raises ConfigError if the vocabulary is of a kind that is not read."""
    model = file.metadata.get("tokenizer.ggml.model")
    try:
        if model == "gpt2":
            return _byte_pairs(file)
        if model in ("llama", "gemma4"):
            return _sentence_pieces(file)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{file.path}: its vocabulary cannot be read: {error}") from None
    raise ConfigError(
        f"{file.path}: tokenizer.ggml.model is {model!r}, and Penstock reads gpt2, llama and gemma4: pass --tokenizer "
        "FOLDER with the model's tokenizer.json"
    )


def read_tokenizer_config(file: GGUFFile) -> dict[str, Any]:
    """Returns the contents of `tokenizer_config.json`: the chat templates, and the special tokens by name."""
    tokens = _tokens(file)
    named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    config: dict[str, Any] = {"add_eos_token": file.metadata.get("tokenizer.ggml.add_eos_token") is True}
    for name, stored in named.items():
        number = file.metadata.get(f"tokenizer.ggml.{stored}_token_id")
        if isinstance(number, int) and 0 <= number < len(tokens):
            config[name] = tokens[number]
    stored = ((name, file.metadata.get(key)) for name, key in _TEMPLATES.items())
    templates = [{"name": name, "template": text} for name, text in stored if isinstance(text, str)]
    return config | ({"chat_template": templates} if templates else {})


def read_sampling(file: GGUFFile) -> dict[str, Any]:
    """Returns the sampling that the model's authors recommend, as in `generation_config.json`."""
    found = {name: file.metadata.get(f"general.sampling.{name}") for name in (*_RENAMED, "top_k", "top_p", "min_p")}
    return {_RENAMED.get(name, name): value for name, value in found.items() if value is not None}


def end_tokens(file: GGUFFile) -> list[int]:
    """Returns the ids of the tokens that end an answer."""
    named = (file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    tokens = _tokens(file)
    # Files do not name all of them, so llama.cpp knows them by their text.
    ends = {*_END_OF_TEXT, *_END_OF_TURN, *_HARMONY} - ({"<|end|>"} if set(tokens) >= _HARMONY else set())
    typed = enumerate(zip(tokens, _types(file, tokens), strict=True))
    spelled = (number for number, (token, kind) in typed if kind == _CONTROL and token in ends)
    return sorted({*(number for number in named if isinstance(number, int)), *spelled})


def _tokens(file: GGUFFile) -> list[str]:
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):  # pyright: ignore[reportUnknownVariableType]
        raise ConfigError(
            f"{file.path} has no vocabulary (tokenizer.ggml.tokens): pass --tokenizer FOLDER with the model's "
            "tokenizer.json"
        )
    return tokens  # pyright: ignore[reportUnknownVariableType]


def _byte_pairs(file: GGUFFile) -> dict[str, Any]:
    words = file.metadata.get("tokenizer.ggml.pre")
    if not isinstance(words, str) or words not in _WORDS:
        raise ConfigError(
            f"{file.path}: tokenizer.ggml.pre is {words!r}, and Penstock reads {', '.join(_WORDS)}: pass --tokenizer "
            "FOLDER with the model's tokenizer.json"
        )
    rule, merges, tokens = _WORDS[words], _merges(file), _tokens(file)
    return {
        "version": "1.0",
        "added_tokens": _added_tokens(file, tokens),
        "normalizer": {"type": "NFC"} if rule.is_normalized else None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                *(
                    {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
                    for pattern in rule.patterns
                ),
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": rule.is_gpt2},
            ],
        },
        "post_processor": _post_processor(file, tokens),
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "model": {"type": "BPE", "vocab": _vocabulary(tokens), "merges": merges, "ignore_merges": rule.takes_whole},
    }


def _sentence_pieces(file: GGUFFile) -> dict[str, Any]:
    """SentencePiece's byte pairs (Kudo and Richardson 2018, arXiv:1808.06226): of two tokens that are neighbours those
    are merged whose union has the highest score, or that are first in the file's list.
    """
    tokens = _tokens(file)
    types = _types(file, tokens)
    is_ranked = file.metadata["tokenizer.ggml.model"] == "gemma4"
    merges = _merges(file) if is_ranked else _merges_by_score(file, tokens, types)
    prepends = file.metadata.get("tokenizer.ggml.add_space_prefix", True)
    replace_spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prepends else []
    return {
        "version": "1.0",
        "added_tokens": _added_tokens(file, tokens),
        "normalizer": {
            "type": "Sequence",
            "normalizers": [*([{"type": "Prepend", "prepend": _SPACE}] if prepends else []), replace_spaces],
        },
        "pre_tokenizer": None,
        "post_processor": _post_processor(file, tokens),
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *strip,
            ],
        },
        "model": {
            "type": "BPE",
            "vocab": _vocabulary(tokens),
            "merges": merges,
            "unk_token": next((tokens[n] for n, kind in enumerate(types) if kind == _UNKNOWN), None),
            "fuse_unk": True,
            "byte_fallback": True,
        },
    }


def _merges(file: GGUFFile) -> list[Any]:
    merges = file.metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise ConfigError(f"{file.path} has no tokenizer.ggml.merges: it is damaged")
    return merges  # pyright: ignore[reportUnknownVariableType]


def _merges_by_score(file: GGUFFile, tokens: Sequence[str], types: Sequence[int]) -> list[list[str]]:
    scores = _numbers(file, "scores")
    if len(scores) != len(tokens):
        raise ConfigError(f"{file.path} has no score for every token (tokenizer.ggml.scores): it is damaged")
    vocabulary = _vocabulary(tokens)
    ranked = [number for _, number in sorted((-score, number) for number, score in enumerate(scores))]
    merges: list[list[str]] = []
    for number in ranked:
        token = tokens[number]
        if types[number] not in (_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE) and len(token) <= _MOST_CHARACTERS:
            splits = ((token[:at], token[at:]) for at in range(1, len(token)))
            known = [(vocabulary[a], vocabulary[b]) for a, b in splits if a in vocabulary and b in vocabulary]
            merges += [[tokens[a], tokens[b]] for a, b in sorted(known)]
    return merges


def _vocabulary(tokens: Sequence[str]) -> dict[str, int]:
    """The first of equal tokens counts; others are padding of the embedding."""
    vocabulary: dict[str, int] = {}
    for number, token in enumerate(tokens):
        vocabulary.setdefault(token, number)
    return vocabulary


def _types(file: GGUFFile, tokens: Sequence[str]) -> Sequence[int]:
    types = _numbers(file, "token_type")
    if len(types) != len(tokens):
        raise ConfigError(f"{file.path} has no type for every token (tokenizer.ggml.token_type): it is damaged")
    return types


def _numbers(file: GGUFFile, name: str) -> list[Any]:
    """Returns a list of numbers, empty if there is none."""
    found = file.metadata.get(f"tokenizer.ggml.{name}")
    return found.tolist() if isinstance(found, np.ndarray) else []


def _added_tokens(file: GGUFFile, tokens: Sequence[str]) -> list[dict[str, Any]]:
    flags = {"single_word": False, "lstrip": False, "normalized": False}
    # Tokens of Phi-3 take the spaces after them, which a file does not say.
    strips = file.metadata["tokenizer.ggml.model"] == "llama" and file.metadata["general.architecture"] == "phi3"
    return [
        flags
        | {"id": number, "content": token, "special": kind != _USER_DEFINED}
        | {"rstrip": strips and token not in _KEEP_SPACES}
        for number, (token, kind) in enumerate(zip(tokens, _types(file, tokens), strict=True))
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]


def _post_processor(file: GGUFFile, tokens: Sequence[str]) -> dict[str, Any] | None:
    """A prompt begins with the token for it, if the file says so."""
    metadata = file.metadata
    begins = metadata["tokenizer.ggml.model"] == "llama" or metadata.get("tokenizer.ggml.pre") in _BEGINNING
    begins = metadata.get("tokenizer.ggml.add_bos_token", begins)
    number = metadata.get("tokenizer.ggml.bos_token_id")
    if not begins or not isinstance(number, int) or not 0 <= number < len(tokens):
        return None
    bos = tokens[number]
    special, text = {"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [special, text],
        "pair": [special, text, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {bos: {"id": bos, "ids": [number], "tokens": [bos]}},
    }

"""A GGUF file's vocabulary as the contents of `tokenizer.json` and `tokenizer_config.json`.

llama.cpp stores a vocabulary by its model: "gpt2" is byte-level byte pair encoding with a list of merges and the name
of the rule that divides a text into words (`tokenizer.ggml.pre`); "llama" is that of SentencePiece, with scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.config.gguf.file import GGUFFile
from penstock.utils.errors import ConfigError

# Token types of llama.cpp.
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6
_END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")
_BEGINNING = ("llama-bpe", "llama3", "llama-v3")  # words of models whose prompts begin with a token for it
# Longer tokens are no words, and splitting one takes time that grows with the square of its length.
_MOST_CHARACTERS = 1024
_SPACE = "\u2581"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_AFTER_WORDS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# The words of a text, as the families' own tokenizers divide it: numbers of up to three digits, or single digits.
_BY_THREE = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _AFTER_WORDS
_BY_DIGIT = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _AFTER_WORDS
# tokenizer.ggml.pre -> the pattern, and whether texts are normalized (NFC).
_WORDS = {
    "llama-bpe": (_BY_THREE, False),
    "llama3": (_BY_THREE, False),
    "llama-v3": (_BY_THREE, False),
    "qwen2": (_BY_DIGIT, True),
}


def read_tokenizer(file: GGUFFile) -> dict[str, Any]:
    """Returns the contents of `tokenizer.json`. Raises ConfigError if the vocabulary is of a kind that is not read."""
    model = file.metadata.get("tokenizer.ggml.model")
    try:
        if model == "gpt2":
            return _byte_pairs(file)
        if model == "llama":
            return _sentence_pieces(file)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{file.path}: its vocabulary cannot be read: {error}") from None
    raise ConfigError(
        f"{file.path}: tokenizer.ggml.model is {model!r}, and Penstock reads gpt2 and llama: pass --tokenizer FOLDER "
        "with the model's tokenizer.json"
    )


def read_tokenizer_config(file: GGUFFile) -> dict[str, Any]:
    """Returns the contents of `tokenizer_config.json`: the chat template, and the special tokens by name."""
    tokens = _tokens(file)
    named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    config: dict[str, Any] = {}
    for name, stored in named.items():
        number = file.metadata.get(f"tokenizer.ggml.{stored}_token_id")
        if isinstance(number, int) and 0 <= number < len(tokens):
            config[name] = tokens[number]
    template = file.metadata.get("tokenizer.chat_template")
    return config | ({"chat_template": template} if isinstance(template, str) else {})


def end_tokens(file: GGUFFile) -> list[int]:
    """Returns the ids of the tokens that end an answer."""
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    named = (file.metadata.get(f"tokenizer.ggml.{name}") for name in names)
    tokens = _tokens(file)
    # Files do not name all of them, so llama.cpp knows them by their text.
    spelled = (
        number
        for number, (token, kind) in enumerate(zip(tokens, _types(file, tokens), strict=True))
        if kind == _CONTROL and token in _END_TOKENS
    )
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
    pattern, is_normalized = _WORDS[words]
    merges = file.metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise ConfigError(f"{file.path} has no tokenizer.ggml.merges: it is damaged")
    tokens = _tokens(file)
    return {
        "version": "1.0",
        "added_tokens": _added_tokens(file, tokens),
        "normalizer": {"type": "NFC"} if is_normalized else None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
            ],
        },
        "post_processor": _post_processor(file, tokens),
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "model": {
            "type": "BPE",
            "vocab": _vocabulary(tokens),
            "merges": merges,
            # Llama 3 takes a word that is a token before it merges.
            "ignore_merges": pattern == _BY_THREE,
        },
    }


def _sentence_pieces(file: GGUFFile) -> dict[str, Any]:
    """SentencePiece's byte pairs (Kudo and Richardson 2018, arXiv:1808.06226): of two tokens that are neighbours those
    are merged whose union has the highest score.
    """
    tokens = _tokens(file)
    scores = _numbers(file, "scores")
    if len(scores) != len(tokens):
        raise ConfigError(f"{file.path} has no score for every token (tokenizer.ggml.scores): it is damaged")
    types = _types(file, tokens)
    vocabulary = _vocabulary(tokens)
    ranked = [number for _, number in sorted((-score, number) for number, score in enumerate(scores))]
    merges: list[list[str]] = []
    for number in ranked:
        token = tokens[number]
        if types[number] not in (_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE) and len(token) <= _MOST_CHARACTERS:
            splits = ((token[:at], token[at:]) for at in range(1, len(token)))
            known = [(vocabulary[a], vocabulary[b]) for a, b in splits if a in vocabulary and b in vocabulary]
            merges += [[tokens[a], tokens[b]] for a, b in sorted(known)]
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
            "vocab": vocabulary,
            "merges": merges,
            "unk_token": next((tokens[n] for n, kind in enumerate(types) if kind == _UNKNOWN), None),
            "fuse_unk": True,
            "byte_fallback": True,
        },
    }


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
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": number, "content": tokens[number], **flags, "special": kind != _USER_DEFINED}
        for number, kind in enumerate(_types(file, tokens))
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

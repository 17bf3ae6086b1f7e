"""A lower bound of a text's number of tokens from its length alone, so that a text that is far too long is never
tokenized.

The bound follows from the longest token in bytes. It holds only for a tokenizer that keeps every character of a text.
For others, whose normalizers, splits or unknown tokens drop characters, `find_text_bound` returns None.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers

# By how much a normalizer can shrink a text, in bytes of UTF-8: 𝐀 (4 bytes) becomes A, three Hangul letters (9) one
# syllable (3). None of them changes the length of ASCII text.
_SHRINKING = {"NFC": 4, "NFD": 4, "NFKC": 4, "NFKD": 4, "Lowercase": 4, "Prepend": 1, "ByteLevel": 1}
# Some of them have a behavior, which may be to remove what they find.
_KEEPING_SPLITS = ("ByteLevel", "Digits", "Metaspace", "Punctuation", "Split", "UnicodeScripts")
_MAX_CHARACTER_BYTES = 4
_WHITESPACE = tuple(chr(code) for code in range(0x3001) if chr(code).isspace())


@dataclass(frozen=True, slots=True)
class TextBound:
    """Every `bytes_per_token` bytes of UTF-8 become at least one token; `shrinking` times as many if they are not
    ASCII. `drops_whitespace`: special tokens remove the whitespace next to them.
    """

    bytes_per_token: int
    shrinking: int
    drops_whitespace: bool

    def min_tokens(self, text: str) -> int:
        """Returns the minimum number of tokens of this text, without those that the tokenizer adds."""
        is_ascii = text.isascii()
        size = len(text) if is_ascii else len(text.encode("utf-8", "replace")) // self.shrinking
        if self.drops_whitespace:
            size -= sum(text.count(space) * len(space.encode()) for space in _WHITESPACE)
        return max(0, size) // self.bytes_per_token


def find_text_bound(backend: tokenizers.Tokenizer) -> TextBound | None:
    """Returns the bound of a tokenizer; None if there is none."""
    config: dict[str, Any] = json.loads(backend.to_str())
    steps = list(_steps(config.get("pre_tokenizer"), "pretokenizers"))
    normalizers = list(_steps(config.get("normalizer"), "normalizers"))
    model: Mapping[str, Any] = config["model"]
    is_byte_level = any(step["type"] == "ByteLevel" for step in (*steps, *normalizers))
    factors = [factor for factor in map(_shrinking, normalizers) if factor is not None]
    keeps_text = len(factors) == len(normalizers) and all(map(_keeps_text, steps))
    if not keeps_text or not _spells_everything(model, is_byte_level):
        return None
    pieces = backend.get_vocab(with_added_tokens=False)
    # A byte-level vocabulary represents each byte as one character.
    sizes = [len(piece) if is_byte_level else len(piece.encode()) for piece in pieces]
    added = config.get("added_tokens") or []
    sizes += [len(token["content"].encode()) for token in added]
    drops_whitespace = any(token.get("lstrip") or token.get("rstrip") for token in added)
    return TextBound(max(_MAX_CHARACTER_BYTES, *sizes), math.prod(factors), drops_whitespace)


def _steps(step: Mapping[str, Any] | None, parts: str) -> Iterator[Mapping[str, Any]]:
    """Returns a normalizer or pre-tokenizer, or the elements of a sequence of them."""
    if step is not None and step["type"] == "Sequence":
        for part in step[parts]:
            yield from _steps(part, parts)
    elif step is not None:
        yield step


def _keeps_text(step: Mapping[str, Any]) -> bool:
    """Whether a pre-tokenizer drops no characters."""
    return step["type"] in _KEEPING_SPLITS and step.get("behavior") != "Removed"


def _shrinking(step: Mapping[str, Any]) -> int | None:
    """Returns the factor by which a normalizer can shrink a text that is not ASCII; None if unbounded."""
    if step["type"] == "Replace":
        pattern = step["pattern"].get("String")
        keeps = pattern is not None and len(step["content"].encode()) >= len(pattern.encode())
        return 1 if keeps else None
    return _SHRINKING.get(step["type"])


def _spells_everything(model: Mapping[str, Any], is_byte_level: bool) -> bool:
    """Whether every character becomes part of a token, and no run of unknown ones becomes a single token."""
    if model["type"] not in ("BPE", "Unigram"):
        return False
    vocabulary = model["vocab"]
    known = set(vocabulary) if isinstance(vocabulary, Mapping) else {entry[0] for entry in vocabulary}
    if is_byte_level and model["type"] == "BPE":
        return sum(len(piece) == 1 for piece in known) >= 256
    if model.get("byte_fallback"):
        return all(f"<0x{byte:02X}>" in known for byte in range(256))
    return model["type"] == "BPE" and model.get("unk_token") is not None and not model.get("fuse_unk")

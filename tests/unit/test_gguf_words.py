"""The vocabularies of GGUF files divide a text into the words of the model's own tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from penstock.config.gguf.folder import unpack_gguf
from tests.unit.test_gguf import SHAPE, embedding, write

TEXT = "I'll ABCdef's GetURLs 12345 \u0416\u0438 \u6771\u30bf \u10e5\u10d0 x=1;\n\n  end \ud55c\uad6d"
DIGITS = ["1", "2", "3", "4", "5"]
# What follows the number; words with the space before them.
LETTERS = [" \u0416\u0438", " \u6771\u30bf", " \u10e5\u10d0", " x", "=", "1"]
END = [";\n\n", " ", " end", " \ud55c\uad6d"]
GPT2_END = [";", "\n\n ", " end", " \ud55c\uad6d"]
PLAIN = ["I", "'ll", " ABCdef", "'s", " GetURLs"]
CASED = ["I'll", " ABCdef's", " Get", "URLs"]
WORDS = {
    "smaug-bpe": [*PLAIN, " ", "123", "45", *LETTERS, *END],
    # As "qwen2".
    "deepseek-r1-qwen": [*PLAIN, " ", *DIGITS, *LETTERS, *END],
    "dbrx": [*PLAIN, " ", "123", "45", *LETTERS, *END],
    "glm4": [*PLAIN, " ", "123", "45", *LETTERS, *END],
    "gpt-4o": [*CASED, " ", "123", "45", *LETTERS, *END],
    "tekken": ["I", "'ll", " ABCdef", "'s", " Get", "URLs", " ", *DIGITS, *LETTERS, *END],
    "exaone4": [*PLAIN, " 12345", *LETTERS, *GPT2_END],
    "refact": [*PLAIN, " ", *DIGITS, *LETTERS, *GPT2_END],
    "command-r": [*PLAIN, " ", *DIGITS, *LETTERS, *GPT2_END],
    "deepseek-llm": [
        *("I", "'", "ll", " ABCdef", "'", "s", " GetURLs", " ", "12345", " \u0416\u0438", " ", "\u6771\u30bf", " "),
        *("\u10e5\u10d0", " x", "=", "1", ";", "\n", "\n", " ", " end", " ", "\ud55c\uad6d"),
    ],
    "deepseek-v3": [*PLAIN, " ", "123", "45", LETTERS[0], " ", "\u6771\u30bf", *LETTERS[2:], *END],
    "youtu": [*CASED, " ", *DIGITS, LETTERS[0], " ", "\u6771\u30bf", *LETTERS[2:], *END[:3], " ", "\ud55c\uad6d"],
}


def vocabulary(pre: str, tokens: list[str], kinds: list[int]) -> dict[str, Any]:
    return {
        "tokenizer__ggml__model": "gpt2",
        "tokenizer__ggml__pre": pre,
        "tokenizer__ggml__tokens": tokens,
        "tokenizer__ggml__token_type": kinds,
        "tokenizer__ggml__merges": ["a b"],
        "tokenizer__ggml__eos_token_id": 0,
    }


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("pre", WORDS)
def test_words(pre: str, tmp_path: Path) -> None:
    write(tmp_path / "a.gguf", embedding(3), **SHAPE, **vocabulary(pre, ["a", "b", "ab"], [1, 1, 1]))
    tokenizer = tokenizers.Tokenizer.from_file(str(unpack_gguf(tmp_path / "a.gguf") / "tokenizer.json"))
    divider: Any = tokenizer.pre_tokenizer
    assert [TEXT[first:end] for _, (first, end) in divider.pre_tokenize_str(TEXT)] == WORDS[pre]


@pytest.mark.parametrize(("other", "ends"), [("<|call|>", [0, 2, 3]), ("b", [0, 2, 4])])
def test_a_message_of_an_answer_is_not_its_end(other: str, ends: list[int], tmp_path: Path) -> None:
    """gpt-oss ends the messages of an answer with the token that ends the answers of others."""
    tokens = ["a", "ab", "<|return|>", other, "<|end|>"]
    write(tmp_path / "a.gguf", embedding(5), **SHAPE, **vocabulary("gpt-4o", tokens, [1, 1, 3, 3, 3]))
    folder = unpack_gguf(tmp_path / "a.gguf")
    assert json.loads((folder / "generation_config.json").read_text()) == {"eos_token_id": ends}

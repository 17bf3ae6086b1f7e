"""The bound on a text's tokens never exceeds the true number; tokenizers that drop characters have no bound."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock.tokenizer.text_bound import find_text_bound
from penstock.tokenizer.tokenizer import LARGE_CHARACTERS, Tokenizer
from penstock.utils.errors import RequestError

DEMO = Path(penstock.__file__).parent / "demo"
FILE = DEMO / "tokenizer.json"
MAX_TOKENS = 2048

NFKC = {"type": "Sequence", "normalizers": [{"type": "NFKC"}, {"type": "Lowercase"}]}
WHOLE_LINES = {"type": "Split", "pattern": {"String": "\n"}, "behavior": "Isolated", "invert": False}


def _changed(**parts: Any) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(json.dumps({**json.loads(FILE.read_text(encoding="utf-8")), **parts}))


def _stripping() -> tokenizers.Tokenizer:
    added = json.loads(FILE.read_text(encoding="utf-8"))["added_tokens"]
    return _changed(added_tokens=[{**token, "lstrip": True, "rstrip": True} for token in added])


SOUND = {
    "as it is": _changed(),
    "with a normalizer": _changed(normalizer=NFKC),
    "with tokens that swallow whitespace": _stripping(),
}
TEXTS = st.lists(
    st.sampled_from(
        [
            " " * 60,
            "\n",
            "+" + "-" * 60,
            "the",
            " fox",
            "7",
            "<|im_end|>",
            "é",
            "한",
            "ᄒ",
            "ᅡ",
            "ᆫ",
            "𝐀",
            "\u212a",
            "\u3000",
        ]
    ),
    max_size=40,
).map("".join)


@pytest.mark.spread(1)
@pytest.mark.parametrize("kind", SOUND)
@given(text=TEXTS | st.text(st.characters(exclude_categories=("Cs",)), max_size=60))
@settings(max_examples=150)
def test_no_text_has_fewer_tokens_than_its_bound(kind: str, text: str) -> None:
    bound = find_text_bound(SOUND[kind])
    assert bound is not None
    assert bound.min_tokens(text) <= len(SOUND[kind].encode(text, add_special_tokens=False).ids)


def test_the_bound_is_met_by_the_longest_token() -> None:
    bound = find_text_bound(SOUND["as it is"])
    assert bound is not None
    texts = (SOUND["as it is"].decode([token]) for token in range(SOUND["as it is"].get_vocab_size()))
    longest = max(texts, key=len)
    assert (bound.bytes_per_token, bound.min_tokens(longest)) == (len(longest), 1)


def _model(**fields: Any) -> dict[str, Any]:
    return {"type": "BPE", "vocab": {"a": 0, "?": 1}, "merges": [], **fields}


BYTES = {f"<0x{byte:02X}>": byte + 2 for byte in range(256)}


@pytest.mark.parametrize(
    ("parts", "has_bound"),
    [
        ({"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}}, False),
        ({"normalizer": {"type": "Replace", "pattern": {"String": "  "}, "content": " "}}, False),
        ({"normalizer": {"type": "Replace", "pattern": {"Regex": " +"}, "content": "   "}}, False),
        ({"normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}}, True),
        ({"pre_tokenizer": {"type": "WhitespaceSplit"}, "model": _model(unk_token="?")}, False),
        ({"pre_tokenizer": {**WHOLE_LINES, "behavior": "Removed"}, "model": _model(unk_token="?")}, False),
        ({"pre_tokenizer": WHOLE_LINES, "model": _model(unk_token="?")}, True),
        ({"pre_tokenizer": None, "model": _model()}, False),
        ({"pre_tokenizer": None, "model": _model(unk_token="?", fuse_unk=True)}, False),
        ({"pre_tokenizer": None, "model": _model(vocab={"a": 0, "?": 1, **BYTES}, byte_fallback=True)}, True),
        ({"model": _model(unk_token="?")}, False),
    ],
)
def test_tokenizers_that_drop_text_have_no_bound(parts: dict[str, Any], has_bound: bool) -> None:
    assert (find_text_bound(_changed(**parts, added_tokens=[])) is not None) == has_bound


def test_normalizers_shrink_a_text_one_after_another() -> None:
    steps = [{"type": "NFC"}, {"type": "Prepend", "prepend": "▁"}, {"type": "Lowercase"}]
    bound = find_text_bound(_changed(normalizer={"type": "Sequence", "normalizers": steps}, added_tokens=[]))
    assert bound is not None
    assert bound.shrinking == 16


def test_a_text_that_is_far_too_long_is_refused_before_it_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(DEMO, 4096, MAX_TOKENS)
    text = "a fox " * LARGE_CHARACTERS
    with monkeypatch.context() as patch:
        patch.setattr(tokenizer, "backend", None)
        with pytest.raises(RequestError, match=r"has 1572864 characters.* max_model_len=2048") as caught:
            tokenizer.encode(text)
        assert caught.value.code == "context_length_exceeded"
        with pytest.raises(RequestError, match="characters"):
            tokenizer.apply_chat_template([{"role": "user", "content": text}])
    assert len(tokenizer.encode("a fox " * 2000)) > MAX_TOKENS, "a shorter text is tokenized"
    assert len(Tokenizer(DEMO, 4096).encode(text)) > MAX_TOKENS, "without a bound it is tokenized"

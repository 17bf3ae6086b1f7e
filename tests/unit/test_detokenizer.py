"""Streamed text: only whole characters, stop strings across token boundaries, and no text that is later withdrawn."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders

from penstock.config.engine import EngineArgs, resolve
from penstock.frontend.detokenizer import Detokenizer
from penstock.grammar.llguidance_backend import LLGuidanceBackend
from penstock.messages.sampling_params import SamplingParams
from penstock.tokenizer.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    config = resolve(EngineArgs())
    return Tokenizer(config.model.path, config.model.vocab_size)


def feed(tokenizer: Tokenizer, token_ids: list[int], **params: Any) -> tuple[str, str | None, int, list[str]]:
    """Returns the final text, the stop string, the number of tokens consumed, and the stable text after each token."""
    detokenizer = Detokenizer(tokenizer, [], SamplingParams(max_tokens=None, **params))
    shown = []
    for count, token_id in enumerate(token_ids, start=1):
        stop = detokenizer.append(token_id)
        shown.append(detokenizer.stable_text(stop is not None))
        if stop is not None:
            return detokenizer.text, stop, count, shown
    return detokenizer.stable_text(True), None, len(token_ids), shown


def assert_grows(shown: list[str], final: str) -> None:
    for before, after in zip(shown, [*shown[1:], final], strict=True):
        assert after.startswith(before), "text that was shown has changed"


@pytest.mark.parametrize("text", ["naïve café", "日本語のテキスト", "👩‍👩‍👧 and 🏳️‍🌈!", "a\n\n  b\t", "Zoë → 𝔘"])
def test_only_whole_characters_are_shown(tokenizer: Tokenizer, text: str) -> None:
    token_ids = tokenizer.encode(text)
    final, _, _, shown = feed(tokenizer, token_ids)
    assert final == text
    assert_grows(shown, final)
    assert all("\ufffd" not in each for each in shown)


def test_added_tokens_that_the_model_lacks_are_text(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Gemma 3's text models have one more token in the file than in their vocabulary, for images."""
    stored = json.loads(tokenizer.backend.to_str())
    size, eos = tokenizer.backend.get_vocab_size(), tokenizer.eos_token_id
    stored["added_tokens"].append({**stored["added_tokens"][0], "id": size, "content": "<image>"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(stored))
    found = Tokenizer(tmp_path, size)
    assert found.backend.get_vocab_size() == size
    assert "<image>" not in found.added_tokens
    token_ids = found.encode("an <image>")
    assert max(token_ids) < size
    assert found.decode(token_ids) == "an <image>"
    assert eos is not None
    LLGuidanceBackend(found.backend.to_str(), size, [eos])


def test_an_incomplete_character_at_the_end_is_dropped(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("ok 👍")
    assert len(token_ids) > 3
    for cut in range(len(token_ids) - 3, len(token_ids)):
        final = feed(tokenizer, token_ids[:cut])[0]
        assert "\ufffd" not in final
        assert "ok 👍".startswith(final)


def test_a_prompt_that_ends_inside_a_character_is_not_repeated(tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("my good old friend \ufffd")
    thumb = tokenizer.encode("👍")
    for cut in range(len(thumb)):
        detokenizer = Detokenizer(tokenizer, prompt + thumb[:cut], SamplingParams())
        for token_id in tokenizer.encode("fine"):
            detokenizer.append(token_id)
        assert "friend" not in detokenizer.text


def test_random_tokens_never_fail(tokenizer: Tokenizer) -> None:
    rng = random.Random(0)
    for _ in range(50):
        token_ids = [rng.randrange(4096) for _ in range(60)]
        final, _, _, shown = feed(tokenizer, token_ids, skip_special_tokens=rng.random() < 0.5)
        assert_grows(shown, final)


def test_the_cost_is_linear_in_tokens_without_text(tokenizer: Tokenizer) -> None:
    """Special tokens and incomplete bytes: the library decodes all those since the last text in every step."""
    special, byte = min(tokenizer.special_tokens), tokenizer.encode("👍")[-1]
    hello = tokenizer.encode(" hello")
    for silent, shown in ((special, False), (byte, True)):
        begin = time.perf_counter()
        final = feed(tokenizer, [*hello, *[silent] * 30_000, *hello])[0]
        assert time.perf_counter() - begin < 10
        assert final.startswith(" hello")
        assert final.endswith(" hello")
        assert final.strip(" helo") == ("\ufffd" * 30_000 if shown else "")


def test_a_character_is_complete_after_skipped_tokens(tokenizer: Tokenizer) -> None:
    thumb = tokenizer.encode("👍")
    special = min(tokenizer.special_tokens)
    assert feed(tokenizer, [*thumb[:-1], *[special] * 40, *thumb[-1:]])[0] == "👍"


def test_bytes_after_a_character_that_complete_none_are_shown(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With byte fallback they make the library decode the character before them anew, and raise an exception."""
    words = ["▁the", "▁end"]
    vocabulary = {piece: number for number, piece in enumerate([*(f"<0x{byte:02X}>" for byte in range(256)), *words])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)  # Llama 2's
    monkeypatch.setattr(tokenizer, "backend", backend)
    thumb = list("👍".encode())
    token_ids = [256, *thumb, *thumb[:2], 256, 257]
    final, _, _, shown = feed(tokenizer, token_ids)
    assert final == "the👍\ufffd\ufffd the end"
    assert_grows(shown, final)


def test_stop_strings_are_found_across_tokens(tokenizer: Tokenizer) -> None:
    text = "The quick brown fox jumps over the lazy dog."
    token_ids = tokenizer.encode(text)
    rng = random.Random(1)
    for _ in range(200):
        start = rng.randrange(1, len(text) - 2)
        stop = text[start : start + rng.randrange(1, 9)]
        final, found, count, shown = feed(tokenizer, token_ids, stop=[stop, "no such text"])
        assert found == stop
        assert final == text[: text.find(stop)]
        assert_grows(shown, final)
        included = feed(tokenizer, token_ids, stop=stop, include_stop_str_in_output=True)[0]
        assert included == text[: text.find(stop) + len(stop)]
        assert len(tokenizer.decode(token_ids[: count - 1])) < text.find(stop) + len(stop), "stopped a token late"


def test_the_stop_string_that_begins_first_wins(tokenizer: Tokenizer) -> None:
    final, found, _, _ = feed(tokenizer, tokenizer.encode("abcdef"), stop=["cd", "bcd"])
    assert (final, found) == ("a", "bcd")


def test_a_prefix_of_a_stop_string_is_held_back_and_then_shown(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("one STO two")
    final, found, _, shown = feed(tokenizer, token_ids, stop="STOP")
    assert found is None
    assert final == "one STO two"
    assert all(not each.endswith("STO") for each in shown)


def test_stop_strings_wait_for_min_tokens(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("a b a b a b")
    assert feed(tokenizer, token_ids, stop="b")[2] < len(token_ids) - 1
    _, found, count, _ = feed(tokenizer, token_ids, stop="b", min_tokens=len(token_ids))
    assert (found, count) == ("b", len(token_ids))


@pytest.mark.parametrize(
    ("spaces", "text"), [(True, "<|im_start|> <|im_start|> a"), (False, "<|im_start|><|im_start|> a")]
)
def test_spaces_between_special_tokens_can_be_omitted(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, spaces: bool, text: str
) -> None:
    """Some decoders put a space before every token; only that between special tokens can be omitted."""
    monkeypatch.setattr(tokenizer.backend, "decoder", tokenizers.decoders.WordPiece(cleanup=False))
    token_ids = [1, 1, *tokenizer.encode("a")]
    found, *_ = feed(tokenizer, token_ids, skip_special_tokens=False, spaces_between_special_tokens=spaces)
    assert found.strip() == text

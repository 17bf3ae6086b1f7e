"""Tokenization: the checkpoint's `tokenizer.json`, its chat template and its end-of-sequence tokens."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import normalizers

from penstock.config.engine import EngineConfig
from penstock.config.families import text_part
from penstock.config.model import read_json
from penstock.tokenizer.chat_template import ChatTemplate, special_token
from penstock.tokenizer.text_bound import find_text_bound
from penstock.utils.errors import ConfigError, RequestError
from penstock.utils.machine import release_freed_memory

Message = Mapping[str, Any]

_LONG_CHARACTERS = 4096
LARGE_CHARACTERS = 256 << 10
"""A text of this length or more is large: tokenizing it takes a hundred times its size in memory."""


@dataclass(frozen=True, slots=True)
class Truncation:
    """The number of tokens to which a prompt is truncated, including special tokens, and which end is kept."""

    max_tokens: int
    keeps_end: bool = True

    def cut(self, token_ids: Any) -> Any:
        """Returns the end or the beginning of a list of token ids."""
        return token_ids[-self.max_tokens :] if self.keeps_end else token_ids[: self.max_tokens]


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token added to the learned vocabulary. A special one has no text unless special tokens are shown."""

    id: int
    is_special: bool


class Tokenizer:
    """Wraps the `tokenizers` library; encoding and decoding are thread-safe.

    `max_tokens` is the maximum of a prompt: a text that must have more is refused before it is tokenized. It may be
    changed at any time. `pools` is whether prompts are whole texts, which some embedders end with a token.
    """

    def __init__(self, folder: Path, vocab_size: int, max_tokens: int | None = None, pools: bool = False) -> None:
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(
                f"{folder} holds no tokenizer.json: convert the tokenizer with transformers' save_pretrained, or pass "
                "skip_tokenizer_init and prompt_token_ids"
            )
        try:
            self.backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # noqa: BLE001 - the library raises bare Exception for every malformed file
            raise ConfigError(f"{file} cannot be read: {error}") from None
        # The file's settings for training batches must not affect prompts.
        self.backend.no_truncation()
        self.backend.no_padding()
        self.max_tokens = max_tokens
        config = read_json(folder / "tokenizer_config.json") or {}
        self._lower(config, (read_json(folder / "sentence_bert_config.json") or {}) if pools else {})
        self._bound = find_text_bound(self.backend)
        if self.backend.get_vocab_size(with_added_tokens=True) > vocab_size:
            self.backend = _limited(self.backend, vocab_size, file)
        self._chat_template = ChatTemplate.load(folder, config)
        eos = special_token(config, "eos_token")
        self.eos_token_id = None if eos is None else self.backend.token_to_id(eos)
        end = [] if self.eos_token_id is None else [self.eos_token_id]
        # The file's post-processor may append it already.
        self._ending = end if pools and config.get("add_eos_token") and self.backend.encode("").ids[-1:] != end else []
        added = self.backend.get_added_tokens_decoder()
        self.added_tokens = {token.content: AddedToken(number, token.special) for number, token in added.items()}

    def _lower(self, config: Mapping[str, Any], pooling: Mapping[str, Any]) -> None:
        """Applies `do_lower_case`, which the tokenizer's configuration has for BERT's normalizer, and that of
        sentence-transformers for any.
        """
        normalizer: Any = self.backend.normalizer
        if isinstance(normalizer, normalizers.BertNormalizer) and isinstance(config.get("do_lower_case"), bool):
            normalizer.lowercase = config["do_lower_case"]
        if pooling.get("do_lower_case"):
            others = [] if normalizer is None else [normalizer]
            self.backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *others])

    @functools.cached_property
    def special_tokens(self) -> dict[int, str]:
        """The spelling of each special token, by its id."""
        return {token.id: content for content, token in self.added_tokens.items() if token.is_special}

    @property
    def chat_template_source(self) -> str | None:
        """The chat template's text; None when the checkpoint has none."""
        return None if self._chat_template is None else self._chat_template.source

    def encode(self, text: str, add_special_tokens: bool = True, truncation: Truncation | None = None) -> list[int]:
        """Raises RequestError if the text is far too long, or contains a lone surrogate."""
        if truncation is None:
            self.check_length(text)
            token_ids = self._encode(text, add_special_tokens).ids + self._ending * add_special_tokens
        else:
            token_ids = self._encode_truncated(text, add_special_tokens, truncation)
        if len(text) >= LARGE_CHARACTERS:
            release_freed_memory()
        return token_ids

    def encode_pair(
        self, first: str, second: str, truncation: Truncation | None = None
    ) -> tuple[list[int], int | None]:
        """Encodes two texts as one, joined with the tokenizer's special tokens for pairs. Also returns the index of
        the first token that the tokenizer assigns to the second text; None if it does not distinguish the two.

        A truncation removes tokens of the second text. Raises RequestError like `encode`, and if the first one leaves
        no room for the second.
        """
        self.check_length(first, "queries")
        if truncation is None:
            self.check_length(second)
        else:
            second = self._shortened(second, truncation)
        pair = self._encode_first(first), self._encode(second, add_special_tokens=False)
        whole = self.backend.post_process(*pair, add_special_tokens=True)
        token_ids = whole.ids
        if truncation is not None:
            num_others = len(pair[0].ids) + self.backend.num_special_tokens_to_add(is_pair=True) + len(self._ending)
            if num_others >= truncation.max_tokens:
                found = f"the first text and the special tokens are {num_others} tokens: {truncation.max_tokens}"
                raise RequestError(f"{found} leave no room for the second text", "truncate_prompt_tokens")
            token_ids = _kept_tokens(whole, 1, Truncation(truncation.max_tokens - num_others, keeps_end=False))
        if len(first) + len(second) >= LARGE_CHARACTERS:
            release_freed_memory()
        return token_ids + self._ending, whole.type_ids.index(1) if 1 in whole.type_ids else None

    @functools.lru_cache(maxsize=1)  # noqa: B019 - a process has few tokenizers
    def _encode_first(self, text: str) -> tokenizers.Encoding:
        """Remembers its last result: thousands of documents may have the same query."""
        return self._encode(text, add_special_tokens=False)

    def _encode(self, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"the text is not valid Unicode at character {error.start}", "prompt") from None
        if len(text) < _LONG_CHARACTERS:
            return self.backend.encode(text, add_special_tokens=add_special_tokens)
        # Only the batched call releases the interpreter's lock, and this variant computes no offsets.
        return self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]

    def _encode_truncated(self, text: str, add_special_tokens: bool, truncation: Truncation) -> list[int]:
        """Truncates; keeps all special tokens that the tokenizer adds."""
        encoding = self._encode(self._shortened(text, truncation), add_special_tokens=False)
        num_special = self.backend.num_special_tokens_to_add(is_pair=False) + len(self._ending)
        room = max(0, truncation.max_tokens - num_special * add_special_tokens)
        encoding = self.backend.post_process(encoding, None, add_special_tokens)
        token_ids = _kept_tokens(encoding, 0, Truncation(room, truncation.keeps_end))
        return truncation.cut(token_ids + self._ending * add_special_tokens)

    def _shortened(self, text: str, truncation: Truncation) -> str:
        """Returns the text without the part far beyond its truncation, to save time and memory."""
        if self._bound is None:
            return text
        # At least twice the text of that many tokens, so that a word cut in two is itself truncated.
        size = max(LARGE_CHARACTERS, 2 * truncation.max_tokens * self._bound.bytes_per_token * self._bound.shrinking)
        return text[-size:] if truncation.keeps_end else text[:size]

    def check_length(self, text: str, field: str = "prompt") -> None:
        """Raises RequestError if the text must have more tokens than a prompt may; takes negligible time."""
        if self._bound is None or self.max_tokens is None:
            return
        # Smaller texts are always tokenized, so that the error states the number of tokens.
        if len(text) < LARGE_CHARACTERS or (num_tokens := self._bound.min_tokens(text)) <= self.max_tokens:
            return
        found = f"the text has {len(text)} characters, which are at least {num_tokens} tokens"
        raise RequestError(f"{found}; max_model_len={self.max_tokens}", field, "context_length_exceeded")

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    @functools.cache  # noqa: B019 - a process has few tokenizers, and each a limited vocabulary
    def decode_token(self, token_id: int) -> str:
        """Returns the text of a single token; incomplete characters are shown as U+FFFD."""
        return self.backend.decode([token_id], skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of a token, also if they are only part of a character."""
        text = self.decode_token(token_id)
        if "\ufffd" in text:
            piece = self.backend.id_to_token(token_id) or ""
            if _BYTE_PIECE.fullmatch(piece):
                return bytes([int(piece[3:5], 16)])
            if all(character in _BYTE_OF for character in piece):
                return bytes(_BYTE_OF[character] for character in piece)
        return text.encode("utf-8", "replace")

    def render_chat(self, messages: Sequence[Message], /, **options: Any) -> str:
        """Returns a conversation's text. Raises RequestError if there is no template or it refuses the messages."""
        if self._chat_template is None:
            raise RequestError("this model has no chat template: use a text prompt instead of messages", "messages")
        return self._chat_template.render(messages, **options)

    def apply_chat_template(self, messages: Sequence[Message], /, **options: Any) -> list[int]:
        """Returns a conversation's tokens. Raises RequestError if there is no template or it refuses the messages."""
        # The template includes the special tokens.
        return self.encode(self.render_chat(messages, **options), add_special_tokens=False)


def _kept_tokens(encoding: tokenizers.Encoding, number: int, truncation: Truncation) -> list[int]:
    """Returns the token ids of an encoding, with text `number` truncated; special tokens and the other text stay.

    `Encoding.truncate` keeps what it cuts off in parts of the same length, and `post_process` joins each of them with
    the other text, which takes gigabytes.
    """
    places = [place for place, text in enumerate(encoding.sequence_ids) if text == number]
    surplus = max(0, len(places) - truncation.max_tokens)
    first = places[0 if truncation.keeps_end else truncation.max_tokens] if surplus else 0
    return encoding.ids[:first] + encoding.ids[first + surplus :]


def _limited(backend: tokenizers.Tokenizer, vocab_size: int, file: Path) -> tokenizers.Tokenizer:
    """Returns the tokenizer without the added tokens that the model lacks: files of Gemma 3's text models have the one
    that stands for images. Raises ConfigError if it has more tokens even so.
    """
    stored = json.loads(backend.to_str())
    kept = [token for token in stored["added_tokens"] if token["id"] < vocab_size]
    limited = tokenizers.Tokenizer.from_str(json.dumps({**stored, "added_tokens": kept}))
    if (size := limited.get_vocab_size(with_added_tokens=True)) > vocab_size:
        raise ConfigError(f"{file} has {size} tokens and the model only {vocab_size}: they do not belong together")
    return limited


def _byte_characters() -> dict[str, int]:
    """Returns GPT-2's table of characters that represent bytes in byte-level tokenizers; most represent themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTE_OF = _byte_characters()
# The form of bytes in tokenizers with byte fallback.
_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def load_tokenizer(config: EngineConfig) -> Tokenizer | None:
    """Loads the configured tokenizer; None if the engine has none. Raises ConfigError."""
    folder, size = config.tokenizer_path, config.model.vocab_size
    return None if folder is None else Tokenizer(folder, size, pools=config.pooling is not None)


def eos_token_ids(config: EngineConfig, tokenizer: Tokenizer | None) -> frozenset[int]:
    """Returns the tokens that end a sequence, from any of the checkpoint's files. Raises ConfigError."""
    generation = read_json(config.model.path / "generation_config.json") or {}
    model = text_part(read_json(config.model.path / "config.json") or {})
    stored = generation.get("eos_token_id")
    eos = _token_ids(model.get("eos_token_id") if stored is None else stored, config.model.vocab_size)
    own = None if tokenizer is None else tokenizer.eos_token_id
    return eos if own is None else eos | {own}


def _token_ids(value: Any, vocab_size: int) -> frozenset[int]:
    """Parses an `eos_token_id` of a checkpoint: absent, one or several. The model never gives those beyond its own."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(token_id, int) for token_id in ids):
        raise ConfigError(f"eos_token_id must be token ids, got {value!r}")
    return frozenset(token_id for token_id in ids if token_id in range(vocab_size))

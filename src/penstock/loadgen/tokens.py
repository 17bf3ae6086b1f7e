"""Tokens for prompts, from a tokenizer on this machine. `client.ServerTokenizer` asks the server instead."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import tokenizers

from penstock.utils.errors import ConfigError


class Tokenizer(Protocol):
    """Counts lengths without the special tokens that a server may add to a prompt."""

    async def vocabulary(self) -> Sequence[int]:
        """Returns the token ids that may be anywhere in a prompt, none of them special; sorted."""
        ...

    async def encode(self, text: str) -> list[int]: ...

    async def decode(self, token_ids: Sequence[int]) -> str: ...


class LocalTokenizer:
    """Uses the `tokenizer.json` of a checkpoint's folder. Raises ConfigError if it is missing or invalid."""

    def __init__(self, folder: Path) -> None:
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(f"--tokenizer {folder} has no tokenizer.json")
        try:
            self._backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # noqa: BLE001 - the library raises bare Exception for every malformed file
            raise ConfigError(f"--tokenizer: {file} cannot be read: {error}") from None
        self._backend.no_truncation()
        self._backend.no_padding()

    async def vocabulary(self) -> Sequence[int]:
        return sorted(set(self._backend.get_vocab().values()) - self._backend.get_added_tokens_decoder().keys())

    async def encode(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids

    async def decode(self, token_ids: Sequence[int]) -> str:
        return self._backend.decode(list(token_ids), skip_special_tokens=False)

"""The KV blocks that an engine holds according to its KV events, and lookups of prompts in them (docs/KV_EVENTS.md).

Each engine names blocks by its own hashes. Here a block has a key made of its tokens, those before it and the cache
salt, so that a prompt's keys are computed once and looked up for every engine.

It is a hint: an error or a gap here costs a prefix hit and nothing else.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any

_KEY_BYTES = 16
_MAX_BLOCKS = 1 << 20
_MAX_BLOCK_SIZE = 1 << 16

BlockHash = int | bytes


def scoped_salt(api_key: bytes, salt: str | None) -> str:
    """Returns a salt scoped to the key, so that timing reveals nothing about the prompts of other keys."""
    scope = hashlib.blake2b(api_key, digest_size=16, person=b"penstock-salt").hexdigest()
    return f"{scope}/{salt or ''}"


def adapter_salt(name: str | None, salt: str | None) -> str | None:
    """Returns a salt that also stands for an adapter, if there is one."""
    return salt if name is None else f"lora {name}/{salt or ''}"


class PromptKeys:
    """The keys of a prompt's blocks, for each of the salts with which an engine may have cached them."""

    def __init__(self, token_ids: Sequence[int], salts: Sequence[str]) -> None:
        self.num_tokens = len(token_ids)
        self._token_ids = array("q", token_ids)
        self._salts = salts
        self._chains: dict[int, list[list[bytes]]] = {}

    def chains(self, block_size: int) -> list[list[bytes]]:
        """Returns for each salt the keys of the prompt's whole blocks."""
        if block_size not in self._chains:
            self._chains[block_size] = [_extend(_root(salt), self._token_ids, block_size) for salt in self._salts]
        return self._chains[block_size]


class HeldBlocks:
    """The blocks of one engine. A block is held until the last KV group that has it has removed it."""

    def __init__(self) -> None:
        self._block_size = 0
        self._keys: dict[tuple[int, BlockHash], bytes] = {}
        self._num_holders: Counter[bytes] = Counter()

    @property
    def num_blocks(self) -> int:
        return len(self._keys)

    def num_cached(self, prompt: PromptKeys) -> int:
        """Returns how many tokens at the prompt's beginning the engine holds."""
        if not self._keys:
            return 0
        return self._block_size * max(self._num_held(chain) for chain in prompt.chains(self._block_size))

    def _num_held(self, chain: Sequence[bytes]) -> int:
        return next((index for index, key in enumerate(chain) if key not in self._num_holders), len(chain))

    def clear(self) -> None:
        self._keys.clear()
        self._num_holders.clear()

    def store(
        self,
        block_hashes: Sequence[BlockHash],
        parent: BlockHash | None,
        token_ids: Sequence[int],
        block_size: int,
        *,
        extra_keys: Sequence[Sequence[Any] | None] | None = None,
        group: int = 0,
    ) -> None:
        """Adds consecutive blocks; the names are those of the event's fields. Invalid blocks are omitted."""
        if not 0 < block_size <= _MAX_BLOCK_SIZE:
            return
        parent_key = _root(_salt_of(extra_keys)) if parent is None else self._keys.get((group, parent))
        if parent_key is None or len(self._keys) >= _MAX_BLOCKS:
            return
        if block_size != self._block_size:
            self.clear()
            self._block_size = block_size
        try:
            keys = _extend(parent_key, array("q", token_ids), block_size)
        except OverflowError:
            return
        for block_hash, key in zip(block_hashes, keys, strict=False):
            if (group, block_hash) not in self._keys:
                self._keys[group, block_hash] = key
                self._num_holders[key] += 1

    def remove(self, block_hashes: Sequence[BlockHash], group: int = 0) -> None:
        for block_hash in block_hashes:
            key = self._keys.pop((group, block_hash), None)
            if key is not None:
                self._num_holders[key] -= 1
                if not self._num_holders[key]:
                    del self._num_holders[key]


def _root(salt: str) -> bytes:
    return _digest(salt.encode("utf-8", "surrogatepass"))


def _extend(parent: bytes, token_ids: array[int], block_size: int) -> list[bytes]:
    """Returns the keys of the whole blocks after `parent`."""
    keys: list[bytes] = []
    for end in range(block_size, len(token_ids) + 1, block_size):
        parent = _digest(parent + token_ids[end - block_size : end].tobytes())
        keys.append(parent)
    return keys


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_KEY_BYTES).digest()


def _salt_of(extra_keys: Sequence[Sequence[Any] | None] | None) -> str:
    """Returns the salt of a prompt's first block; numbers after it are tokens ahead of the block."""
    first = extra_keys[0] if extra_keys else None
    return first[0] if first and isinstance(first[0], str) and not first[0].isdecimal() else ""

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
from dataclasses import dataclass, field
from typing import Any, Protocol

_KEY_BYTES = 16
_MAX_BLOCKS = 1 << 20
_MAX_BLOCK_SIZE = 1 << 16
_MAX_GROUPS = 1 << 8
_STATES = "mamba"
"""vLLM's name of the kind of a group whose blocks are states of recurrent layers."""
_STATE_WINDOW = 2
"""The next token reads the state after the one before it, which is in the block of that token."""

BlockHash = int | bytes


def scoped_salt(api_key: bytes, salt: str | None) -> str:
    """Returns a salt scoped to the key, so that timing reveals nothing about the prompts of other keys."""
    scope = hashlib.blake2b(api_key, digest_size=16, person=b"penstock-salt").hexdigest()
    return f"{scope}/{salt or ''}"


def adapter_salt(name: str | None, salt: str | None) -> str | None:
    """Returns a salt that also stands for an adapter, if there is one."""
    return salt if name is None else f"lora {name}/{salt or ''}"


class Stored(Protocol):
    """An event: consecutive blocks of a group were stored. The fields are those of `messages.kv_events.BlockStored`."""

    @property
    def block_hashes(self) -> Sequence[BlockHash]: ...
    @property
    def parent_block_hash(self) -> BlockHash | None: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def block_size(self) -> int: ...
    @property
    def extra_keys(self) -> Sequence[Sequence[Any] | None] | None: ...
    @property
    def group_idx(self) -> int | None: ...
    @property
    def kv_cache_spec_kind(self) -> str | None: ...
    @property
    def kv_cache_spec_sliding_window(self) -> int | None: ...


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


@dataclass(slots=True)
class _Group:
    """The blocks of one KV group: their keys by hash, None while the key is unknown, and how many of them have a key.
    A query reads the last `window` tokens, 0 for all of them.
    """

    window: int
    keys: dict[BlockHash, bytes | None] = field(default_factory=dict[BlockHash, bytes | None])
    held: Counter[bytes] = field(default_factory=Counter[bytes])

    def add(self, block_hash: BlockHash, key: bytes | None) -> None:
        if self.keys.get(block_hash) is None:
            self.keys[block_hash] = key
            if key is not None:
                self.held[key] += 1

    def remove(self, block_hash: BlockHash) -> None:
        key = self.keys.pop(block_hash, None)
        if key is not None:
            self.held[key] -= 1
            if not self.held[key]:
                del self.held[key]

    def longest_hit(self, chain: Sequence[bytes], length: int, block_size: int) -> int:
        """Returns the largest length, at most `length`, of which it holds all blocks that the next query reads."""
        if not self.window:
            return next((index for index in range(length) if chain[index] not in self.held), length)
        index = length - 1
        while length > 0 and index >= max(0, length * block_size + 1 - self.window) // block_size:
            if chain[index] not in self.held:
                length = index
            index -= 1
        return length


class HeldBlocks:
    """The blocks of one engine, by KV group. A prefix counts if each group has what the next query reads of it, as in
    the engine: all blocks, those of a window, or the state at its end. Groups are known from their first event.
    """

    def __init__(self) -> None:
        self._block_size = 0
        self._groups: dict[int, _Group] = {}

    @property
    def num_blocks(self) -> int:
        return sum(len(each.held) for each in self._groups.values())

    def num_cached(self, prompt: PromptKeys) -> int:
        """Returns how many tokens at the prompt's beginning the engine holds."""
        if not any(each.held for each in self._whole()):
            return 0
        return self._block_size * max(self._longest_hit(chain) for chain in prompt.chains(self._block_size))

    def _longest_hit(self, chain: Sequence[bytes]) -> int:
        length, before = len(chain), -1
        while length and length != before:
            before = length
            for group in self._groups.values():
                length = group.longest_hit(chain, length, self._block_size)
        return length

    def _whole(self) -> list[_Group]:
        return [each for each in self._groups.values() if not each.window]

    def clear(self) -> None:
        self._groups.clear()

    def store(self, event: Stored) -> None:
        """Adds the event's blocks. Invalid ones are omitted."""
        num_blocks, block_size = sum(len(each.keys) for each in self._groups.values()), event.block_size
        if not 0 < block_size <= _MAX_BLOCK_SIZE or num_blocks >= _MAX_BLOCKS:
            return
        if block_size != self._block_size:
            self.clear()
            self._block_size = block_size
        window = _STATE_WINDOW if event.kv_cache_spec_kind == _STATES else event.kv_cache_spec_sliding_window or 0
        number = event.group_idx or 0
        if number not in self._groups and len(self._groups) >= _MAX_GROUPS:
            return
        into = self._groups.setdefault(number, _Group(window))
        if into.window:
            # The blocks before these may be gone, but a block has the same hash in every group.
            for block_hash in event.block_hashes:
                found = (each.keys.get(block_hash) for each in self._whole())
                into.add(block_hash, next((key for key in found if key is not None), None))
            return
        parent = event.parent_block_hash
        parent_key = _root(_salt_of(event.extra_keys)) if parent is None else into.keys.get(parent)
        if parent_key is None:
            return
        try:
            keys = _extend(parent_key, array("q", event.token_ids), block_size)
        except OverflowError:
            return
        waiting = [each for each in self._groups.values() if each.window]
        for block_hash, key in zip(event.block_hashes, keys, strict=False):
            into.add(block_hash, key)
            for each in waiting:
                if block_hash in each.keys:
                    each.add(block_hash, key)

    def remove(self, block_hashes: Sequence[BlockHash], group: int = 0) -> None:
        if group in self._groups:
            for block_hash in block_hashes:
                self._groups[group].remove(block_hash)


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

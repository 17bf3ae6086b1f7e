"""What an instance's KV events say that it holds, and how much of a prompt that is (docs/KV_EVENTS.md). No sockets.

Instances name blocks by hashes of their own making. Here a block has a key made of its tokens, those before it and the
cache salt, so that a prompt's keys are made once and looked up for every instance.

The events are a hint: what is wrong or missing in a view costs a prefix hit and nothing else.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.utils.logging import get_logger

logger = get_logger(__name__)

_KEY_BYTES = 16
_MAX_BLOCKS = 1 << 20
_MAX_BLOCK_SIZE = 1 << 16
# The memory that the model computes in. What lies elsewhere has to be loaded first.
_MEDIA = (None, "GPU")

_Hash = int | bytes


class _Stored(msgspec.Struct, tag_field="type", tag="BlockStored"):
    block_hashes: list[_Hash]
    parent_block_hash: _Hash | None
    token_ids: list[int]
    block_size: int
    medium: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_sliding_window: int | None = None


class _Removed(msgspec.Struct, tag_field="type", tag="BlockRemoved"):
    block_hashes: list[_Hash]
    medium: str | None = None
    group_idx: int | None = None


class _Cleared(msgspec.Struct, tag_field="type", tag="AllBlocksCleared"):
    pass


class _Batch(msgspec.Struct, array_like=True):
    timestamp: float
    events: list[_Stored | _Removed | _Cleared]


_decode = msgspec.msgpack.Decoder(_Batch).decode


class Prompt:
    """A prompt's tokens, and the salts under which an instance may have cached them."""

    def __init__(self, token_ids: Sequence[int], salts: Sequence[str]) -> None:
        self.num_tokens = len(token_ids)
        self._token_ids = array("q", token_ids)
        self._salts = salts
        self._chains: dict[int, list[list[bytes]]] = {}

    def chains(self, block_size: int) -> list[list[bytes]]:
        """For each salt the keys of the prompt's whole blocks."""
        if block_size not in self._chains:
            self._chains[block_size] = [_extend(_root(salt), self._token_ids, block_size) for salt in self._salts]
        return self._chains[block_size]


class KVView:
    """One instance. `receive` gets what is published, and says from which number on batches are missing. `take` gets
    what was asked for again, and then the batch that showed the gap; with what is missing even then it starts afresh.
    """

    def __init__(self) -> None:
        self._block_size = 0
        self._keys: dict[tuple[int, _Hash], bytes] = {}
        self._num_holders: Counter[bytes] = Counter()
        self._next = 0
        self._newest = -1

    @property
    def num_blocks(self) -> int:
        return len(self._keys)

    @property
    def next_number(self) -> int:
        """Of the batch that is applied next."""
        return self._next

    def clear(self) -> None:
        self._keys.clear()
        self._num_holders.clear()

    def restart(self) -> None:
        """The instance is another process from here on."""
        self.clear()
        self._next, self._newest = 0, -1

    def receive(self, number: int, payload: bytes) -> int | None:
        """A published batch. The number of the first that is missing before it, or None when it has been applied."""
        if number <= self._newest:
            self.restart()
        self._newest = number
        if number > self._next:
            return self._next
        self.take(number, payload)
        return None

    def take(self, number: int, payload: bytes) -> None:
        """A batch, though some before it may be missing for good: what they removed is not known then."""
        if number < self._next:
            return
        if number > self._next:
            self.clear()
            self._next = number
        self._apply(payload)

    def num_cached(self, prompt: Prompt) -> int:
        """Tokens at the prompt's beginning that the instance holds."""
        if not self._keys:
            return 0
        return self._block_size * max(self._num_held(chain) for chain in prompt.chains(self._block_size))

    def _num_held(self, chain: Sequence[bytes]) -> int:
        return next((index for index, key in enumerate(chain) if key not in self._num_holders), len(chain))

    # ---- Events ----

    def _apply(self, payload: bytes) -> None:
        self._next += 1
        try:
            batch = _decode(payload)
        except msgspec.MsgspecError as error:
            logger.warning("KV events that cannot be read: %s", error)
            self.clear()
            return
        for event in batch.events:
            if isinstance(event, _Cleared):
                self.clear()
            elif event.medium in _MEDIA:
                self._store(event) if isinstance(event, _Stored) else self._remove(event)

    def _store(self, event: _Stored) -> None:
        # A window's blocks are given away while those of the other layers stay, and say less.
        if event.kv_cache_spec_sliding_window or not 0 < event.block_size <= _MAX_BLOCK_SIZE:
            return
        group = event.group_idx or 0
        if event.parent_block_hash is None:
            parent = _root(_salt_of(event.extra_keys))
        else:
            parent = self._keys.get((group, event.parent_block_hash))
        if parent is None or len(self._keys) >= _MAX_BLOCKS:
            return
        if event.block_size != self._block_size:
            self.clear()
            self._block_size = event.block_size
        try:
            keys = _extend(parent, array("q", event.token_ids), event.block_size)
        except OverflowError:
            return
        for block_hash, key in zip(event.block_hashes, keys, strict=False):
            if (group, block_hash) not in self._keys:
                self._keys[group, block_hash] = key
                self._num_holders[key] += 1

    def _remove(self, event: _Removed) -> None:
        for block_hash in event.block_hashes:
            key = self._keys.pop((event.group_idx or 0, block_hash), None)
            if key is not None:
                self._num_holders[key] -= 1
                if not self._num_holders[key]:
                    del self._num_holders[key]


def _root(salt: str) -> bytes:
    return _digest(salt.encode("utf-8", "surrogatepass"))


def _extend(parent: bytes, token_ids: array[int], block_size: int) -> list[bytes]:
    """The keys of the whole blocks behind `parent`."""
    keys: list[bytes] = []
    for end in range(block_size, len(token_ids) + 1, block_size):
        parent = _digest(parent + token_ids[end - block_size : end].tobytes())
        keys.append(parent)
    return keys


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_KEY_BYTES).digest()


def _salt_of(extra_keys: Sequence[list[Any] | None] | None) -> str:
    """Of a prompt's first block; behind the salt stand tokens ahead of the block, which are numbers."""
    first = extra_keys[0] if extra_keys else None
    return first[0] if first and isinstance(first[0], str) and not first[0].isdecimal() else ""

"""Chained block hashes: equal hashes mean equal tokens from the start of the prompt to the end of the block.

`hash_i = SHA-256(hash_{i-1} || tokens of block i || tokens ahead)`; the chain starts from the request's `kv_scope`, so
prompts with different salts or adapters never share a block. With a speculator that computes the KV of a position from
the next token (MTP, EAGLE), the last slot of a block depends on the next block's first token: such tokens ahead are
hashed with the block, so that its hash identifies its whole content. Only blocks whose tokens are all known have a
hash.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

BlockHash = bytes


def root_hash(kv_scope: bytes) -> BlockHash:
    """Returns the start of a request's hash chain."""
    return hashlib.sha256(b"penstock block chain\0" + kv_scope).digest()


def extend_chain(
    chain: list[BlockHash], root: BlockHash, tokens: Sequence[int], block_size: int, num_tokens_ahead: int = 0
) -> None:
    """Appends the hashes of the blocks of `tokens` that `chain` does not have yet."""
    parent = chain[-1] if chain else root
    first, length = len(chain) * block_size, 8 * (block_size + num_tokens_ahead)  # a token takes 8 bytes
    packed = array("q", tokens[first:]).tobytes() if len(tokens) - first >= block_size else b""
    for start in range(0, len(packed) - length + 1, 8 * block_size):
        parent = hashlib.sha256(parent + packed[start : start + length]).digest()
        chain.append(parent)

"""Digests of KV bytes, and the choice of which bytes get one.

They guard against stale, torn and corrupted bytes: a late read, a half-written file, a flipped bit. They do not guard
against an attacker, who can make bytes to fit a digest of this kind: access to peers and folders has to keep him out.
"""

from __future__ import annotations

import enum

import xxhash

DIGEST_BYTES = 16

# A power of two, so that the low bits of a hash are a fair draw.
SAMPLED_ONE_IN = 16


def digest(*parts: bytes | bytearray | memoryview) -> bytes:
    """XXH3-128 of the parts, `DIGEST_BYTES` long: the digest of their concatenation, wherever it is cut.

    A memoryview must be C-contiguous.
    """
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
    return state.digest()


class Attestation(enum.StrEnum):
    """Which blocks travel with a digest. Both ends come to the same answer because it depends on the key alone."""

    OFF = "off"
    SAMPLED = "sampled"
    ALL = "all"

    def covers(self, key: tuple[int, bytes]) -> bool:
        """Whether the block of this (KV group, block hash) has a digest; the hash must be evenly distributed."""
        if self is Attestation.SAMPLED:
            return (key[1][-1] + key[0]) % SAMPLED_ONE_IN == 0
        return self is Attestation.ALL

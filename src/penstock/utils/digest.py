"""Digests of bytes: fast, and safe against accidents alone.

They guard against stale, torn and corrupted bytes: a late read, a half-written file, a flipped bit. They do not guard
against an attacker, who can make bytes to fit a digest of this kind: access to peers and folders has to prevent that.
"""

from __future__ import annotations

import xxhash

DIGEST_BYTES = 16


def digest(*parts: bytes | bytearray | memoryview) -> bytes:
    """XXH3-128 of the parts, `DIGEST_BYTES` long: the digest of their concatenation, wherever it is cut.

    A memoryview must be C-contiguous.
    """
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
    return state.digest()

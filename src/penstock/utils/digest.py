"""Fast, non-cryptographic digests of bytes.

They guard against stale, torn and corrupted bytes: a late read, a half-written file, a flipped bit. They do not guard
against an attacker, who can construct bytes with a given digest; restrict access to peers and folders for that.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import cast

import numpy as np
import xxhash

DIGEST_BYTES = 16
_MODULUS = 1 << 8 * DIGEST_BYTES


def digest(*parts: bytes | bytearray | memoryview) -> bytes:
    """Returns the XXH3-128, `DIGEST_BYTES` long, of the concatenation of the parts; it does not depend on where they
    are split.

    A memoryview must be C-contiguous.
    """
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
    return state.digest()


def digest_rows(rows: Iterable[np.ndarray], first: int) -> bytes:
    """The sum, modulo 2^128, of the XXH3-128 of every row, keyed by the row's number, which is `first` for the first
    row. The digest of rows [a, c) is therefore the sum (`add_digests`) of those of [a, b) and [b, c) for any b.
    """
    # The library's type annotations do not accept an array as a buffer.
    of_row = cast("Callable[[np.ndarray, int], int]", xxhash.xxh3_128_intdigest)
    return _to_bytes(sum(map(of_row, rows, itertools.count(first))))


def add_digests(one: bytes, other: bytes) -> bytes:
    """Adds two digests from `digest_rows`."""
    return _to_bytes(int.from_bytes(one, "big") + int.from_bytes(other, "big"))


def subtract_digests(one: bytes, other: bytes) -> bytes:
    """Returns the digest that, added to `other`, gives `one`."""
    return _to_bytes(int.from_bytes(one, "big") - int.from_bytes(other, "big"))


def _to_bytes(number: int) -> bytes:
    return (number % _MODULUS).to_bytes(DIGEST_BYTES, "big")


def digest_units(units: Iterable[np.ndarray], numbers: Iterable[int]) -> np.ndarray:  # [n, DIGEST_BYTES] uint8
    """Returns the XXH3-128 of every unit, keyed by its number."""
    of_unit = cast("Callable[[np.ndarray, int], bytes]", xxhash.xxh3_128_digest)
    return np.frombuffer(b"".join(map(of_unit, units, numbers)), np.uint8).reshape(-1, DIGEST_BYTES)


def sum_digests(digests: np.ndarray) -> bytes:
    """[n, DIGEST_BYTES] uint8 -> [DIGEST_BYTES], modulo 2^128: `add_digests` of all."""
    # Sums words of 32 bits, so that no sum overflows.
    words = np.ascontiguousarray(digests).view(">u4").sum(axis=0, dtype=np.uint64).tolist()
    return _to_bytes(sum(word << 32 * place for place, word in enumerate(reversed(words))))

"""The parts of a checkpoint that a rank has read; from all ranks' reports the engine core identifies the weights."""

from __future__ import annotations

import msgspec


class TensorRows(msgspec.Struct, frozen=True):
    """Rows [first, end) of a tensor, or columns if `axis` is 1, as read by one rank. `digest` [16 bytes] is that of
    their bytes (`utils.digest.digest_rows`); digests of adjacent intervals can be added. It is zero if bytes are not
    digested. A drafter's names have a prefix if it has its own checkpoint.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    first: int
    end: int
    digest: bytes
    axis: int = 0

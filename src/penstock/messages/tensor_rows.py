"""What a rank has read of a checkpoint: from the reports of all ranks, the engine core identifies the weights."""

from __future__ import annotations

import msgspec


class TensorRows(msgspec.Struct, frozen=True):
    """Rows [first, end) of a tensor, as one rank has read them.

    `digest` [16 bytes] is that of their bytes (`utils.digest.digest_rows`): those of neighbouring intervals add
    up. It is zero where bytes are not digested. A drafter's names have a prefix if it has a checkpoint of its own.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    first: int
    end: int
    digest: bytes

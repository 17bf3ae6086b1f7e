"""KV offload tiers: chunks of KV in host memory and on slower media below it.

A *chunk* is a tier's storage for one engine block. The chunks of an engine have two sizes in bytes at most: one for the
blocks of tokens, and one for the states of recurrent layers.
"""

from __future__ import annotations

OffloadKey = tuple[int, bytes]
"""(KV group, block hash). Hashes are chained, so a key identifies its whole prefix and always has the same content."""

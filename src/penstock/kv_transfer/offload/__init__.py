"""KV offload tiers: chunks of KV in host memory and on slower media below it.

A *chunk* is a tier's storage for one engine block; all chunks of an engine have the same size in bytes.
"""

from __future__ import annotations

OffloadKey = tuple[int, bytes]
"""(KV group, block hash). Hashes are chained, so a key identifies its whole prefix and always has the same content."""

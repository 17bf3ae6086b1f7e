"""KV offload tiers: chunks of KV in host memory, and below it on slower media.

A *chunk* is the place of one engine block in a tier; all chunks of an engine have the same size in bytes.
"""

from __future__ import annotations

OffloadKey = tuple[int, bytes]
"""(KV group, block hash). Hashes are chained, so a key stands for its whole prefix and always has the same content."""

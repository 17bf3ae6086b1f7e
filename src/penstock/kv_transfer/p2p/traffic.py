"""Counts transfers between this engine and each of its peers, for metrics and the dashboard."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

_MAX_PEERS = 64
_OTHERS = "others"


class Traffic:
    """Counts transfers by direction and engine id. Peers beyond the first `_MAX_PEERS` and names that no peer has
    introduced itself with share one count: a client may write any name."""

    def __init__(self) -> None:
        self._peers: set[str] = set()
        self._counters: dict[str, float] = defaultdict(float)

    @property
    def counters(self) -> Mapping[str, float]:
        """Returns counters such as `p2p_from/ENGINE/tokens`, for transfers, tokens, bytes, seconds and failed."""
        return self._counters

    def introduce(self, engine_id: str) -> None:
        """Called when an engine has introduced itself."""
        if len(self._peers) < _MAX_PEERS:
            self._peers.add(engine_id)

    def on_moved(self, direction: str, engine_id: str, num_tokens: int, num_bytes: int, seconds: float) -> None:
        """Counts a complete transfer "from" or "to" an engine. `seconds` is how long its reader has waited."""
        self._add(direction, engine_id, {"transfers": 1, "tokens": num_tokens, "bytes": num_bytes, "seconds": seconds})

    def on_failed(self, direction: str, engine_id: str) -> None:
        """Counts a transfer that was incomplete; the reader computes what is missing."""
        self._add(direction, engine_id, {"failed": 1})

    def _add(self, direction: str, engine_id: str, amounts: Mapping[str, float]) -> None:
        if engine_id not in self._peers:
            engine_id = _OTHERS
        for name, amount in amounts.items():
            self._counters[f"p2p_{direction}/{engine_id}/{name}"] += amount

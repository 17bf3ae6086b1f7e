"""What has moved between this engine and each of its peers, for people who look at it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

_MAX_PEERS = 64
_OTHERS = "others"


@dataclass(slots=True)
class _Count:
    transfers: int = 0
    tokens: int = 0
    bytes: int = 0
    seconds: float = 0.0
    failed: int = 0


class Traffic:
    """By direction and engine id; peers beyond the first `_MAX_PEERS` are counted together."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], _Count] = {}

    def on_moved(self, direction: str, engine_id: str, num_tokens: int, num_bytes: int, seconds: float) -> None:
        """A transfer "from" or "to" an engine has ended well. `seconds` is what its reader has waited."""
        count = self._of(direction, engine_id)
        count.transfers += 1
        count.tokens += num_tokens
        count.bytes += num_bytes
        count.seconds += seconds

    def on_failed(self, direction: str, engine_id: str) -> None:
        """It has not, or only a part of it: what is missing is computed by the reader."""
        self._of(direction, engine_id).failed += 1

    def counters(self) -> Mapping[str, float]:
        """`p2p_from/ENGINE/tokens` and the like."""
        return {
            f"p2p_{direction}/{engine_id}/{name}": value
            for (direction, engine_id), count in self._counts.items()
            for name, value in asdict(count).items()
        }

    def _of(self, direction: str, engine_id: str) -> _Count:
        key = direction, engine_id
        if key not in self._counts and len(self._counts) >= _MAX_PEERS:
            key = direction, _OTHERS
        return self._counts.setdefault(key, _Count())

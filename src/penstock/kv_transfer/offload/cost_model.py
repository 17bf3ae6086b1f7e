"""Decides between loading and recomputing, from recent measurements of both."""

from __future__ import annotations

from dataclasses import dataclass

# Each measurement multiplies the weight of the earlier ones by this factor.
_KEPT_WEIGHT = 0.8


@dataclass(slots=True)
class _Line:
    """seconds = fixed + per_byte * bytes, by least squares over measurements with decaying weights."""

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def add(self, x: float, y: float, kept_weight: float) -> None:
        self.weight = self.weight * kept_weight + 1.0
        self.x = self.x * kept_weight + x
        self.y = self.y * kept_weight + y
        self.xx = self.xx * kept_weight + x * x
        self.xy = self.xy * kept_weight + x * y

    def at(self, x: float) -> float:
        """Returns the seconds for `x` bytes. Neither part is ever negative.

        If all sizes are equal, the fixed part is unknown and taken as 0.
        """
        spread = self.xx * self.weight - self.x * self.x
        if spread <= 1e-9 * self.xx * self.weight:
            return self.y / self.x * x if self.x else self.y / self.weight
        slope = (self.xy * self.weight - self.x * self.y) / spread
        if slope < 0.0:
            return self.y / self.weight
        fixed = (self.y - slope * self.x) / self.weight
        if fixed < 0.0:
            return self.xy / self.xx * x
        return fixed + slope * x


@dataclass(slots=True)
class _Medium:
    line: _Line
    computed_seconds: float = 0.0


class LoadCostModel:
    """Keeps the seconds per token of computing, and per medium the fixed seconds and the seconds per byte of loading.

    A medium without a measurement is loaded from to measure it. Computing is measured all the time, but a medium
    that loses is not: after `retry_seconds` of computing without a load from it, it is tried again, and its earlier
    measurements count half. All durations are arguments: the model reads no clock, and `should_load` changes nothing.
    """

    def __init__(self, retry_seconds: float = 10.0) -> None:
        assert retry_seconds > 0, retry_seconds
        self._retry_seconds = retry_seconds
        self._tokens = 0.0
        self._seconds = 0.0
        self._media: dict[str, _Medium] = {}

    def on_computed(self, num_tokens: int, seconds: float) -> None:
        """Records the time to compute `num_tokens` prompt tokens."""
        self._tokens = self._tokens * _KEPT_WEIGHT + num_tokens
        self._seconds = self._seconds * _KEPT_WEIGHT + seconds
        for medium in self._media.values():
            medium.computed_seconds += seconds

    def on_loaded(self, medium: str, num_bytes: int, seconds: float) -> None:
        """Records the time of a load of `num_bytes` from the medium: of the promotion, if there was one, and from the
        allocation of blocks to the load's end. Waits for the engine are no cost of the medium.
        """
        known = self._media.setdefault(medium, _Medium(_Line()))
        aged = 0.5 ** (known.computed_seconds / self._retry_seconds)
        known.line.add(num_bytes, seconds, _KEPT_WEIGHT * aged)
        known.computed_seconds = 0.0

    def should_load(self, medium: str, num_tokens: int, num_bytes: int) -> bool:
        """Returns whether to load `num_tokens` tokens, `num_bytes` on the medium, rather than compute them."""
        known = self._media.get(medium)
        if known is None or self._tokens == 0 or known.computed_seconds >= self._retry_seconds:
            return True
        return known.line.at(num_bytes) <= self._seconds / self._tokens * num_tokens

"""Load or compute again: decided by what either has taken lately."""

from __future__ import annotations

from dataclasses import dataclass

# What the next measurement leaves of the weight of the earlier ones.
_KEPT_WEIGHT = 0.8


@dataclass(slots=True)
class _Line:
    """seconds = fixed + per_byte * bytes, by least squares over measurements whose weight fades."""

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
        """Neither part is ever negative; sizes that are all alike tell nothing of the fixed part, which is then 0."""
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
    """Keeps seconds per token of computing, and per medium the fixed seconds and the seconds per byte of loading.

    What has not been measured is loaded, so that it is. Computing is measured all the time; a medium that loses is not,
    so after `retry_seconds` of computing without a load from it, it is tried again, and what was measured before then
    counts half. All durations are arguments: the model reads no clock, and `should_load` changes nothing.
    """

    def __init__(self, retry_seconds: float = 10.0) -> None:
        assert retry_seconds > 0, retry_seconds
        self._retry_seconds = retry_seconds
        self._tokens = 0.0
        self._seconds = 0.0
        self._media: dict[str, _Medium] = {}

    def on_computed(self, num_tokens: int, seconds: float) -> None:
        """`num_tokens` prompt tokens took that long to compute."""
        self._tokens = self._tokens * _KEPT_WEIGHT + num_tokens
        self._seconds = self._seconds * _KEPT_WEIGHT + seconds
        for medium in self._media.values():
            medium.computed_seconds += seconds

    def on_loaded(self, medium: str, num_bytes: int, seconds: float) -> None:
        """A load of `num_bytes` from the medium took that long, from its request to its landing."""
        known = self._media.setdefault(medium, _Medium(_Line()))
        aged = 0.5 ** (known.computed_seconds / self._retry_seconds)
        known.line.add(num_bytes, seconds, _KEPT_WEIGHT * aged)
        known.computed_seconds = 0.0

    def should_load(self, medium: str, num_tokens: int, num_bytes: int) -> bool:
        """Whether `num_tokens` tokens, `num_bytes` on the medium, are to be loaded rather than computed."""
        known = self._media.get(medium)
        if known is None or self._tokens == 0 or known.computed_seconds >= self._retry_seconds:
            return True
        return known.line.at(num_bytes) <= self._seconds / self._tokens * num_tokens

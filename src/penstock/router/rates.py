"""How long an instance takes for a number of tokens, measured from the requests that pass through the router. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

_KEPT = 0.9
"""The weight that earlier measurements keep at each new one."""
_FORGOTTEN_AFTER = 60.0
"""Seconds. A rate measured in a bad moment would otherwise keep away the requests that could correct it."""
_LEAST_SPREAD = 0.01
"""Of the squared mean: below, the lengths are too equal for a line."""


@dataclass(slots=True)
class Rate:
    """A line through measured pairs of tokens and seconds (least squares), the later ones with the greater weight. Its
    height at 0 tokens is what every request takes. Unknown before the first measurement, and a minute after the last.
    """

    _measured_at: float = -_FORGOTTEN_AFTER
    # Weighted sums: of 1, tokens, seconds, squared tokens, and tokens by seconds.
    _sums: list[float] = field(default_factory=lambda: [0.0] * 5)

    def add(self, num_tokens: int, seconds: float, now: float) -> None:
        kept = _KEPT if self.is_known(now) else 0.0
        new = (1.0, num_tokens, seconds, num_tokens * num_tokens, num_tokens * seconds)
        self._sums = [kept * old + each for old, each in zip(self._sums, new, strict=True)]
        self._measured_at = now

    def is_known(self, now: float) -> bool:
        return now - self._measured_at < _FORGOTTEN_AFTER

    def line(self) -> tuple[float, float]:
        """Returns the seconds for 0 tokens, and for each token; neither is negative. It must have been measured."""
        weight, tokens, seconds, squares, products = self._sums
        spread = weight * squares - tokens * tokens
        if spread <= _LEAST_SPREAD * tokens * tokens:
            return (0.0, seconds / tokens) if tokens else (seconds / weight, 0.0)
        slope = (weight * products - tokens * seconds) / spread
        if slope < 0.0:
            return seconds / weight, 0.0
        base = (seconds - slope * tokens) / weight
        return (base, slope) if base >= 0.0 else (0.0, products / squares)

    def seconds(self, num_tokens: int) -> float:
        base, slope = self.line()
        return base + slope * num_tokens

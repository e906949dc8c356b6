"""The axes of a chart: values to positions, and round values for ticks."""

import math
from collections.abc import Callable

_FACTORS = (1, 2, 5)
_QUARTERS = (1, 1.25, 1.5, 1.75)  # between powers of 2
_LETTER = 0.6  # mean width of a letter, in heights of the text


class Axis:
    """Maps values from low to high to positions from start to end; low may equal high.

    `log_base` is 2 or 10 for a logarithmic scale, whose values are positive; None for a linear one.
    """

    def __init__(
        self, low: float, high: float, start: float, end: float, *, log_base: int | None = None
    ) -> None:
        self.low, self.high, self.log_base = low, high, log_base
        self._scale: Callable[[float], float] = float if log_base is None else math.log
        span = self._scale(high) - self._scale(low)
        self.length = abs(end - start)
        self._start, self._slope = start, (end - start) / (span or 1.0)

    def __call__(self, value: float) -> float:
        """The position of a value."""
        return self._start + self._slope * (self._scale(value) - self._scale(self.low))

    def ticks(self, most: int = 7) -> list[float]:
        """At most this many round values on the axis."""
        found = self._log_ticks(most) if self.log_base else []
        found = found if len(found) > 1 else self._linear_ticks(most)
        return found[:: max(1, math.ceil(len(found) / most))]

    def _log_ticks(self, most: int) -> list[float]:
        base = float(self.log_base or 10)
        first = math.floor(math.log(self.low, base)) - 1
        last = math.ceil(math.log(self.high, base)) + 1
        powers = self._within([base**power for power in range(first, last + 1)])
        if len(powers) > most / 2:
            return powers
        factors = _QUARTERS if base == 2 else _FACTORS
        return self._within([f * base**p for p in range(first, last + 1) for f in factors])

    def _linear_ticks(self, most: int) -> list[float]:
        span = self.high - self.low or abs(self.high) or 1.0
        unit = 10.0 ** math.floor(math.log10(span / most))
        step = unit * next((f for f in _FACTORS if span / (unit * f) <= most - 1), 10)
        first, last = math.ceil(self.low / step), math.floor(self.high / step)
        return [step * i for i in range(first, last + 1)] or [self.low]

    def _within(self, values: list[float]) -> list[float]:
        return [value for value in values if self.low <= value <= self.high]


def number_text(value: float) -> str:
    """The text of a tick."""
    return f"{value:,.0f}" if abs(value) >= 10 else f"{value:.6g}"


def text_width(text: str, size: float) -> float:
    """An upper estimate of the width of a text of this font size."""
    return _LETTER * size * len(text)

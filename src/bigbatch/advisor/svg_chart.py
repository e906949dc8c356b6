"""A small chart as SVG, whose colours are those of the page."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 640, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 14, 44
_FACTORS = (1, 2, 5)
_MAX_TICKS = 7


@dataclass(frozen=True)
class Line:
    """A line through points (x, y)."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Mark:
    """A dashed line at one x or one y, with its name."""

    name: str
    x: float | None = None
    y: float | None = None


def log_chart(
    lines: Sequence[Line], marks: Sequence[Mark], *, x: str, y: str, log_x: bool = False
) -> str:
    """A chart whose y axis, and x axis if asked, is logarithmic.

    Args:
        lines: with positive y; x too if it is logarithmic.
        marks: what to compare them with.
        x: name of the x axis.
        y: name of the y axis.
        log_x: whether x is logarithmic.
    """
    lines = [Line(line.name, [p for p in line.points if p[1] > 0]) for line in lines]
    points = [point for line in lines for point in line.points]
    xs = [p[0] for p in points] + [mark.x for mark in marks if mark.x is not None]
    ys = [p[1] for p in points] + [mark.y for mark in marks if mark.y is not None]
    if not points:
        return ""
    across = _Axis(min(xs), max(xs), _LEFT, _WIDTH - _RIGHT, is_log=log_x)
    up = _Axis(min(ys) / 1.1, max(ys) * 1.1, _HEIGHT - _BOTTOM, _TOP, is_log=True)
    parts = [*_grid(across, up, x, y), *_marks(marks, across, up)]
    for line in lines:
        path = " ".join(f"{across(a):.1f},{up(b):.1f}" for a, b in line.points)
        parts.append(f'<polyline class="line" points="{path}"/>')
    title = escape(f"{', '.join(line.name for line in lines)}: {y} by {x}")
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{title}">'
        f"{''.join(parts)}</svg>"
    )


class _Axis:
    """Maps values to pixels."""

    def __init__(self, low: float, high: float, start: float, end: float, *, is_log: bool) -> None:
        self.low, self.high, self.is_log = low, high, is_log
        self._scale: Callable[[float], float] = math.log if is_log else float
        span = self._scale(high) - self._scale(low)
        self._start, self._slope = start, (end - start) / (span or 1.0)

    def __call__(self, value: float) -> float:
        return self._start + self._slope * (self._scale(value) - self._scale(self.low))

    @property
    def ticks(self) -> list[float]:
        """Round values on the axis, at most seven."""
        found = self._log_ticks() if self.is_log else self._linear_ticks()
        return found[:: max(1, math.ceil(len(found) / _MAX_TICKS))]

    def _log_ticks(self) -> list[float]:
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        every = [f * 10.0**power for power in range(first, last + 1) for f in _FACTORS]
        return [value for value in every if self.low <= value <= self.high]

    def _linear_ticks(self) -> list[float]:
        span = self.high - self.low or 1.0
        unit = 10.0 ** math.floor(math.log10(span / 2))
        step = unit * next((f for f in _FACTORS if span / (unit * f) <= _MAX_TICKS), 10)
        first, last = math.ceil(self.low / step), math.floor(self.high / step)
        return [step * i for i in range(first, last + 1)]


def _grid(across: _Axis, up: _Axis, x: str, y: str) -> Iterator[str]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    for value in up.ticks:
        at = f"{up(value):.1f}"
        yield f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{at}" y2="{at}"/>'
        yield f'<text x="{_LEFT - 6}" y="{at}" dy=".32em" text-anchor="end">{value:,.4g}</text>'
    for value in across.ticks:
        at = f"{across(value):.1f}"
        yield f'<text x="{at}" y="{bottom + 16}" text-anchor="middle">{value:,.6g}</text>'
    yield f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>'
    middle = (_LEFT + right) / 2
    yield f'<text x="{middle}" y="{_HEIGHT - 8}" text-anchor="middle">{escape(x)}</text>'
    yield f'<text x="{_LEFT + 4}" y="{_TOP + 8}">{escape(y)}</text>'


def _marks(marks: Sequence[Mark], across: _Axis, up: _Axis) -> Iterator[str]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    for number, mark in enumerate(marks):
        name = escape(mark.name)
        if mark.y is not None:
            at = up(mark.y)
            yield f'<line class="mark" x1="{_LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>'
            yield f'<text x="{right - 4}" y="{at - 5:.1f}" text-anchor="end">{name}</text>'
        if mark.x is not None:
            at = across(mark.x)
            yield f'<line class="mark" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{bottom}"/>'
            yield f'<text x="{at + 5:.1f}" y="{_TOP + 26 + 16 * number}">{name}</text>'

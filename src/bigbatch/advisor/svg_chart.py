"""A small chart as SVG, whose colours are those of the page."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from bigbatch.log.chart_axis import Axis

_WIDTH, _HEIGHT = 640, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 14, 44


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
    across = Axis(min(xs), max(xs), _LEFT, _WIDTH - _RIGHT, log_base=10 if log_x else None)
    up = Axis(min(ys) / 1.1, max(ys) * 1.1, _HEIGHT - _BOTTOM, _TOP, log_base=10)
    parts = [*_grid(across, up, x, y), *_marks(marks, across, up)]
    for line in lines:
        path = " ".join(f"{across(a):.1f},{up(b):.1f}" for a, b in line.points)
        parts.append(f'<polyline class="line" points="{path}"/>')
    title = escape(f"{', '.join(line.name for line in lines)}: {y} by {x}")
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{title}">'
        f"{''.join(parts)}</svg>"
    )


def _grid(across: Axis, up: Axis, x: str, y: str) -> Iterator[str]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    for value in up.ticks():
        at = f"{up(value):.1f}"
        yield f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{at}" y2="{at}"/>'
        yield f'<text x="{_LEFT - 6}" y="{at}" dy=".32em" text-anchor="end">{value:,.4g}</text>'
    for value in across.ticks():
        at = f"{across(value):.1f}"
        yield f'<text x="{at}" y="{bottom + 16}" text-anchor="middle">{value:,.6g}</text>'
    yield f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>'
    middle = (_LEFT + right) / 2
    yield f'<text x="{middle}" y="{_HEIGHT - 8}" text-anchor="middle">{escape(x)}</text>'
    yield f'<text x="{_LEFT + 4}" y="{_TOP + 8}">{escape(y)}</text>'


def _marks(marks: Sequence[Mark], across: Axis, up: Axis) -> Iterator[str]:
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

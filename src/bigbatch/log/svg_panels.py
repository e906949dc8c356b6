"""Panels of curves as SVG, whose colours are those of the page."""

import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import groupby

from bigbatch.chart_axis import Axis, number_text
from bigbatch.log.curve_series import Curve, Panel, label_ends, target_text
from bigbatch.log.label_places import spread, text_width
from bigbatch.log.line_styles import LineStyle, style_of

WIDTH, HEIGHT = 400, 250
TEXT = 11.5  # font size, as in the style of the page
_LEFT, _TOP, _BOTTOM = 46, 8, 36
_LEADER = 12  # width of the lines from the ends of curves to their labels
_LABEL_GAP = 1.15 * TEXT
_LINE_WIDTH = 1.8
_TICKS = {"x": 4, "y": 6}


def panel_svg(panel: Panel, labels: Sequence[str]) -> str:
    """One panel: grid, bands, lines, and a label at the end of each line.

    Args:
        panel: what it shows.
        labels: short names of all arms.
    """
    names = [labels[curve.arm] for curve in panel.curves]
    names += [target_text(target) for target in panel.targets]
    right = WIDTH - _LEADER - max((text_width(name, TEXT) for name in names), default=0) - 2
    across = Axis(*panel.x_range, _LEFT, right)
    up = Axis(*panel.y_range, HEIGHT - _BOTTOM, _TOP, log_base=panel.log_base)
    parts = [
        *grid(across, up, panel.x_label),
        *(part for curve in panel.curves for part in _band(curve, across, up)),
        *_targets(panel.targets, across, up),
        *(part for curve in panel.curves for part in _lines(curve, across, up)),
        *_labels(panel, names, across, up),
    ]
    scales = f'data-x="{across.low:.6g} {across.high:.6g} {_LEFT} {right:.1f}" '
    scales += f'data-y="{up.low:.6g} {up.high:.6g} {HEIGHT - _BOTTOM} {_TOP}"'
    scales += " data-log" * (panel.log_base is not None)
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" {scales} '
        f'aria-label="{escape(f"{panel.title} by {panel.x_label}")}">{"".join(parts)}'
        f'<circle class="dot" r="3.5"/></svg>'
    )


def swatch_svg(style: LineStyle, marker: str = "") -> str:
    """A short line in the style of an arm, for a key."""
    line = f'<line class="line" x1="1" x2="33" y1="6" y2="6"{dashes(style)}/>'
    drawn = marker_svg(marker, 17, 6) if marker else line
    return f'<svg class="swatch" viewBox="0 0 34 12" aria-hidden="true">{drawn}</svg>'


def grid(across: Axis, up: Axis, x_label: str) -> Iterator[str]:
    """Lines and numbers of both axes, and the name of the x axis."""
    left, right, bottom = across(across.low), across(across.high), up(up.low)
    for value in up.ticks(_TICKS["y"]):
        at = f"{up(value):.1f}"
        yield f'<line class="grid" x1="{left:g}" x2="{right:.1f}" y1="{at}" y2="{at}"/>'
        anchor = 'dy=".32em" text-anchor="end"'
        yield f'<text x="{left - 5:g}" y="{at}" {anchor}>{number_text(value)}</text>'
    for value in across.ticks(_TICKS["x"]):
        at = f"{across(value):.1f}"
        yield f'<text x="{at}" y="{bottom + 14:g}" text-anchor="middle">{number_text(value)}</text>'
    yield f'<line class="axis" x1="{left:g}" x2="{right:.1f}" y1="{bottom:g}" y2="{bottom:g}"/>'
    middle = (left + right) / 2
    yield (
        f'<text x="{middle:.1f}" y="{bottom + 29:g}" text-anchor="middle">{escape(x_label)}</text>'
    )


def marker_svg(marker: str, x: float, y: float) -> str:
    """A marker by its letter in matplotlib."""
    return f'<path class="marker" d="{_MARKER_PATHS[marker].format(f"M{x:.1f} {y:.1f}")}"/>'


_MARKER_PATHS = {  # after the center
    "o": "{}m-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",
    "s": "{}m-3.5-3.5h7v7h-7z",
    "D": "{}m0-5l5 5l-5 5l-5-5z",
    "^": "{}m0-5l4.6 8.5h-9.2z",
    "v": "{}m0 5l4.6-8.5h-9.2z",
    "P": "{}m-1.5-4.5h3v3h3v3h-3v3h-3v-3h-3v-3h3z",
    "X": "{}m0-2l2.5-2.5l2 2l-2.5 2.5l2.5 2.5l-2 2l-2.5-2.5l-2.5 2.5l-2-2l2.5-2.5l-2.5-2.5l2-2z",
}


def _band(curve: Curve, across: Axis, up: Axis) -> Iterator[str]:
    path = "".join(
        f"M{_path([(p.x, p.high) for p in part] + [(p.x, p.low) for p in part[::-1]], across, up)}z"
        for part in curve.bands
    )
    if path:
        yield f'<path class="band {_color(curve)}" data-arm="{curve.arm}" d="{path}"/>'


def _lines(curve: Curve, across: Axis, up: Axis) -> Iterator[str]:
    parts = [
        f'<g class="arm {_color(curve)}" data-arm="{curve.arm}" data-name="{escape(curve.name)}">'
    ]
    parts += _interval([(p.x, p.low) for p in curve.interval], across, up)
    parts += _interval([(p.x, p.high) for p in curve.interval], across, up)
    for segment in curve.segments:
        line = _path([(p.x, p.center) for p in segment], across, up)
        if len(segment) == 1:
            line += f" {line}"  # a round dot
        parts.append(f'<polyline class="line" points="{line}"{dashes(style_of(curve.arm))}/>')
    yield "".join([*parts, "</g>"])


def _interval(ends: list[tuple[float, float]], across: Axis, up: Axis) -> Iterator[str]:
    """One end of a confidence interval, where it lies in the panel."""
    for inside, part in groupby(ends, lambda end: up.low <= end[1] <= up.high):
        if inside:
            yield f'<polyline class="interval" points="{_path(part, across, up)}"/>'


def _targets(targets: Iterable[float], across: Axis, up: Axis) -> Iterator[str]:
    left, right = across(across.low), across(across.high)
    for target in targets:
        y = f"{up(target):.1f}"
        yield f'<line class="target" x1="{left:g}" x2="{right:.1f}" y1="{y}" y2="{y}"/>'


def _labels(panel: Panel, names: list[str], across: Axis, up: Axis) -> Iterator[str]:
    """Labels in a column on the right, and a line to each from the end of its curve."""
    ends = label_ends(panel)
    heights = [_inside(up, y) for _, y in ends]
    places = spread(heights, _LABEL_GAP, _TOP + 4, HEIGHT - _BOTTOM - 2)
    if places is None:  # the key names them
        return
    right = across(across.high)
    for place, name, (x, _), y, curve in zip(
        places, names, ends, heights, [*panel.curves, *[None] * len(panel.targets)], strict=True
    ):
        style = f'{_color(curve)}" data-arm="{curve.arm}' if curve else "of-target"
        yield (
            f'<g class="label {style}"><path class="leader" d="M{across(x):.1f} {y:.1f}'
            f'H{right:.1f}L{right + _LEADER - 3:.1f} {place:.1f}"/>'
            f'<text x="{right + _LEADER:.1f}" y="{place:.1f}" dy=".32em">{escape(name)}</text></g>'
        )


def _path(points: Iterable[tuple[float, float]], across: Axis, up: Axis) -> str:
    """Positions with two digits, from which the page's script reads values."""
    return " ".join(f"{across(x):.2f},{_inside(up, y):.2f}" for x, y in points)


def _inside(up: Axis, value: float) -> float:
    """The position of a value, at the edge of the panel where it lies outside."""
    return up(min(max(value, up.low), up.high)) if not math.isnan(value) else up(up.low)


def _color(curve: Curve) -> str:
    return f"c{style_of(curve.arm).color}"


def dashes(style: LineStyle) -> str:
    """The attribute that dashes a line."""
    lengths = " ".join(f"{_LINE_WIDTH * length:g}" for length in style.dashes)
    return f' stroke-dasharray="{lengths}"' if lengths else ""

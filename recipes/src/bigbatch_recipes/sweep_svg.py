"""The chart of a sweep as SVG, whose colours are those of the page."""

from html import escape

from bigbatch.log.chart_axis import Axis
from bigbatch.log.label_places import Box
from bigbatch.log.line_styles import MARKERS, style_of
from bigbatch.log.svg_panels import TEXT, dashes, grid, marker_svg
from bigbatch_recipes.sweep_chart import Dot, Group, SweepChart

_LEFT, _TOP, _RIGHT, _BOTTOM = 46, 8, 8, 38
SIZES = {"wide": (900, 440), "narrow": (380, 400)}  # for windows of either kind


def sweep_svg(chart: SweepChart, kind: str) -> str:
    """The chart in one of `SIZES`; the style of the page shows the one that fits the window."""
    width, height = SIZES[kind]
    frame = Box(_LEFT, _TOP, width - _RIGHT, height - _BOTTOM)
    across, up = chart.axes(frame)
    front = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in chart.front_steps())
    numbered = [(number, dot) for number, group in enumerate(chart.groups) for dot in group.dots]
    boxes = chart.label_boxes(frame, TEXT)
    parts = [
        *grid(across, up, "average batch, samples a step"),
        f'<polyline class="front" points="{front}"/>' if front else "",
        *(_line(number, group, across, up) for number, group in enumerate(chart.groups)),
        *(_point(number, dot, across, up) for number, dot in numbered),
        *(
            _label(number, dot, box, across, up)
            for (number, dot), box in zip(numbered, boxes, strict=True)
            if box is not None
        ),
    ]
    return (
        f'<svg class="{kind}" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(chart.score)} by average batch">{"".join(parts)}</svg>'
    )


def _line(number: int, group: Group, across: Axis, up: Axis) -> str:
    if not group.is_line:
        return ""
    style = style_of(number)
    line = " ".join(f"{across(dot.batch):.1f},{up(dot.center):.1f}" for dot in group.dots)
    return f'<polyline class="line c{style.color}" points="{line}"{dashes(style)}/>'


def _point(number: int, dot: Dot, across: Axis, up: Axis) -> str:
    x, low, high = across(dot.batch), up(dot.low), up(dot.high)
    bar = f'<line class="whisker" x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}"/>'
    marker = marker_svg(MARKERS[number % len(MARKERS)], x, up(dot.center))
    title = f"<title>{escape(dot.text)}</title>"
    return f'<g class="point c{style_of(number).color}">{title}{bar}{marker}</g>'


def _label(number: int, dot: Dot, box: Box, across: Axis, up: Axis) -> str:
    x, y = across(dot.batch), up(dot.center)
    near_x, near_y = min(max(x, box.left), box.right), min(max(y, box.top), box.bottom)
    middle, height = (box.left + box.right) / 2, (box.top + box.bottom) / 2
    return (
        f'<g class="c{style_of(number).color}">'
        f'<path class="leader" d="M{x:.1f} {y:.1f}L{near_x:.1f} {near_y:.1f}"/>'
        f'<text class="point-label" x="{middle:.1f}" y="{height:.1f}" dy=".35em" '
        f'text-anchor="middle">{escape(dot.label)}</text></g>'
    )

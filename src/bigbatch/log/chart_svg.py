"""Charts as static SVG, whose colours are CSS classes and follow the theme of the page.

    losses = Panel("loss", "samples", [Series("SGD", xs, ys, low=least, high=most)], y_log=10)
    Path("losses.svg").write_text(svg([losses], standalone=True))

A page that shows charts without `standalone` includes `stylesheet()`.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from importlib import resources
from itertools import groupby, pairwise
from typing import NamedTuple, Protocol, TypeVar

from bigbatch.log.atomic_files import GENERATOR
from bigbatch.log.chart import Panel, Series, is_shown
from bigbatch.log.chart_axis import Axis, number_text, text_width
from bigbatch.log.series_style import style_of

Line = Sequence[tuple[float, float]]
T = TypeVar("T")

TEXT = 11.5  # font size, as in chart.css
EDGE = 8  # width of the empty edge of a chart
TITLE, _TICKS, _AXIS_LABEL = 19, 20, 16  # heights of lines of text
_MANY = 200  # points of which each is transparent
_KEY_LINE = 19
_TICK_PITCH = 55, 34  # least distance of ticks of the x and the y axis
_GAP = 14  # between charts


class Drawing(NamedTuple):
    """The inside of an <svg> element, its size and further attributes."""

    width: float
    height: float
    attributes: str
    parts: list[str]

    def element(self, x: float | None = None, y: float | None = None) -> str:
        """The element, at a place within another one."""
        size = f"{self.width:g} {self.height:g}"
        place = ""
        if x is not None:
            place = f'x="{x:g}" y="{y:.1f}" width="{self.width:g}" height="{self.height:g}" '
        body = "".join(self.parts)
        return f'<svg {place}viewBox="0 0 {size}" {self.attributes}>{body}</svg>'


class OtherChart(Protocol):
    """A chart of another kind than `Panel`: anything with a title and a drawing of its own."""

    @property
    def title(self) -> str:
        """What it shows."""

    def drawing(self, *, title: bool) -> Drawing:
        """The chart, with its title above where that is asked for."""


def svg(
    charts: Sequence[Panel | OtherChart],
    *,
    columns: int = 1,
    key: bool = False,
    titles: bool = True,
    standalone: bool = False,
) -> str:
    """One <svg> element.

    In one column it is readable in a window of 400 pixels; in n its text is n times as small there.

    Args:
        charts: row by row.
        columns: charts in a row.
        key: whether a key above them names the series.
        titles: whether the charts' titles are drawn.
        standalone: whether it is a file of its own, which has the style sheet and a background.
    """
    series = [one for chart in charts if isinstance(chart, Panel) for one in chart.series]
    styles: dict[str, int] = {}  # numbers by names, in the order of appearance
    for line in series:
        styles.setdefault(line.name, len(styles) if line.style is None else line.style)
    drawings = [
        _PanelDrawing(chart, styles, title=titles).drawing()
        if isinstance(chart, Panel)
        else chart.drawing(title=titles)
        for chart in charts
    ]
    if len(drawings) == 1 and not key and not standalone:
        return drawings[0].element()
    edge: float = EDGE if standalone else 0
    pitch = max(one.width for one in drawings) + _GAP
    width = 2 * edge + columns * pitch - _GAP
    parts = list(_key(series, styles, edge, width)) if key else []
    top = edge + _KEY_LINE * len(parts)
    for start in range(0, len(drawings), columns):
        row = drawings[start : start + columns]
        parts += [one.element(edge + place * pitch, top) for place, one in enumerate(row)]
        top += max(one.height for one in row) + _GAP
    height = math.ceil(top - _GAP + edge)
    if standalone:
        parts.insert(0, f"<style>{stylesheet()}</style>")
        parts.insert(1, f'<rect class="page" width="{width}" height="{height}"/>')
    title = escape(", ".join(chart.title for chart in charts))
    file = (
        f'data-generator="{GENERATOR}" xmlns="http://www.w3.org/2000/svg" '
        f'width="{width:g}" height="{height}" '
    )
    return (
        f'<svg {file if standalone else ""}viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{title}">{"".join(parts)}</svg>\n'
    )


def stylesheet() -> str:
    """The style of charts, and the colours of a page: light, or dark where the reader has so."""
    return resources.files("bigbatch.log").joinpath("chart.css").read_text()


def swatch(style: int) -> str:
    """A short line in a style, for the key of a page."""
    sample = _sample(style, marker=False)
    return f'<svg class="swatch" viewBox="0 0 34 12" aria-hidden="true">{sample}</svg>'


def _key(
    series: Sequence[Series], styles: dict[str, int], edge: float, width: float
) -> Iterator[str]:
    """The lines of a key."""
    named = {one.name: one for one in reversed(series) if one.name}
    x, y, line = edge, edge, ""
    for name, number in styles.items():
        reach = 60 + text_width(name, TEXT)
        if line and x + reach > width:
            yield line
            x, y, line = edge, y + _KEY_LINE, ""
        if name:
            line += f'<g transform="translate({x:g} {y:g})">'
            line += _sample(number, marker=named[name].kind == "points")
            line += f"{text_at(40, 10, name, 'start')}</g>"
            x += reach
    yield line


def _sample(style: int, *, marker: bool) -> str:
    color, dash, path = style_of(style)
    if marker:
        return f'<path class="marker {color}" d="M17 6{path}"/>'
    return f'<line class="line {color} {dash}" x1="1" x2="33" y1="6" y2="6"/>'


def text_at(x: float, y: float, text: str, anchor: str = "middle", css: str = "") -> str:
    """A text at a place, which is its start, its middle or its end."""
    css = f'class="{css}" ' if css else ""
    return f'<text {css}x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def title_line(title: str) -> str:
    """The title of a chart, within `TITLE` below its edge."""
    return text_at(2, EDGE + 6, title, "start", "title")


def names_width(names: Iterable[str]) -> float:
    """The width left of a plot whose rows have these names."""
    return 10 + max((text_width(name, 0.95 * TEXT) for name in names), default=0)


def row_name(left: float, y: float, name: str) -> str:
    """The name of a row, or a number of the y axis, left of a plot."""
    return text_at(left - 5, y + 0.35 * TEXT, name, "end")


def x_numbers(axis: Axis, bottom: float, width: float) -> Iterator[str]:
    """The numbers of an x axis below a plot, within the width of the chart."""
    for value, text in _ticks(axis, _TICK_PITCH[0]):
        yield text_at(min(axis(value), width - text_width(text, TEXT) / 2), bottom + 14, text)


class _PanelDrawing:
    """The positions of a panel, and its parts."""

    def __init__(self, panel: Panel, styles: dict[str, int], *, title: bool) -> None:
        self.panel, self._styles, self._title = panel, styles, title
        width, height = panel.size
        top = EDGE + title * TITLE + bool(panel.y_label) * _AXIS_LABEL
        bottom = height - _TICKS - bool(panel.x_label) * _AXIS_LABEL
        vertical = (top, bottom) if panel.y_names else (bottom, top)
        self.up = Axis(*panel.y_ends, *vertical, log_base=panel.y_log)
        self._y_ticks = [*enumerate(panel.y_names)] or _ticks(self.up, _TICK_PITCH[1])
        left = names_width(text for _, text in self._y_ticks)
        right = width - EDGE
        self.across = Axis(*panel.x_ends, left, right, log_base=panel.x_log)
        self._frame = (left, top, right, bottom)

    def drawing(self) -> Drawing:
        """All parts, and the scales from which the script of a page reads values."""
        panel, (left, top, right, bottom) = self.panel, self._frame
        parts = [
            *self._grid(),
            *(self._band(one) for one in panel.series if one.low and not one.has_bars),
            *self._marks(),
            *(self._series(one) for one in panel.series),
            '<circle class="dot" r="3.5"/>',
        ]
        attributes = (
            f'role="img" aria-label="{escape(panel.title)} by {escape(panel.x_label)}" '
            f'data-x="{self.across.low:.6g} {self.across.high:.6g} {left:.6g} {right:.6g}" '
            f'data-y="{self.up.low:.6g} {self.up.high:.6g} {bottom} {top}" '
            f'data-log="{"x" * bool(panel.x_log)}{"y" * bool(panel.y_log)}"'
        )
        return Drawing(*panel.size, attributes, parts)

    def _grid(self) -> Iterator[str]:
        """Title, lines and numbers of both axes, and their names."""
        panel, (left, top, right, bottom) = self.panel, self._frame
        if self._title:
            yield title_line(panel.title)
        for value, text in self._y_ticks:
            y = self.up(value)
            yield _line("grid", left, y, right, y)
            yield row_name(left, y, text)
        yield from x_numbers(self.across, bottom, panel.size[0])
        yield _line("axis", left, bottom, right, bottom)
        if panel.x_label:
            yield text_at((left + right) / 2, bottom + 29, panel.x_label)
        if panel.y_label:
            yield text_at(2, top - 7, panel.y_label, "start")

    def _marks(self) -> Iterator[str]:
        left, top, right, bottom = self._frame
        places = [self.across(mark.x) for mark in self.panel.marks if mark.x is not None]
        for number, mark in enumerate(self.panel.marks):
            if mark.y is not None:
                y = self.up(mark.y)
                yield _line("mark", left, y, right, y)
                yield text_at(right - 2, y - 4, mark.name, "end")
            if mark.x is not None:
                x = self.across(mark.x)
                yield _line("mark", x, top, x, bottom)
                width = 5 + text_width(mark.name, TEXT)
                is_left = x == min(places) if len(places) > 1 else x > (left + right) / 2
                is_left = x + width > right or (is_left and x - width > left)
                side = -1 if is_left else 1
                anchor = "start" if side == 1 else "end"
                yield text_at(x + 5 * side, top + 12 + 14 * number, mark.name, anchor)

    def _band(self, one: Series) -> str:
        points = zip(one.x, one.low, one.high, strict=True)
        parts = _runs(points, lambda point: all(map(math.isfinite, point)))
        path = "".join(
            f"M{self._path([(x, high) for x, _, high in part])} "
            f"{self._path([(x, low) for x, low, _ in part[::-1]])}z"
            for part in parts
        )
        number = self._number(one)
        color = style_of(number).color
        return f'<path class="band {color}" data-series="{number}" d="{path}"/>' if path else ""

    def _series(self, one: Series) -> str:
        number = self._number(one)
        color, dash, marker = style_of(number)
        lines = [self._path(line) for line in self._lines(one)]
        parts = [f'<polyline class="line {dash}" points="{line}"/>' for line in lines]
        if one.has_bars and one.low:
            parts += map(self._bar, one.x, one.low, one.x, one.high)
        if one.x_low:
            parts += map(self._bar, one.x_low, one.y, one.x_high, one.y)
        if one.kind == "points" or one.markers:
            parts += (self._marker(one, place, marker) for place in range(len(one.x)))
        name = f'data-series="{number}" data-name="{escape(one.name)}"'
        return f'<g class="series {color}" {name}>{"".join(parts)}</g>'

    def _lines(self, one: Series) -> Iterator[Line]:
        """The line without gaps; a single point is twice there, so that it is a dot."""
        points = zip(one.x, one.y, strict=True)
        for part in _runs(points, self._is_shown) if one.kind != "points" else ():
            if one.kind == "step":
                corners = [(x, y) for (x, _), (_, y) in pairwise(part)]
                yield [part[0], *(p for two in zip(corners, part[1:], strict=True) for p in two)]
            else:
                yield part if len(part) > 1 else part * 2

    def _bar(self, x1: float, y1: float, x2: float, y2: float) -> str:
        if any(map(math.isnan, (x1, y1, x2, y2))):
            return ""
        return _line("whisker", *self._inside(x1, y1), *self._inside(x2, y2))

    def _marker(self, one: Series, place: int, path: str) -> str:
        if not self._is_shown((one.x[place], one.y[place])):
            return ""
        x, y = self._inside(one.x[place], one.y[place])
        kind = " hollow" if one.hollow and one.hollow[place] else ""
        note = f"<title>{escape(one.notes[place])}</title>" if one.notes else ""
        faint = ' opacity=".2"' * (len(one.x) > _MANY)
        return f'<path class="marker{kind}"{faint} d="M{x:.1f} {y:.1f}{path}">{note}</path>'

    def _number(self, one: Series) -> int:
        return self._styles[one.name] if one.style is None else one.style

    def _is_shown(self, point: tuple[float, float]) -> bool:
        return is_shown(point[0], self.panel.x_log) and is_shown(point[1], self.panel.y_log)

    def _inside(self, x: float, y: float) -> tuple[float, float]:
        """The position of a point, at the edge of the panel where it lies outside."""
        across, up = self.across, self.up
        return across(_clamp(x, across.low, across.high)), up(_clamp(y, up.low, up.high))

    def _path(self, points: Line) -> str:
        """Positions with two digits, from which the script of a page reads values."""
        return " ".join(f"{x:.2f},{y:.2f}" for x, y in (self._inside(*point) for point in points))


def _ticks(axis: Axis, pitch: float) -> list[tuple[float, str]]:
    most = max(2, int(axis.length / pitch))
    return [(value, number_text(value)) for value in axis.ticks(most)]


def _runs(points: Iterable[T], is_shown: Callable[[T], bool]) -> list[list[T]]:
    """Successive points that are shown, without gaps."""
    return [list(part) for shown, part in groupby(points, is_shown) if shown]


def _line(css: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{css}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _clamp(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)

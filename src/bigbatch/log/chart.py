"""What a chart shows: series on two axes, or a heat map; chart_svg draws it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Literal

_MARGINS = 0.05, 0.04  # of the width around points; of the height
_ROOM = 4.0  # most by which a band extends a logarithmic scale


@dataclass(frozen=True)
class Series:
    """A line, steps or points. A value that is not finite leaves a gap.

    Args:
        name: its name in the key.
        x, y: its points.
        low, high: ends of a band around a line, or of the error bars of points.
        x_low, x_high: ends of horizontal error bars.
        kind: "step" holds the value of a point back to the point before it.
        bars: whether a line too has error bars in place of a band.
        markers: whether a line too has markers.
        dotted: a thin dotted line, as for the end of an interval.
        hollow: the points whose marker is hollow.
        style: number of its colour, dash and marker, or `NEUTRAL`; None for the number of its name
            among those of the whole figure. Give all styles of a figure, or none.
        label: text at the end of its line; None for the name of a line, "" for none.
        texts: a text near each point; one that finds no free place is left out.
        notes: a text that is shown while the pointer rests on each point.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    _: KW_ONLY
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    x_low: Sequence[float] = ()
    x_high: Sequence[float] = ()
    kind: Literal["line", "step", "points"] = "line"
    bars: bool = False
    markers: bool = False
    dotted: bool = False
    hollow: Sequence[bool] = ()
    style: int | None = None
    label: str | None = None
    texts: Sequence[str] = ()
    notes: Sequence[str] = ()

    @property
    def has_bars(self) -> bool:
        """Whether `low` and `high` are error bars, not a band."""
        return self.bars or self.kind == "points"

    @property
    def end_label(self) -> str:
        """The text at the end of the line."""
        if self.label is not None:
            return self.label
        return "" if self.dotted or self.kind == "points" else self.name


@dataclass(frozen=True)
class Mark:
    """A dotted line across a panel at one x or one y, with its name."""

    name: str
    _: KW_ONLY
    x: float | None = None
    y: float | None = None


@dataclass(frozen=True)
class Panel:
    """Series on two axes.

    Args:
        title: the quantity with its unit.
        x_label: name of the x axis.
        series: in the order of drawing.
        y_label: name of the y axis, above it.
        x_log, y_log: base of a logarithmic axis, 2 or 10; None for a linear one.
        x_range, y_range: ends of an axis; None for the range of all series.
        x_names, y_names: categories in place of numbers, from left to right and from top to bottom:
            position 0, 1 and so on.
        marks: what to compare the series with.
        end_labels: whether lines have a label at their end; False where a key names them.
        size: width and height; text is 11.5 high.
    """

    title: str
    x_label: str
    series: Sequence[Series]
    _: KW_ONLY
    y_label: str = ""
    x_log: int | None = None
    y_log: int | None = None
    x_range: tuple[float, float] | None = None
    y_range: tuple[float, float] | None = None
    x_names: Sequence[str] = ()
    y_names: Sequence[str] = ()
    marks: Sequence[Mark] = ()
    end_labels: bool = True
    size: tuple[int, int] = (400, 250)

    @property
    def x_ends(self) -> tuple[float, float]:
        """Ends of the x axis."""
        if self.x_names or self.x_range:
            return self.x_range or (-0.5, len(self.x_names) - 0.5)
        values = [x for one in self.series for x in (*one.x, *one.x_low, *one.x_high)]
        values += [mark.x for mark in self.marks if mark.x is not None]
        margin = any(one.kind == "points" for one in self.series) and _MARGINS[0]
        return _ends(values, [], self.x_log, margin)

    @property
    def y_ends(self) -> tuple[float, float]:
        """Ends of the y axis: of a logarithmic one, bands and dotted lines only near others."""
        if self.y_names or self.y_range:
            return self.y_range or (-0.5, len(self.y_names) - 0.5)
        values = [y for one in self.series if not one.dotted for y in one.y]
        values += [mark.y for mark in self.marks if mark.y is not None]
        bands = [y for one in self.series for y in (*one.low, *one.high)]
        bands += [y for one in self.series if one.dotted for y in one.y]
        return _ends(values, bands, self.y_log, _MARGINS[1])


@dataclass(frozen=True)
class HeatMap:
    """Values as shades of one colour.

    Args:
        title: the quantity.
        rows: names of the rows, from top to bottom.
        values: for each row, its values from left to right; one that is not finite is blank.
        columns: names of the columns; none for an axis of numbers.
        x_range: ends of that axis.
        x_label, y_label: names of the axes.
        low, high: ends of the shades; None for the least and the largest value.
        log: whether shades are logarithmic.
        text_of: the text in a cell; None for no text.
        width, row_height: the size; text is 11.5 high.
    """

    title: str
    rows: Sequence[str]
    values: Sequence[Sequence[float]]
    _: KW_ONLY
    columns: Sequence[str] = ()
    x_range: tuple[float, float] = (0.0, 1.0)
    x_label: str = ""
    y_label: str = ""
    low: float | None = None
    high: float | None = None
    log: bool = False
    text_of: Callable[[float], str] | None = None
    width: int = 400
    row_height: int = 14


def _ends(
    values: Sequence[float], bands: Sequence[float], log_base: int | None, margin: float
) -> tuple[float, float]:
    """Ends of an axis that shows all values with a margin, and bands."""
    values = [value for value in values if is_shown(value, log_base)]
    if not values:
        return (1.0, 2.0) if log_base else (0.0, 1.0)
    low, high = min(values), max(values)
    if log_base is None:
        bands = [value for value in bands if math.isfinite(value)]
        low, high = min([low, *bands]), max([high, *bands])
        room = margin * (high - low) if high > low else abs(high) / 2 or 1.0
        return low - room, high + room
    near = [value for value in bands if low / _ROOM <= value <= high * _ROOM]
    low, high = min([low, *near]), max([high, *near])
    room = max((high / low) ** margin, 1.1) if margin or high == low else 1.0
    return low / room, high * room


def is_shown(value: float, log_base: int | None) -> bool:
    """Whether an axis, logarithmic if it has a base, shows a value."""
    return math.isfinite(value) and (log_base is None or value > 0)

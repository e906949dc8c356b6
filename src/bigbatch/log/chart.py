"""What a chart shows: series on two axes; chart_svg draws it."""

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Literal

_MARGINS = 0.05, 0.04  # of the width around points; of the height
_ROOM = 4.0  # most by which a band extends a logarithmic scale
Ends = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """A line, steps or points. A value that is not finite leaves a gap."""

    name: str  # in a key
    x: Sequence[float]
    y: Sequence[float]
    _: KW_ONLY
    low: Sequence[float] = ()  # ends of a band around a line, or of the error bars of points
    high: Sequence[float] = ()
    x_low: Sequence[float] = ()  # ends of horizontal error bars
    x_high: Sequence[float] = ()
    # a step holds the value back to the one before
    kind: Literal["line", "step", "points"] = "line"
    bars: bool = False  # a line too has error bars in place of a band
    markers: bool = False  # a line too has markers
    hollow: Sequence[bool] = ()  # the points whose marker is hollow
    # number of its colour, dash and marker, or `NEUTRAL`; None for the number of its name among
    # those of the whole figure: give all styles of a figure, or none
    style: int | None = None
    notes: Sequence[str] = ()  # shown while the pointer rests on each point

    @property
    def has_bars(self) -> bool:
        """Whether `low` and `high` are error bars, not a band."""
        return self.bars or self.kind == "points"


@dataclass(frozen=True)
class Mark:
    """A dotted line across a panel at one x or one y, with its name."""

    name: str
    _: KW_ONLY
    x: float | None = None
    y: float | None = None


@dataclass(frozen=True)
class Panel:
    """Series on two axes."""

    title: str  # the quantity with its unit
    x_label: str
    series: Sequence[Series]  # in the order of drawing
    _: KW_ONLY
    y_label: str = ""  # above the axis
    x_log: int | None = None  # base of a logarithmic axis, 2 or 10
    y_log: int | None = None
    x_range: Ends | None = None  # None for the range of all series
    y_range: Ends | None = None
    y_names: Sequence[str] = ()  # categories from top to bottom, at 0, 1 and so on
    marks: Sequence[Mark] = ()  # what to compare the series with
    size: tuple[int, int] = (400, 250)  # text is 11.5 high

    @property
    def x_ends(self) -> Ends:
        """Ends of the x axis."""
        values = [x for one in self.series for x in (*one.x, *one.x_low, *one.x_high)]
        values += [mark.x for mark in self.marks if mark.x is not None]
        margin = any(one.kind == "points" for one in self.series) and _MARGINS[0]
        return self.x_range or _ends(values, [], self.x_log, margin)

    @property
    def y_ends(self) -> Ends:
        """Ends of the y axis: of a logarithmic one, bands only near other values."""
        if self.y_names or self.y_range:
            return self.y_range or (-0.5, len(self.y_names) - 0.5)
        values = [y for one in self.series for y in one.y]
        values += [mark.y for mark in self.marks if mark.y is not None]
        bands = [y for one in self.series for y in (*one.low, *one.high)]
        return _ends(values, bands, self.y_log, _MARGINS[1])


def _ends(
    values: Sequence[float], bands: Sequence[float], log_base: int | None, margin: float
) -> Ends:
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

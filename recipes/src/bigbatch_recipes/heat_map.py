"""Values as shades of one colour, in a chart that `bigbatch.log.chart_svg.svg` takes."""

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from html import escape
from itertools import groupby

from bigbatch.log.chart import Ends, is_shown
from bigbatch.log.chart_axis import Axis, number_text, text_width
from bigbatch.log.chart_svg import (
    EDGE,
    TEXT,
    TITLE,
    Drawing,
    names_width,
    row_name,
    text_at,
    title_line,
    x_numbers,
)

_ROW, _BELOW = 14, 36  # heights: of a row; of the numbers, the label and the key below the rows
_OPACITIES = [f"{0.04 + 0.86 * level / 11:.2f}" for level in range(12)]  # of the shades


@dataclass(frozen=True)
class HeatMap:
    """Positive values on a logarithmic scale of shades; one that is not finite is blank."""

    title: str
    rows: Sequence[str]  # names from top to bottom
    values: Sequence[Sequence[float]]  # for each row, from left to right
    _: KW_ONLY
    x_label: str
    x_range: Ends
    low: float  # ends of the shades
    high: float
    width: int  # text is 11.5 high

    def drawing(self, *, title: bool) -> Drawing:
        """The cells in the units of a cell, with names, numbers and key around them."""
        top = EDGE + title * TITLE
        bottom = top + len(self.rows) * _ROW
        left, right = names_width(self.rows), self.width - EDGE
        cell = (right - left) / len(self.values[0])
        parts = [title_line(self.title)] if title else []
        parts += (
            row_name(left, top + (place + 0.5) * _ROW, name) for place, name in enumerate(self.rows)
        )
        parts += x_numbers(Axis(*self.x_range, left, right), bottom, self.width)
        parts.append(f'<g transform="translate({left:.1f} {top}) scale({cell:.4f} {_ROW})">')
        parts += [*self._cells(), "</g>", *self._key(right, bottom + 21)]
        parts.append(text_at(left, bottom + 29, self.x_label, "start"))
        label = f'role="img" aria-label="{escape(self.title)}"'
        return Drawing(self.width, bottom + _BELOW, label, parts)

    def _cells(self) -> Iterator[str]:
        """One path for each shade."""
        scale = Axis(self.low, self.high, 0, len(_OPACITIES) - 1, log_base=10)

        def level_of(value: float) -> int | None:
            if not is_shown(value, scale.log_base):
                return None
            return round(scale(min(max(value, self.low), self.high)))

        cells: dict[int, str] = {}
        for row, values in enumerate(self.values):
            column = 0
            for level, same in groupby(values, level_of):
                width = len([*same])
                if level is not None:
                    cells[level] = f"{cells.get(level, '')}M{column} {row}h{width}v1h-{width}z"
                column += width
        for level, path in sorted(cells.items()):
            yield f'<path class="level" fill-opacity="{_OPACITIES[level]}" d="{path}"/>'

    def _key(self, right: float, top: float) -> Iterator[str]:
        """The shades with the values at both ends, left of a place."""
        low, high = (number_text(float(f"{end:.3g}")) for end in (self.low, self.high))
        right -= text_width(high, TEXT) + 4
        left = right - 6 * len(_OPACITIES)
        yield text_at(left - 4, top + 9, low, "end")
        yield text_at(right + 4, top + 9, high, "start")
        for level, opacity in enumerate(_OPACITIES):
            yield (
                f'<rect class="level" fill-opacity="{opacity}" x="{left + 6 * level:.1f}" '
                f'y="{top:g}" width="6" height="10"/>'
            )

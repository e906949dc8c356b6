"""Colours, dashes and markers of series, which differ in black and white and for the colour-blind.

chart.css has the colours, light and dark: each has a contrast of 4.5 or more on its page.
"""

from typing import NamedTuple

NEUTRAL = -1  # the style of what others are compared with: grey
_COLORS, _DASHES = 7, 6
_MARKERS = (  # paths after their centre
    "m-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",
    "m-3.5-3.5h7v7h-7z",
    "m0-5l5 5l-5 5l-5-5z",
    "m0-5l4.6 8.5h-9.2z",
    "m0 5l4.6-8.5h-9.2z",
    "m-1.5-4.5h3v3h3v3h-3v3h-3v-3h-3v-3h3z",
    "m0-2l2.5-2.5l2 2l-2.5 2.5l2.5 2.5l-2 2l-2.5-2.5l-2.5 2.5l-2-2l2.5-2.5l-2.5-2.5l2-2z",
)


class SeriesStyle(NamedTuple):
    """The style of one series: 42 differ."""

    color: str  # CSS class, which sets `--own`
    dash: str  # CSS class
    marker: str  # path after the centre


def style_of(number: int) -> SeriesStyle:
    """The style with this number; `NEUTRAL` is grey."""
    if number == NEUTRAL:
        return SeriesStyle("neutral", "d0", _MARKERS[0])
    marker = _MARKERS[number % len(_MARKERS)]
    return SeriesStyle(f"c{number % _COLORS}", f"d{number % _DASHES}", marker)

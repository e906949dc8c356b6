"""Colours and dashes of arms, which differ for colour-blind readers and in black and white."""

from dataclasses import dataclass
from typing import Literal

# on a white and on a dark page; each has a contrast of 4.5 or more there
LIGHT = ("#0072b2", "#b34700", "#007a55", "#a03c78", "#7a5a00", "#5b6472", "#111111")
DARK = ("#5cb4e6", "#ff9350", "#2fcb9b", "#e79ac6", "#e8b93f", "#aab4c2", "#f5f5f5")
PAGES = ("#ffffff", "#14181f")
# lengths of dash and gap in widths of the line
DASHES = (
    (),
    (5.0, 2.0),
    (1.2, 1.4),
    (6.0, 1.6, 1.2, 1.6),
    (9.0, 2.0),
    (4.0, 1.4, 1.2, 1.4, 1.2, 1.4),
)
MARKERS = "osD^vPX"
LONGEST_NAME = 18  # letters of a label


@dataclass(frozen=True)
class LineStyle:
    """The style of one arm.

    Args:
        color: number of its colour in `LIGHT` and `DARK`.
        dashes: lengths of dash and gap; none for a solid line.
    """

    color: int
    dashes: tuple[float, ...]

    @property
    def line(self) -> Literal["solid"] | tuple[float, tuple[float, ...]]:
        """The line style for matplotlib."""
        return (0, self.dashes) if self.dashes else "solid"


def style_of(arm: int) -> LineStyle:
    """The style of the arm with this number; 42 differ."""
    return LineStyle(arm % len(LIGHT), DASHES[arm % len(DASHES)])


def short_names(names: list[str]) -> list[str]:
    """Names for labels: whole, without the settings that all share, or numbers that a key lists."""
    parts = [name.split(",") for name in names]
    shared = set(parts[0]).intersection(*parts[1:]) if len(parts) > 1 else set()
    without = [",".join(part for part in one if part not in shared) for one in parts]
    for candidate in (names, without):
        if all(0 < len(name) <= LONGEST_NAME for name in candidate):
            return candidate
    return [str(number) for number in range(1, len(names) + 1)]

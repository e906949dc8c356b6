"""Places of labels that never overlap."""

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

_LETTER = 0.6  # mean width of a letter, in heights of the text
_RINGS = (1.0, 2.2, 3.6, 5.2, 7.0)  # distances of a label from its point, in heights of the text
_SIDES = ((1, -1), (1, 1), (-1, -1), (-1, 1), (0, -1), (0, 1), (1, 0), (-1, 0))


class Box(NamedTuple):
    """A rectangle; y grows downwards."""

    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: "Box") -> bool:
        """Whether the two share an area."""
        is_beside = self.right <= other.left or other.right <= self.left
        return not is_beside and self.top < other.bottom and other.top < self.bottom

    def contains(self, other: "Box") -> bool:
        """Whether the other lies inside."""
        is_inside = self.left <= other.left and other.right <= self.right
        return is_inside and self.top <= other.top and other.bottom <= self.bottom


def text_width(text: str, size: float) -> float:
    """An upper estimate of the width of a text of this font size."""
    return _LETTER * size * len(text)


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float] | None:
    """Places at least `gap` apart in [low, high], as near to the wanted ones as possible.

    In the order of `wanted`; None where so many do not fit. They minimize the sum of the squared
    distances (isotonic regression by pooling adjacent violators), then are moved into the range.
    """
    top = high - gap * (len(wanted) - 1)
    if top < low:
        return None
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    blocks: list[tuple[float, int]] = []  # mean and size of places that touch
    for rank, index in enumerate(order):
        mean, size = wanted[index] - rank * gap, 1
        while blocks and blocks[-1][0] >= mean:
            other, count = blocks.pop()
            mean, size = (mean * size + other * count) / (size + count), size + count
        blocks.append((mean, size))
    shifted = [mean for mean, size in blocks for _ in range(size)]
    places = [0.0] * len(wanted)
    for rank, (index, place) in enumerate(zip(order, shifted, strict=True)):
        places[index] = min(max(place, low), top) + rank * gap
    return places


def place_near_points(
    labels: Sequence[tuple[float, float, str]], size: float, frame: Box, obstacles: Sequence[Box]
) -> list[Box | None]:
    """A box in a frame for each label near its point, which overlaps no obstacle and no other.

    Args:
        labels: x and y of a point, and its text.
        size: font size.
        frame: where labels may be.
        obstacles: what no label may cover.
    Returns:
        The boxes; None for a label without a free place.
    """
    taken, placed = [*obstacles], []
    for x, y, text in labels:
        width, height, found = text_width(text, size), 1.2 * size, None
        for ring, (across, down) in product(_RINGS, _SIDES):
            left = x + across * 0.6 * size * ring - width * (1 - across) / 2
            top = y + down * 0.6 * size * ring - height * (1 - down) / 2
            box = Box(left, top, left + width, top + height)
            if frame.contains(box) and not any(map(box.overlaps, taken)):
                found = box
                taken.append(box)
                break
        placed.append(found)
    return placed

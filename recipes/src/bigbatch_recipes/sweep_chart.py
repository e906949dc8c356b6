"""The chart of a sweep as numbers: score against average batch, with places of its labels."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from bigbatch.log.chart_axis import Axis
from bigbatch.log.label_places import Box, place_near_points
from bigbatch_recipes.sweep_results import SweepPoint, SweepResults, value_text

_MAX_LABELS = 30  # points of a sweep whose points have labels
_MARGINS = (0.09, 0.12)  # of the frame's width and height, without a point
_MARK = 5.0  # half the width of a marker


@dataclass(frozen=True)
class Dot:
    """A point of a sweep.

    Args:
        batch: its average batch.
        center, low, high: score and error bar.
        label: the values that vary within its group; "" where there are too many points.
        text: the whole point in words.
    """

    batch: float
    center: float
    low: float
    high: float
    label: str
    text: str


@dataclass(frozen=True)
class Group:
    """The points that share settings which are text or true/false.

    Args:
        name: these settings, and the number that the labels give.
        dots: its points by average batch.
        is_line: whether one number alone varies, so that a line connects the points.
    """

    name: str
    dots: list[Dot]
    is_line: bool


@dataclass(frozen=True)
class SweepChart:
    """Groups of points, and the Pareto front."""

    score: str
    groups: list[Group]
    front: list[Dot]

    @property
    def dots(self) -> list[Dot]:
        """The points of all groups, in order."""
        return [dot for group in self.groups for dot in group.dots]

    def axes(self, frame: Box) -> tuple[Axis, Axis]:
        """The logarithmic axis of batches and the axis of scores within a frame."""
        batches = [dot.batch for dot in self.dots] or [1.0, 2.0]
        scores = [end for dot in self.dots for end in (dot.low, dot.high)] or [0.0, 1.0]
        low, high, room = min(scores), max(scores), _MARGINS[1]
        room *= (high - low) or abs(high) or 1.0
        ratio = max((max(batches) / min(batches)) ** _MARGINS[0], 1.1)
        across = Axis(
            min(batches) / ratio, max(batches) * ratio, frame.left, frame.right, log_base=2
        )
        return across, Axis(low - room, high + room, frame.bottom, frame.top)

    def label_boxes(self, frame: Box, size: float) -> list[Box | None]:
        """A place for the label of each point, None without one; they never overlap."""
        across, up = self.axes(frame)
        places = [(across(dot.batch), up(dot.center)) for dot in self.dots]
        marks = [Box(x - _MARK, y - _MARK, x + _MARK, y + _MARK) for x, y in places]
        bars = [
            Box(x - 1, up(dot.high), x + 1, up(dot.low))
            for dot, (x, _) in zip(self.dots, places, strict=True)
        ]
        labelled = [number for number, dot in enumerate(self.dots) if dot.label]
        boxes = place_near_points(
            [(*places[number], self.dots[number].label) for number in labelled],
            size,
            frame,
            marks,
            [*bars, *self._lines(across, up)],
        )
        by_number = dict(zip(labelled, boxes, strict=True))
        return [by_number.get(number) for number in range(len(self.dots))]

    def front_steps(self) -> list[tuple[float, float]]:
        """Batch and score along the front: the score of the next point holds up to its batch."""
        steps = [(dot.batch, dot.center) for dot in self.front[:1]]
        for before, dot in pairwise(self.front):
            steps += [(before.batch, dot.center), (dot.batch, dot.center)]
        return steps

    def _lines(self, across: Axis, up: Axis) -> Iterator[Box]:
        """Small boxes along the lines that connect points, and along the front."""
        lines = [[(dot.batch, dot.center) for dot in g.dots] for g in self.groups if g.is_line]
        for line in [*lines, self.front_steps()]:
            for start, end in pairwise((across(batch), up(score)) for batch, score in line):
                count = max(1, math.ceil(math.dist(start, end) / 6))
                for i in range(count + 1):
                    x, y = (a + (b - a) * i / count for a, b in zip(start, end, strict=True))
                    yield Box(x - 1, y - 1, x + 1, y + 1)


def sweep_chart(sweep: SweepResults) -> SweepChart:
    """The chart of a sweep's measured points."""
    groups: dict[str, list[SweepPoint]] = {}
    for point in sweep.measured:
        groups.setdefault(_group_name(point, sweep), []).append(point)
    has_labels = len(sweep.measured) <= _MAX_LABELS
    front = [_dot(point, sweep, "") for point in sweep.front]
    return SweepChart(
        sweep.score, [_group(name, of, sweep, has_labels) for name, of in groups.items()], front
    )


def _group(name: str, points: list[SweepPoint], sweep: SweepResults, has_labels: bool) -> Group:
    numbers = [_numeric_values(point, sweep) for point in points]
    keys = dict.fromkeys(key for values in numbers for key in values)
    varied = [key for key in keys if len({values.get(key) for values in numbers}) > 1]
    is_complete = all(key in values for values in numbers for key in varied)
    dots = [
        _dot(point, sweep, _label(point, values, varied, has_keys=not is_complete) * has_labels)
        for point, values in zip(points, numbers, strict=True)
    ]
    if has_labels and varied and is_complete:
        name += f" (numbers: {', '.join(varied)})"
    return Group(name, dots, is_line=len(varied) == 1)


def _label(
    point: SweepPoint, values: dict[str, Any], varied: Sequence[str], *, has_keys: bool
) -> str:
    texts = [f"{key} " * has_keys + value_text(values[key]) for key in varied if key in values]
    texts += ["diverged"] * any(run.diverged for run in point.runs)
    return ", ".join(texts)


def _dot(point: SweepPoint, sweep: SweepResults, label: str) -> Dot:
    scores = point.scores(sweep.score)
    center = sweep.summary.center(scores)
    below, above = sweep.summary.error_bars(scores)
    text = f"{point.name}: {sweep.summary.scores_text(scores)} at {point.average_batch:,.0f}"
    return Dot(point.average_batch, center, center - below, center + above, label, text)


def _group_name(point: SweepPoint, sweep: SweepResults) -> str:
    """The values that are text or true/false, which give the colour."""
    texts = [
        f"{key} {value_text(value)}"
        for key, value in point.values.items()
        if isinstance(value, str | bool) and key not in sweep.tuned
    ]
    return ", ".join(texts) or "every point"


def _numeric_values(point: SweepPoint, sweep: SweepResults) -> dict[str, Any]:
    """The values that are numbers, which vary within a colour."""
    return {
        key: value
        for key, value in point.values.items()
        if key not in sweep.tuned and not isinstance(value, str | bool)
    }

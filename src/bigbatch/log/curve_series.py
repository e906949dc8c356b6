"""The curves of a report as numbers: for each panel and arm, a line and the range over its runs.

The runs of an arm share bins of equal numbers of samples, so a point compares its seeds at the same
progress, whichever the x axis.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from operator import itemgetter
from statistics import fmean, median

from bigbatch.log.metrics import History, group_seeds, measured_rows
from bigbatch.log.run_directory import Row
from bigbatch.log.seed_summary import SeedSummary
from bigbatch.statistics.noise_scale import GradientStatistics

AXES = {"samples": "samples", "step": "optimizer steps", "elapsed_seconds": "seconds of training"}
POINTS = 60  # most points of a curve
NOISE_POINTS = 20  # most points of similarity and noise scale, which need several steps each
_NOISE_STEPS, _FEW_NOISE_POINTS = 4, 5  # measured steps of a run a point; points of a short run
_FEW_POINTS = 20  # points of a curve where a page has very many
_PAGE_POINTS = 1000  # of all curves of a panel, so that the page stays small
_LARGEST = 1e200  # of a value; sums of larger ones may overflow
_ROOM = 4.0  # most by which a band extends a logarithmic scale
_MARGIN = 0.04  # of the height of a panel, above and below

Rows = Sequence[Row]


@dataclass(frozen=True)
class Point:
    """One point of a curve.

    Args:
        x: place on the x axis, the mean over the runs.
        center: mean or median over the runs; not finite where it is unknown.
        low, high: least and largest value of a run.
    """

    x: float
    center: float
    low: float
    high: float


@dataclass(frozen=True)
class Curve:
    """The runs of one arm in one panel.

    Args:
        arm: number of the arm, which decides its style.
        name: name of the arm.
        runs: number of runs.
        points: the line and its band.
        interval: places and ends of the confidence interval that single steps measured: the median
            over the steps of a bin.
    """

    arm: int
    name: str
    runs: int
    points: list[Point]
    interval: list[Point]

    @property
    def segments(self) -> list[list[Point]]:
        """The points without gaps: runs of points whose center is finite."""
        return _parts(self.points, lambda point: math.isfinite(point.center))

    @property
    def bands(self) -> list[list[Point]]:
        """The points whose range is drawn: not of one run, nor where a value is infinite."""
        return _parts(self.points, lambda p: self.runs > 1 and math.isfinite(p.high - p.low))


def _parts(points: list[Point], is_shown: Callable[[Point], bool]) -> list[list[Point]]:
    """Successive points that are shown, without gaps."""
    groups = groupby(points, is_shown)
    return [list(part) for shown, part in groups if shown]


@dataclass(frozen=True)
class Panel:
    """One quantity of all arms.

    Args:
        title: the quantity with its unit.
        x_label: name of the x axis.
        log_base: base of a logarithmic scale; None for a linear one.
        curves: one for each arm that has a point.
        targets: similarities that policies hold.
    """

    title: str
    x_label: str
    log_base: int | None
    curves: list[Curve]
    targets: list[float]

    @property
    def x_range(self) -> tuple[float, float]:
        """Ends of the x axis, which begins at 0."""
        return 0.0, max((p.x for curve in self.curves for p in curve.points), default=1.0) or 1.0

    @property
    def y_range(self) -> tuple[float, float]:
        """Ends of the y axis: all lines and bands; of a logarithmic scale, bands near the lines."""
        points = [
            p for c in self.curves for part in c.segments for p in part if self._fits(p.center)
        ]
        centers = [*(p.center for p in points), *self.targets]
        if not centers:
            return (1.0, 2.0) if self.log_base else (0.0, 1.0)
        ranges = [p for curve in self.curves for part in curve.bands for p in part]
        ranges += [p for curve in self.curves for p in curve.interval]
        ends = [end for p in ranges for end in (p.low, p.high) if math.isfinite(end)]
        low, high = min(centers), max(centers)
        if self.log_base is None:
            low, high = min([low, *ends]), max([high, *ends])
            room = _MARGIN * (high - low) or abs(high) / 2 or 1.0
            return low - room, high + room
        near = [end for end in ends if low / _ROOM <= end <= high * _ROOM]
        low, high = min([low, *near]), max([high, *near])
        room = max((high / low) ** _MARGIN, 1.1)
        return low / room, high * room

    def _fits(self, value: float) -> bool:
        return self.log_base is None or value > 0


def panels_of(histories: list[History], x: str) -> list[Panel]:
    """The six panels of a report against one of `AXES`.

    Loss, main score, batch size, similarity, noise scale and learning rate.
    """
    groups = group_seeds(histories)
    most = max(_FEW_POINTS, min(POINTS, _PAGE_POINTS // max(1, len(groups))))
    summary = SeedSummary.of(history.settings for history in histories)
    scores = " or ".join(dict.fromkeys(history.score or "score" for history in histories))
    targets = sorted({one.target for one in histories if one.target is not None})
    panels = []
    for quantity in _QUANTITIES:
        curves = [
            _curve(quantity, number, name, runs, x, most, summary)
            for number, (name, runs) in enumerate(groups.items())
        ]
        panels.append(
            Panel(
                quantity.title or scores,
                AXES[x],
                quantity.log_base,
                [curve for curve in curves if curve.segments],
                targets if quantity.title == _SIMILARITY else [],
            )
        )
    return panels


def label_ends(panel: Panel) -> list[tuple[float, float]]:
    """Where each curve, then each target, ends."""
    x = panel.x_range[1]
    last = [curve.segments[-1][-1] for curve in panel.curves]
    return [*((p.x, p.center) for p in last), *((x, target) for target in panel.targets)]


def target_text(target: float) -> str:
    """The label of a similarity that a policy holds."""
    return f"target {target:g}"


def chosen_rows(rows: Rows) -> list[Row]:
    """The rows whose batch size is the chosen one: without the last step of each epoch.

    The last step of an epoch takes the samples that remain, so it may be smaller or larger. It
    counts where the epoch has no other step.
    """
    kept = []
    for previous, row, following in _neighbours(rows):
        is_last = following is None or following["epoch"] > row["epoch"]
        is_first = previous is None or previous["epoch"] < row["epoch"]
        if is_first or not is_last:
            kept.append(row)
    return kept


def _neighbours(rows: Rows) -> Iterator[tuple[Row | None, Row, Row | None]]:
    padded = [None, *rows, None]
    for (previous, row), (_, following) in pairwise(pairwise(padded)):
        assert row is not None
        yield previous, row, following


@dataclass(frozen=True)
class _Quantity:
    """What a panel shows.

    Args:
        title: its title; "" for the name of the score.
        rows_of: the rows of a run that have it.
        value_of: its value over some rows.
        log_base: base of a logarithmic scale; None for a linear one.
        is_noise: whether signal and noise are averaged, over the runs too, before the value is
            computed from them.
        interval: name of the row's confidence interval.
    """

    title: str
    rows_of: Callable[[History], list[Row]]
    value_of: Callable[[Rows], float]
    log_base: int | None = None
    is_noise: bool = False
    interval: str = ""


def _curve(
    quantity: _Quantity,
    number: int,
    name: str,
    runs: list[History],
    x: str,
    most: int,
    summary: SeedSummary,
) -> Curve:
    rows = [quantity.rows_of(run) for run in runs]
    rows = [of_run for of_run in rows if of_run]
    count = _bin_count(runs, rows, most, is_noise=quantity.is_noise)
    samples = max((run.rows[-1]["samples"] for run in runs if run.rows), default=1)
    binned = [_binned(of_run, samples, count) for of_run in rows]
    if quantity.is_noise:
        points = _pooled_points(quantity, binned, x, count)
    else:
        points = _summary_points(quantity, binned, x, summary)
    return Curve(
        number,
        name,
        len(runs),
        _ordered(points),
        _interval_points(quantity.interval, binned, x, count),
    )


def _bin_count(runs: list[History], rows: list[list[Row]], most: int, *, is_noise: bool) -> int:
    """Bins of an arm: parts of an epoch, or epochs where there are many."""
    if is_noise:
        measured = min(map(len, rows), default=1)
        return min(NOISE_POINTS, measured, max(_FEW_NOISE_POINTS, measured // _NOISE_STEPS))
    epochs = max((run.rows[-1]["epoch"] + 1 for run in runs if run.rows), default=1)
    return int(epochs * max(1, most // epochs)) if epochs <= most else most


def _binned(rows: list[Row], samples: int, count: int) -> dict[int, list[Row]]:
    """Rows by the number of their bin; bins have equal samples."""
    bins: dict[int, list[Row]] = {}
    for row in rows:
        number = min(-(-row["samples"] * count // samples) - 1, count - 1)
        bins.setdefault(number, []).append(row)
    return bins


def _summary_points(
    quantity: _Quantity, binned: list[dict[int, list[Row]]], x: str, summary: SeedSummary
) -> list[Point]:
    """The summary of the runs' values; a run has those of its neighbours in a bin without a row."""
    lines = []
    for bins in binned:
        places = {number: float(rows[-1][x]) for number, rows in bins.items()}
        values = {number: quantity.value_of(rows) for number, rows in bins.items()}
        lines.append((_without_holes(places), _without_holes(values)))
    known = {number for bins in binned for number in bins}
    points = []
    for number in sorted(known):
        present = [(xs[number], ys[number]) for xs, ys in lines if number in ys]
        of_runs = [y for _, y in present]
        center = summary.center(of_runs)
        points.append(Point(fmean(x for x, _ in present), center, min(of_runs), max(of_runs)))
    return points


def _without_holes(values: dict[int, float]) -> dict[int, float]:
    """Values by the number of a bin, with linear values between two known ones."""
    filled = dict(values)
    for low, high in pairwise(sorted(values)):
        for number in range(low + 1, high):
            share = (number - low) / (high - low)
            filled[number] = (1 - share) * values[low] + share * values[high]
    return filled


def _pooled_points(
    quantity: _Quantity, binned: list[dict[int, list[Row]]], x: str, count: int
) -> list[Point]:
    """The value of signal and noise over all runs, and the range of it and the runs' own."""
    points = []
    for number in range(count):
        present = [bins[number] for bins in binned if number in bins]
        if not present:
            continue
        center = quantity.value_of([row for rows in present for row in rows])
        values = [*map(quantity.value_of, present), center]
        known = [value for value in values if not math.isnan(value)] or [center]
        low, high = min(known), max(known)
        points.append(Point(fmean(rows[-1][x] for rows in present), center, low, high))
    return points


def _ordered(points: list[Point]) -> list[Point]:
    """Points whose x never falls, where a run that ended early leaves a mean of the others."""
    places = accumulate((point.x for point in points), max)
    return [
        Point(x, point.center, point.low, point.high)
        for x, point in zip(places, points, strict=True)
    ]


def _interval_points(
    name: str, binned: list[dict[int, list[Row]]], x: str, count: int
) -> list[Point]:
    points = []
    for number in range(count):
        rows = [row for bins in binned for row in bins.get(number, []) if row.get(name)]
        if rows:
            low, high = (median(_end(row[name][side]) for row in rows) for side in (0, 1))
            points.append(Point(fmean(row[x] for row in rows), low, low, high))
    return points


def _end(value: float | None) -> float:
    """The end of an interval; a log has None for one that is infinite."""
    return math.inf if value is None else value


def _loss_of(rows: Rows) -> float:
    """Mean loss of a sample, so that a small step counts less."""
    samples = sum(row["batch_size"] for row in rows)
    return float(sum(_bounded(row["loss"]) * row["batch_size"] for row in rows) / samples)


def _statistics_of(rows: Rows) -> GradientStatistics:
    return GradientStatistics(
        fmean(_bounded(row["grad_sqnorm"]) for row in rows),
        fmean(_bounded(row["grad_variance"]) for row in rows),
        round(fmean(row["batch_size"] for row in rows)),
        rows[0]["micro_batches"],
    )


def _scored_rows(history: History) -> list[Row]:
    score = history.score
    return [
        {**row, "score": row["metrics"][score]}
        for row in history.scored_rows
        if row["metrics"].get(score) is not None
    ]


def _mean_of(value_of: Callable[[Row], float]) -> Callable[[Rows], float]:
    return lambda rows: fmean(_bounded(value_of(row)) for row in rows)


def _bounded(value: float) -> float:
    """The value, or one whose sums do not overflow."""
    return max(-_LARGEST, min(float(value), _LARGEST))


_SIMILARITY, _NOISE_SCALE = "gradient similarity", "noise scale, samples"
_QUANTITIES = (
    _Quantity(
        "training loss",
        lambda run: [row for row in run.rows if row["loss"] is not None],
        _loss_of,
        10,
    ),
    _Quantity("", _scored_rows, _mean_of(itemgetter("score"))),
    _Quantity(
        "batch size, samples",
        lambda run: chosen_rows(run.rows),
        _mean_of(itemgetter("batch_size")),
        2,
    ),
    _Quantity(
        _SIMILARITY,
        lambda run: measured_rows(run.rows),
        lambda rows: _statistics_of(rows).similarity,
        None,
        is_noise=True,
        interval="similarity_interval",
    ),
    _Quantity(
        _NOISE_SCALE,
        lambda run: measured_rows(run.rows),
        lambda rows: _statistics_of(rows).noise_scale,
        10,
        is_noise=True,
        interval="noise_scale_interval",
    ),
    _Quantity(
        "learning rate", lambda run: chosen_rows(run.rows), _mean_of(lambda row: row["lr"][0])
    ),
)

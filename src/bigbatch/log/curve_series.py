"""The panels of a report: for each quantity and arm, a line and the range over its runs.

The runs of an arm share bins of equal numbers of samples, so a point compares its seeds at the same
progress, whichever the x axis.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import itemgetter
from statistics import fmean

import numpy

from bigbatch.log.chart import Ends, Mark, Panel, Series
from bigbatch.log.history import History, counted_of, group_seeds, measured_rows, unit_of
from bigbatch.log.row_schema import Row
from bigbatch.statistics.noise_scale import GradientStatistics

AXES = {"samples": "samples", "step": "optimizer steps", "elapsed_seconds": "seconds of training"}
LOSS = "training loss"  # a panel
POINTS = 60  # most points of a curve
NOISE_POINTS = 20  # most points of similarity and noise scale, which need several steps each
_NOISE_STEPS, _FEW_NOISE_POINTS = 4, 5  # measured steps of a run a point; points of a short run
_FEW_POINTS = 20  # points of a curve where a page has very many
_PAGE_POINTS = 1000  # of all curves of a panel, so that the page stays small
_LARGEST = 1e200  # of a value; sums of larger ones may overflow

Rows = Sequence[Row]
Bins = dict[int, list[Row]]  # the rows of a run by the number of their bin
# by bin: the mean place of the runs, the center of their values, the least and the largest value
Curve = Sequence[Sequence[float]]


@dataclass(frozen=True)
class _Quantity:
    """What a panel shows."""

    title: str
    rows_of: Callable[[History], list[Row]]  # the rows of a run that have it
    value_of: Callable[[Rows], float]  # its value over some rows
    log_base: int | None = None  # of a logarithmic scale
    # whether signal and noise are averaged, over the runs too, before the value is computed
    is_noise: bool = False
    is_zoomed: bool = False  # whether its axis has room for the last quarter of the curves alone


def panels_of(histories: list[History], x: str) -> list[Panel]:
    """The panels of a report against one of `AXES`, without those that no run has values for.

    Loss, main score, batch size, similarity, noise scale and learning rate. The style of a series
    is the number of its arm.
    """
    groups = group_seeds(histories)
    most = max(_FEW_POINTS, min(POINTS, _PAGE_POINTS // max(1, len(groups))))
    targets = sorted({one.target for one in histories if one.target is not None})
    panels, counted = [], counted_of(histories)
    loss, *others = _QUANTITIES
    for quantity in (loss, _scores_of(histories), *others):
        of_arms = (
            _series(quantity, name, arm, runs, x, most)
            for arm, (name, runs) in enumerate(groups.items())
        )
        series = [one for one in of_arms if one is not None]
        if not series:
            continue
        y_range = None
        if quantity.is_zoomed:
            y_range = _last_range(series)
            series = [_within(one, *y_range) for one in series]
        panels.append(
            Panel(
                quantity.title.replace("samples", counted),
                AXES[x].replace("samples", counted),
                series,
                x_range=(0.0, max(end for one in series for end in one.x) or 1.0),
                y_log=quantity.log_base,
                y_range=y_range,
                marks=[Mark(f"target {target:g}", y=target) for target in targets]
                if quantity.title == _SIMILARITY
                else [],
            )
        )
    return panels


def chosen_rows(rows: Rows) -> list[Row]:
    """The rows whose batch size is the chosen one: without the last step of each epoch.

    The last step of an epoch takes the samples that remain, so it may be smaller or larger. It
    counts where the epoch has no other step.
    """
    epochs = [row["epoch"] for row in rows]
    neighbours = zip(rows, [None, *epochs], [*epochs[1:], None], strict=False)
    return [
        row
        for row, previous, following in neighbours
        if row["epoch"] != previous or row["epoch"] == following
    ]


def _series(
    quantity: _Quantity, name: str, style: int, runs: list[History], x: str, most: int
) -> Series | None:
    """The line of an arm with its band; None where no value is finite."""
    rows = [of_run for of_run in map(quantity.rows_of, runs) if of_run]
    if not rows:
        return None
    count = _bin_count(runs, rows, most, is_noise=quantity.is_noise)
    samples = max(run.rows[-1]["samples"] for run in runs if run.rows)
    binned = [_binned(of_run, samples, count) for of_run in rows]
    curve_of = _pooled_curve if quantity.is_noise else _mean_curve
    places, centers, *band = curve_of(quantity, binned, x)
    if not any(map(math.isfinite, centers)):
        return None
    low, high = band if len(runs) > 1 else ([], [])
    # x never falls where a run that ended early leaves a mean of the others
    xs = [*accumulate(places, max)]
    return Series(name, xs, centers, low=low, high=high, style=style)


def _bin_count(runs: list[History], rows: list[list[Row]], most: int, *, is_noise: bool) -> int:
    """Bins of an arm: parts of an epoch, or epochs where there are many."""
    if is_noise:
        measured = min(map(len, rows))
        return min(NOISE_POINTS, measured, max(_FEW_NOISE_POINTS, measured // _NOISE_STEPS))
    epochs = max(run.rows[-1]["epoch"] + 1 for run in runs if run.rows)
    return int(epochs * max(1, most // epochs)) if epochs <= most else most


def _binned(rows: list[Row], samples: int, count: int) -> Bins:
    """Rows by the number of their bin; bins have equal samples."""
    bins: Bins = {}
    for row in rows:
        number = min(-(-row["samples"] * count // samples) - 1, count - 1)
        bins.setdefault(number, []).append(row)
    return bins


def _mean_curve(quantity: _Quantity, binned: list[Bins], x: str) -> Curve:
    """The mean of the runs' values; a run has those of its neighbours in a bin without a row."""
    numbers = sorted({number for bins in binned for number in bins})

    def of_run(bins: Bins, value_of: Callable[[Rows], float]) -> numpy.ndarray:
        known = sorted(bins)
        values = [value_of(bins[number]) for number in known]
        return numpy.interp(numbers, known, values, left=math.nan, right=math.nan)

    places = [of_run(bins, lambda rows: rows[-1][x]) for bins in binned]
    values = [of_run(bins, quantity.value_of) for bins in binned]
    means = (numpy.nanmean(places, 0), numpy.nanmean(values, 0))
    ends = (numpy.nanmin(values, 0), numpy.nanmax(values, 0))
    return [of_bins.tolist() for of_bins in (*means, *ends)]


def _pooled_curve(quantity: _Quantity, binned: list[Bins], x: str) -> Curve:
    """The value of signal and noise over all runs, and the range of it and the runs' own."""
    points = []
    for number in sorted({number for bins in binned for number in bins}):
        present = [bins[number] for bins in binned if number in bins]
        center = quantity.value_of([row for rows in present for row in rows])
        values = [*map(quantity.value_of, present), center]
        known = [value for value in values if not math.isnan(value)] or [center]
        place = fmean(rows[-1][x] for rows in present)
        points.append((place, center, min(known), max(known)))
    return [*map(list, zip(*points, strict=True))]


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


def _scores_of(histories: Sequence[History]) -> _Quantity:
    """The main scores of the runs, each in the unit in which people write it."""
    names = dict.fromkeys(history.score for history in histories if history.score)
    units = {name: unit_of(histories, name) for name in names}
    labels = (f"{label},{unit}" if unit else label for label, unit, _ in units.values())

    def rows_of(history: History) -> list[Row]:
        score, rows = history.score or "", history.scored_rows
        known = [row for row in rows if row["metrics"].get(score) is not None]
        return [row | {"score": units[score][2] * row["metrics"][score]} for row in known]

    return _Quantity(" or ".join(labels), rows_of, _mean_of(itemgetter("score")), is_zoomed=True)


def _last_range(series: Sequence[Series]) -> Ends:
    """Ends of an axis for the last quarters of lines and the last bands, with a margin.

    They are at least a tenth of all values apart.
    """
    every = [y for one in series for y in one.y if math.isfinite(y)]
    last = [y for one in series for y in one.y[-max(2, len(one.y) // 4) :] if math.isfinite(y)]
    last += [band[-1] for one in series for band in (one.low, one.high) if band]
    (low, high), (lowest, highest) = ((min(ys), max(ys)) for ys in (last, [*every, *last]))
    if lowest == highest:
        return low - (abs(low) / 100 or 1.0), high + (abs(high) / 100 or 1.0)
    lacking = (highest - lowest) / 10 - (high - low)
    room = max(0.0, lacking) / 2 + 0.06 * (high - low)
    return max(low - room, lowest), min(high + room, highest)


def _within(series: Series, low: float, high: float) -> Series:
    """The line without the points outside these ends."""
    shown = [low <= y <= high for y in series.y]
    y, low_ends, high_ends = (
        [value if is_shown else math.nan for is_shown, value in zip(shown, values, strict=False)]
        for values in (series.y, series.low, series.high)
    )
    return replace(series, y=y, low=low_ends, high=high_ends)


def _mean_of(value_of: Callable[[Row], float]) -> Callable[[Rows], float]:
    return lambda rows: fmean(_bounded(value_of(row)) for row in rows)


def _bounded(value: float) -> float:
    """The value, or one whose sums do not overflow."""
    return max(-_LARGEST, min(float(value), _LARGEST))


_SIMILARITY = "gradient similarity"
_QUANTITIES = (  # after the first, a report has the main score
    _Quantity(LOSS, lambda run: [row for row in run.rows if row["loss"] is not None], _loss_of, 10),
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
        is_noise=True,
    ),
    _Quantity(
        "noise scale, samples",
        lambda run: measured_rows(run.rows),
        lambda rows: _statistics_of(rows).noise_scale,
        10,
        is_noise=True,
    ),
    _Quantity(
        "learning rate",
        lambda run: [row for row in chosen_rows(run.rows) if row["lr"][0] is not None],
        _mean_of(lambda row: row["lr"][0]),
    ),
)

"""The figure of a sweep: score against average batch."""

from itertools import cycle
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from bigbatch.runs.curves import COLORS, add_grid
from bigbatch.runs.sweep_results import SweepPoint, SweepResults, value_text

_MARKERS = "osD^vPX"
_MAX_LABELS = 30  # points of a sweep whose points have labels; more labels would overlap
_NARROW_RANGE = 8  # ratio of batches for which powers of 2 are too few ticks


def sweep_figure(sweep: SweepResults) -> Figure:
    """Score against average batch, with the Pareto front.

    Each combination of settings that are text or true/false has a colour.
    """
    figure = Figure(figsize=(9.5, 5.6), layout="constrained")
    axes = figure.subplots()
    groups: dict[str, list[SweepPoint]] = {}
    for point in sweep.measured:
        groups.setdefault(_group_name(point, sweep), []).append(point)
    has_labels = len(sweep.measured) <= _MAX_LABELS
    styles = zip(cycle(COLORS), cycle(_MARKERS), groups.items(), strict=False)
    for color, marker, (name, points) in styles:
        _draw_group(axes, sweep, name, points, color, marker, has_labels)
    _draw_front(axes, sweep)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    batches = [point.average_batch for point in sweep.measured]
    if batches and max(batches) < _NARROW_RANGE * min(batches):
        axes.xaxis.set_major_locator(LogLocator(2, subs=(1.0, 1.25, 1.5, 1.75)))
    axes.set_xlabel("average batch, samples a step")
    axes.set_ylabel(sweep.score)
    axes.set_title(f"{sweep.name}\n{sweep.title}", fontsize=9, loc="left", wrap=True)
    axes.margins(0.09, 0.12)
    add_grid(axes)
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return figure


def _draw_group(
    axes: Axes,
    sweep: SweepResults,
    name: str,
    points: list[SweepPoint],
    color: str,
    marker: str,
    has_labels: bool,
) -> None:
    numbers = [_numeric_values(point, sweep) for point in points]
    keys = dict.fromkeys(key for values in numbers for key in values)
    varied = [key for key in keys if len({values.get(key) for values in numbers}) > 1]
    scores = [point.scores(sweep.score) for point in points]
    centers = [sweep.summary.center(values) for values in scores]
    axes.errorbar(
        [point.average_batch for point in points],
        centers,
        list(zip(*map(sweep.summary.error_bars, scores), strict=True)),
        color=color,
        marker=marker,
        markersize=5,
        linewidth=1.1 if len(varied) == 1 else 0,
        elinewidth=1,
        capsize=2,
        label=f"{name} (numbers: {varied[0]})" if has_labels and len(varied) == 1 else name,
    )
    if not has_labels:
        return
    for point, values, center in zip(points, numbers, centers, strict=True):
        texts = [
            f"{key} " * (len(varied) > 1) + value_text(values[key])
            for key in varied
            if key in values
        ]
        texts += ["diverged"] * any(run.diverged for run in point.runs)
        axes.annotate(
            ", ".join(texts),
            (point.average_batch, center),
            xytext=(4, 5),
            textcoords="offset points",
            fontsize=7.5,
            color=color,
        )


def _draw_front(axes: Axes, sweep: SweepResults) -> None:
    front = sweep.front
    axes.step(
        [point.average_batch for point in front],
        [sweep.summary.center(point.scores(sweep.score)) for point in front],
        where="pre",
        color="#777777",
        linestyle=":",
        linewidth=1.6,
        zorder=0,
        label="front: best score for at least this batch",
    )


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

"""A sweep's figure: score against average batch."""

from itertools import cycle
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from bigbatch.runs.curves import COLORS
from bigbatch.runs.sweep_results import SweepPoint, SweepResults, keys_of, shown_text

_MARKERS = "osD^vPX"
_LABELLED = 30  # points at most that are labelled; more would hide each other
_NARROW = 8  # a range of batches that powers of 2 are too few ticks for


def sweep_figure(sweep: SweepResults) -> Figure:
    """Score against average batch, one colour for each combination of words, and the front."""
    figure = Figure(figsize=(9.5, 5.6), layout="constrained")
    axes = figure.subplots()
    groups: dict[str, list[SweepPoint]] = {}
    for point in sweep.measured:
        groups.setdefault(_group(point, sweep), []).append(point)
    labelled = len(sweep.measured) <= _LABELLED
    looks = zip(cycle(COLORS), cycle(_MARKERS), groups.items(), strict=False)
    for color, marker, (name, points) in looks:
        _draw_group(axes, sweep, name, points, color, marker, labelled)
    _draw_front(axes, sweep)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    batches = [point.average_batch for point in sweep.measured]
    if batches and max(batches) < _NARROW * min(batches):
        axes.xaxis.set_major_locator(LogLocator(2, subs=(1.0, 1.25, 1.5, 1.75)))
    axes.set_xlabel("average batch, samples a step")
    axes.set_ylabel(sweep.score)
    axes.set_title(f"{sweep.name}\n{sweep.title}", fontsize=9, loc="left", wrap=True)
    axes.margins(0.09, 0.12)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
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
    labelled: bool,
) -> None:
    keys = keys_of([SweepPoint("", _numeric(point, sweep), 0, []) for point in points])
    varied = [key for key in keys if len({_numeric(point, sweep).get(key) for point in points}) > 1]
    scores = [point.scores(sweep.score) for point in points]
    axes.errorbar(
        [point.average_batch for point in points],
        [sweep.summary.middle(found) for found in scores],
        list(zip(*map(sweep.summary.reach, scores), strict=True)),
        color=color,
        marker=marker,
        markersize=5,
        linewidth=1.1 if len(varied) == 1 else 0,
        elinewidth=1,
        capsize=2,
        label=f"{name} (numbers: {varied[0]})" if labelled and len(varied) == 1 else name,
    )
    for number, point in enumerate(points if labelled else []):
        numbers = _numeric(point, sweep)
        texts = [shown_text(numbers[key]) for key in varied if key in numbers]
        if len(varied) > 1:
            texts = [f"{key} {shown_text(numbers[key])}" for key in varied if key in numbers]
        texts += ["diverged"] * any(run.diverged for run in point.runs)
        axes.annotate(
            ", ".join(texts),
            (point.average_batch, sweep.summary.middle(scores[number])),
            xytext=(4, 5),
            textcoords="offset points",
            fontsize=7.5,
            color=color,
        )


def _draw_front(axes: Axes, sweep: SweepResults) -> None:
    front = sweep.front
    axes.step(
        [point.average_batch for point in front],
        [sweep.summary.middle(point.scores(sweep.score)) for point in front],
        where="pre",
        color="#777777",
        linestyle=":",
        linewidth=1.6,
        zorder=0,
        label="front: best score for at least this batch",
    )


def _group(point: SweepPoint, sweep: SweepResults) -> str:
    """What gives the colour: words."""
    words = {
        key: value
        for key, value in point.values.items()
        if isinstance(value, str | bool) and key not in sweep.tuned
    }
    return ", ".join(f"{key} {shown_text(value)}" for key, value in words.items()) or "every point"


def _numeric(point: SweepPoint, sweep: SweepResults) -> dict[str, Any]:
    """What gives the place within a colour."""
    return {
        key: value
        for key, value in point.values.items()
        if key not in sweep.tuned and not isinstance(value, str | bool)
    }

"""Curves of runs, drawn without a window."""

import io
import math
from collections.abc import Callable, Sequence
from itertools import cycle
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from bigbatch.errors import RunError, SettingError
from bigbatch.runs.atomic_files import GENERATOR, open_atomically, require_own_file
from bigbatch.runs.metrics import History, group_seeds, measured_rows
from bigbatch.runs.run_directory import Row
from bigbatch.statistics.noise_scale import GradientStatistics

FIGURE_FORMATS = (".png", ".svg")

AXES = {"samples": "samples", "step": "optimizer steps", "elapsed_seconds": "seconds of training"}

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
# inches, and fractions of the figure: an automatic layout takes as long as the drawing
_SIZE, _MARGIN, _LINE = (12, 6.2), 0.45, 0.2
_SPACES = {"left": 0.045, "right": 0.99, "bottom": 0.075, "hspace": 0.36, "wspace": 0.17}
_POINTS = 120  # most points of a curve; a longer log is averaged
_NOISE_POINTS = 40  # most points of similarity and noise scale
_SCORE = "score"  # title of the panel that is replaced by the score's name

Points = tuple[list[float], list[float]]
PointsOf = Callable[[History, str], Points]


def require_ending(out: Path, endings: Sequence[str]) -> None:
    """Raises SettingError where the ending of `out` is none of these."""
    if out.suffix not in endings:
        raise SettingError(
            f"-o {out}: the ending must be {', '.join(endings[:-1])} or {endings[-1]}"
        )


def require_writable(out: Path, endings: Sequence[str]) -> None:
    """Checks before any work that a file may be written.

    Raises:
        SettingError: another ending.
        RunError: there is a file already that bigbatch did not write.
    """
    require_ending(out, endings)
    require_own_file(out)


def write_figure(figure: Figure, out: Path, dpi: int = 130) -> None:
    """Writes the figure atomically as a .png or .svg whose metadata name bigbatch.

    Raises:
        RunError: the file cannot be written.
    """
    kind = out.suffix.removeprefix(".")
    metadata = {"Software": GENERATOR} if kind == "png" else {"Title": GENERATOR, "Date": None}
    try:
        with open_atomically(out) as file:
            figure.savefig(file, format=kind, dpi=dpi, metadata=metadata)
    except OSError as error:
        raise RunError(f"{out} cannot be written: {error.strerror}") from None


def curves(histories: list[History], x: str) -> Figure:
    """Six panels against one of `AXES`: loss, score, batch, similarity, noise scale, learning rate.

    Every run is one line; runs that differ only in their seed share a colour. A point is the
    average over 1 / 120 of the run. Similarity and noise scale are computed from signal and noise
    averaged over 1 / 40 of it.
    """
    figure = Figure(figsize=_SIZE)
    panels = figure.subplots(2, 3, gridspec_kw=_SPACES).flat
    names = dict.fromkeys(history.score or _SCORE for history in histories)
    groups = group_seeds(histories)
    for axes, (title, points_of, log_base) in zip(panels, _PANELS, strict=True):
        for color, (group, runs) in zip(cycle(COLORS), groups.items(), strict=False):
            for number, history in enumerate(runs):
                xs, ys = points_of(history, x)
                label = group if number == 0 else None
                axes.plot(xs, ys, color=color, alpha=0.75, linewidth=1.1, label=label)
        format_axes(axes, " or ".join(names) if title == _SCORE else title, AXES[x], log_base)
        if title == "gradient similarity":
            _draw_targets(axes, histories)
    lines, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(lines, labels, loc="upper center", ncols=4, frameon=False, fontsize=9)
    legend_height = _MARGIN + _LINE * math.ceil(len(labels) / 4)
    figure.subplots_adjust(top=1 - legend_height / _SIZE[1])
    return figure


def format_axes(axes: Axes, title: str, x_label: str, log_base: int | None) -> None:
    """Sets title, label, scale and grid of a panel; `log_base` is None for a linear scale."""
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel(x_label, fontsize=8)
    if log_base is not None:
        axes.set_yscale("log", base=log_base)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(labelsize=8)
    add_grid(axes)


def add_grid(axes: Axes) -> None:
    """Adds a light grid, and hides the upper and right border."""
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def as_svg(figure: Figure) -> str:
    """The figure as an <svg> element for an HTML page."""
    text = io.StringIO()
    with rc_context({"svg.fonttype": "none", "font.family": "sans-serif"}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    return svg[svg.index("<svg") :]


def bins_of(rows: list[Row], count: int) -> list[list[Row]]:
    """Consecutive rows in at most `count` bins of equal size; the last may be smaller."""
    size = max(1, -(-len(rows) // count))
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _mean_points(value_of: Callable[[Row], Any]) -> PointsOf:
    def points(history: History, x: str) -> Points:
        bins = bins_of([row for row in history.rows if value_of(row) is not None], _POINTS)
        return [rows[-1][x] for rows in bins], [fmean(map(value_of, rows)) for rows in bins]

    return points


def _score_points(history: History, x: str) -> Points:
    rows = [row for row in history.scored_rows if row["metrics"].get(history.score) is not None]
    return [row[x] for row in rows], [row["metrics"][history.score] for row in rows]


def _noise_points(property_name: str) -> PointsOf:
    def points(history: History, x: str) -> Points:
        bins = bins_of(measured_rows(history.rows), _NOISE_POINTS)
        statistics = [
            GradientStatistics(
                fmean(row["grad_sqnorm"] for row in rows),
                fmean(row["grad_variance"] for row in rows),
                round(fmean(row["batch_size"] for row in rows)),
                rows[0]["micro_batches"],
            )
            for rows in bins
        ]
        return [rows[-1][x] for rows in bins], [getattr(one, property_name) for one in statistics]

    return points


def _draw_targets(axes: Axes, histories: list[History]) -> None:
    for target in sorted({history.target for history in histories if history.target is not None}):
        axes.axhline(target, color="#555555", linestyle="--", linewidth=1)
        axes.annotate(
            f"target {target:g}",
            (0.01, target),
            xycoords=("axes fraction", "data"),
            va="bottom",
            fontsize=8,
            color="#555555",
            bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "alpha": 0.7, "linewidth": 0},
        )


# title, points of a run, base of a logarithmic scale
_PANELS: list[tuple[str, PointsOf, int | None]] = [
    ("training loss", _mean_points(itemgetter("loss")), 10),
    (_SCORE, _score_points, None),
    ("batch size, samples", _mean_points(itemgetter("batch_size")), 2),
    ("gradient similarity", _noise_points("similarity"), None),
    ("noise scale, samples", _noise_points("noise_scale"), 10),
    ("learning rate", _mean_points(lambda row: row["lr"][0]), None),
]

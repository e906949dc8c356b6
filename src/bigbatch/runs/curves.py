"""Curves of runs, drawn without a window."""

import io
import math
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path
from statistics import fmean

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from bigbatch.errors import RunError, SettingError
from bigbatch.runs.atomic_files import MAKER, open_atomically, require_ours
from bigbatch.runs.metrics import History, group_seeds
from bigbatch.runs.run_directory import Row
from bigbatch.statistics.noise_scale import GradientStatistics

FIGURE_FORMATS = (".png", ".svg")

AXES = {"samples": "samples", "step": "optimizer steps", "elapsed_seconds": "seconds of training"}

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
# inches, and shares of them: a layout that matplotlib finds by itself takes as long as the drawing
_SIZE, _MARGIN, _LINE = (12, 6.2), 0.45, 0.2
_SPACES = {"left": 0.045, "right": 0.99, "bottom": 0.075, "hspace": 0.36, "wspace": 0.17}
_BINS = 120  # points of a curve; a longer log is averaged into so many
_SCORE = "score"  # the panel whose title is the name of what was measured
_NOISE_BINS = 40  # the same for what is computed from signal and noise

Points = tuple[list[float], list[float]]
Draw = Callable[[History, str], Points]


def require_ending(out: Path, endings: Sequence[str]) -> None:
    """Raises SettingError for a file of another kind than can be written."""
    if out.suffix not in endings:
        raise SettingError(
            f"-o {out}: the ending must be {', '.join(endings[:-1])} or {endings[-1]}"
        )


def require_writable(out: Path, endings: Sequence[str]) -> None:
    """Raises before any work is done for a file that would not be written.

    Raises:
        SettingError: another ending.
        RunError: there is a file already that bigbatch did not write.
    """
    require_ending(out, endings)
    require_ours(out)


def write_figure(figure: Figure, out: Path, dpi: int = 130) -> None:
    """Draws the figure into a .png or .svg that says who made it, as a whole.

    Raises:
        RunError: the file cannot be written.
    """
    kind = out.suffix.removeprefix(".")
    said = {"Software": MAKER} if kind == "png" else {"Title": MAKER, "Date": None}
    try:
        with open_atomically(out) as file:
            figure.savefig(file, format=kind, dpi=dpi, metadata=said)
    except OSError as error:
        raise RunError(f"{out} cannot be written: {error.strerror}") from None


def curves(histories: list[History], x: str) -> Figure:
    """Six panels against one of `AXES`: loss, score, batch, similarity, noise scale, rate.

    Every run is one line, runs that differ in their seed only share a colour. A point is the
    average of 1 / 120 of the run; similarity and noise scale are made from signal and noise
    averaged over 1 / 40 of it, never averaged themselves.
    """
    figure = Figure(figsize=_SIZE)
    panels = figure.subplots(2, 3, gridspec_kw=_SPACES).flat
    names = dict.fromkeys(history.score or _SCORE for history in histories)
    groups = group_seeds(histories)
    for axes, (title, draw, base) in zip(panels, _PANELS, strict=True):
        for color, (group, runs) in zip(cycle(COLORS), groups.items(), strict=False):
            for number, history in enumerate(runs):
                xs, ys = draw(history, x)
                label = group if number == 0 else None
                axes.plot(xs, ys, color=color, alpha=0.75, linewidth=1.1, label=label)
        dress(axes, " or ".join(names) if title == _SCORE else title, AXES[x], base)
        if title == "gradient similarity":
            _draw_targets(axes, histories)
    lines, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(lines, labels, loc="upper center", ncols=4, frameon=False, fontsize=9)
    above = _MARGIN + _LINE * math.ceil(len(labels) / 4)
    figure.subplots_adjust(top=1 - above / _SIZE[1])
    return figure


def dress(axes: Axes, title: str, x: str, base: int | None) -> None:
    """Title, label and grid of a panel; `base` of a logarithmic axis, None for a linear one."""
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel(x, fontsize=8)
    if base is not None:
        axes.set_yscale("log", base=base)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def as_svg(figure: Figure) -> str:
    """The figure as an <svg> element to put into a page."""
    text = io.StringIO()
    with rc_context({"svg.fonttype": "none", "font.family": "sans-serif"}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    return svg[svg.index("<svg") :]


def _bins(rows: list[Row], number: int = _BINS) -> list[list[Row]]:
    size = max(1, -(-len(rows) // number))
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _averaged(value: str) -> Draw:
    def points(history: History, x: str) -> Points:
        bins = _bins([row for row in history.rows if row[value] is not None])
        xs = [part[-1][x] for part in bins]
        return xs, [fmean(row[value] for row in part) for part in bins]

    return points


def _score(history: History, x: str) -> Points:
    rows = [row for row in history.scored_rows if row["metrics"].get(history.score) is not None]
    return [row[x] for row in rows], [row["metrics"][history.score] for row in rows]


def _rate(history: History, x: str) -> Points:
    bins = _bins(history.rows)
    return [part[-1][x] for part in bins], [fmean(row["lr"][0] for row in part) for part in bins]


def _of_noise(value: str) -> Draw:
    def points(history: History, x: str) -> Points:
        bins = _bins([row for row in history.rows if row["grad_variance"] is not None], _NOISE_BINS)
        noises = [
            GradientStatistics(
                fmean(row["grad_sqnorm"] for row in part),
                fmean(row["grad_variance"] for row in part),
                round(fmean(row["batch_size"] for row in part)),
                part[0]["micro_batches"],
            )
            for part in bins
        ]
        return [part[-1][x] for part in bins], [getattr(noise, value) for noise in noises]

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


# title, points of a run, base of a logarithmic axis
_PANELS: list[tuple[str, Draw, int | None]] = [
    ("training loss", _averaged("loss"), 10),
    (_SCORE, _score, None),
    ("batch size, samples", _averaged("batch_size"), 2),
    ("gradient similarity", _of_noise("similarity"), None),
    ("noise scale, samples", _of_noise("noise_scale"), 10),
    ("learning rate", _rate, None),
]

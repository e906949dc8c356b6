"""Curves of runs, drawn without a window."""

import io
import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullFormatter

from bigbatch.chart_axis import number_text
from bigbatch.errors import RunError, SettingError
from bigbatch.log.atomic_files import GENERATOR, open_atomically, require_own_file
from bigbatch.log.curve_series import Curve, Panel, label_ends, panels_of, target_text
from bigbatch.log.label_places import spread, text_width
from bigbatch.log.line_styles import LIGHT, short_names, style_of
from bigbatch.log.metrics import History, group_seeds
from bigbatch.log.run_directory import Row

FIGURE_FORMATS = (".png", ".svg")

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
# inches
_SIZE, _KEY_MARGIN, _KEY_LINE = (13, 6.6), 0.45, 0.2
_LEFT, _RIGHT, _BOTTOM, _BETWEEN_ROWS, _BETWEEN_COLUMNS = 0.55, 0.08, 0.5, 0.85, 0.6
_TEXT = 7.5  # font size of labels
_LEADER = 9  # points from the edge of a panel to its labels
_POINTS_PER_INCH = 72


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
    """Six panels against one of `AXES`, as `panels_of` computes them.

    Every arm is a line, the mean or median over its runs, and a band from the least to the largest
    value of a run. Its label is at the end of the line.
    """
    groups = list(group_seeds(histories))
    labels = short_names(groups)
    figure = Figure(figsize=_SIZE)
    grid = figure.subplots(2, 3)
    targets = map(target_text, _targets(histories))
    arrange(figure, (2, 3), [*labels, *targets], key_texts(groups, labels))
    for axes, panel in zip(grid.flat, panels_of(histories, x), strict=True):
        format_axes(axes, panel.title, panel.x_label, panel.log_base)
        for curve in panel.curves:
            _draw_curve(axes, curve)
        for target in panel.targets:
            axes.axhline(target, color="#555555", linestyle=":", linewidth=1)
        axes.set_xlim(*panel.x_range)
        axes.set_ylim(*panel.y_range)
        _label_curves(axes, panel, labels)
    return figure


def _targets(histories: list[History]) -> set[float]:
    return {history.target for history in histories if history.target is not None}


def key_texts(names: list[str], labels: list[str]) -> list[str]:
    """Whole names, after the number that stands for one that is too long for a label."""
    return [
        f"{label}: {name}" if label.isdecimal() and label != name else name
        for name, label in zip(names, labels, strict=True)
    ]


def arrange(
    figure: Figure, grid: tuple[int, int], labels: list[str], keys: list[str], key_columns: int = 4
) -> None:
    """Adds the key above all panels, and leaves room for labels on the right of each.

    An automatic layout takes as long as the drawing.

    Args:
        figure: has the panels.
        grid: rows and columns of panels.
        labels: texts of all labels.
        keys: texts of the key, in the order of the styles.
        key_columns: columns of the key.
    """
    lines = [
        Line2D([], [], color=LIGHT[style.color], linestyle=style.line, linewidth=1.5)
        for style in map(style_of, range(len(keys)))
    ]
    figure.legend(
        lines,
        keys,
        loc="upper center",
        ncols=key_columns,
        handlelength=4,
        frameon=False,
        fontsize=9,
    )
    (width, height), (rows, columns) = figure.get_size_inches(), grid
    widths = [text_width(label, _TEXT) for label in labels]
    label_room = (_LEADER + max(widths, default=0.0)) / _POINTS_PER_INCH
    between = label_room + _BETWEEN_COLUMNS
    panel = (width - _LEFT - _RIGHT - label_room - (columns - 1) * between) / columns
    top = height - _KEY_MARGIN - _KEY_LINE * math.ceil(len(keys) / key_columns)
    row = (top - _BOTTOM - (rows - 1) * _BETWEEN_ROWS) / rows
    figure.subplots_adjust(
        left=_LEFT / width,
        right=1 - (_RIGHT + label_room) / width,
        bottom=_BOTTOM / height,
        top=top / height,
        wspace=between / panel,
        hspace=_BETWEEN_ROWS / row,
    )


def _draw_curve(axes: Axes, curve: Curve) -> None:
    style = style_of(curve.arm)
    color = LIGHT[style.color]
    for part in curve.segments:
        xs = [point.x for point in part]
        marker = "o" if len(part) == 1 else ""
        centers = [point.center for point in part]
        axes.plot(
            xs, centers, marker=marker, ms=3, color=color, linestyle=style.line, linewidth=1.3
        )
    for part in curve.bands:
        axes.fill_between(
            [point.x for point in part],
            [point.low for point in part],
            [point.high for point in part],
            color=color,
            alpha=0.13,
            linewidth=0,
        )
    xs = [point.x for point in curve.interval]
    for ends in ([p.low for p in curve.interval], [p.high for p in curve.interval]):
        axes.plot(xs, ends, color=color, linestyle=":", linewidth=0.8)


def _label_curves(axes: Axes, panel: Panel, labels: list[str]) -> None:
    colors = [LIGHT[style_of(curve.arm).color] for curve in panel.curves]
    texts = [labels[curve.arm] for curve in panel.curves]
    texts += map(target_text, panel.targets)
    colors += ["#333333"] * len(panel.targets)
    label_lines(axes, label_ends(panel), texts, colors)


def label_lines(
    axes: Axes, ends: Sequence[tuple[float, float]], texts: Sequence[str], colors: Sequence[str]
) -> None:
    """Labels in a column on the right of a panel, with a line to each from the end of its curve.

    None where so many do not fit: a key has to name the curves. The limits of the panel and its
    place in the figure must be final.

    Args:
        axes: the panel.
        ends: the last point of each curve.
        texts: the labels.
        colors: their colours.
    """
    box = axes.get_window_extent()
    gap = 1.2 * _TEXT / _POINTS_PER_INCH * axes.figure.dpi / box.height
    to_fraction = axes.transData + axes.transAxes.inverted()
    at_ends = [to_fraction.transform(end) for end in ends]
    heights = [min(max(float(y), 0.0), 1.0) for _, y in at_ends]
    places = spread(heights, gap, 0.0, 1.0)
    if places is None:
        return
    reach = _LEADER / _POINTS_PER_INCH * axes.figure.dpi / box.width
    for (x, _), y, place, text, color in zip(at_ends, heights, places, texts, colors, strict=True):
        label_x = 1 + reach
        axes.plot(
            [x, max(x, 1.0), label_x - 0.2 * reach],
            [y, y, place],
            transform=axes.transAxes,
            color=color,
            linewidth=0.7,
            linestyle=":",
            clip_on=False,
        )
        axes.text(
            label_x, place, text, transform=axes.transAxes, va="center", color=color, fontsize=_TEXT
        )


def format_axes(axes: Axes, title: str, x_label: str, log_base: int | None) -> None:
    """Sets title, label, scale and grid of a panel; `log_base` is None for a linear scale."""
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel(x_label, fontsize=8)
    if log_base is not None:
        axes.set_yscale("log", base=log_base)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number_text(value)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: number_text(value)))
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

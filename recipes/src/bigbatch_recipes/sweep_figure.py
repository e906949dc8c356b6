"""The figure of a sweep: score against average batch."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from bigbatch.log.curves import add_grid
from bigbatch.log.label_places import Box
from bigbatch.log.line_styles import LIGHT, MARKERS, style_of
from bigbatch_recipes.sweep_chart import Group, SweepChart, sweep_chart
from bigbatch_recipes.sweep_results import SweepResults

_SIZE = (9.5, 5.6)
_PLACE = (0.08, 0.16, 0.9, 0.73)  # left, bottom, width, height of the panel in the figure
_POINTS_PER_INCH = 72
_TEXT = 7.5


def sweep_figure(sweep: SweepResults) -> Figure:
    """Score against average batch, with the Pareto front.

    Each combination of settings that are text or true/false has a colour and a marker.
    """
    chart = sweep_chart(sweep)
    figure = Figure(figsize=_SIZE)
    axes = figure.add_axes(_PLACE)
    frame = Box(0, 0, *(_POINTS_PER_INCH * a * b for a, b in zip(_SIZE, _PLACE[2:], strict=True)))
    for number, group in enumerate(chart.groups):
        _draw_group(axes, number, group)
    _draw_front(axes, chart)
    _format(axes, chart, frame)
    _label(axes, chart, frame)
    axes.set_title(f"{sweep.name}\n{sweep.title}", fontsize=9, loc="left", wrap=True)
    if chart.groups:
        figure.legend(loc="lower center", ncols=3, frameon=False, fontsize=8, handlelength=3)
    return figure


def _draw_group(axes: Axes, number: int, group: Group) -> None:
    style = style_of(number)
    axes.errorbar(
        [dot.batch for dot in group.dots],
        [dot.center for dot in group.dots],
        [
            [dot.center - dot.low for dot in group.dots],
            [dot.high - dot.center for dot in group.dots],
        ],
        color=LIGHT[style.color],
        marker=MARKERS[number % len(MARKERS)],
        markersize=5,
        linestyle=style.line,
        linewidth=1.1 if group.is_line else 0,
        elinewidth=1,
        capsize=2,
        label=group.name,
    )


def _draw_front(axes: Axes, chart: SweepChart) -> None:
    steps = chart.front_steps()
    axes.plot(
        [batch for batch, _ in steps],
        [score for _, score in steps],
        color="#777777",
        linestyle=":",
        linewidth=1.6,
        zorder=0,
        label="front: best score for at least this batch",
    )


def _format(axes: Axes, chart: SweepChart, frame: Box) -> None:
    across, up = chart.axes(frame)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(across.ticks()))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlim(across.low, across.high)
    axes.set_ylim(up.low, up.high)
    axes.set_xlabel("average batch, samples a step")
    axes.set_ylabel(chart.score)
    add_grid(axes)


def _label(axes: Axes, chart: SweepChart, frame: Box) -> None:
    colors = [
        LIGHT[style_of(number).color]
        for number, group in enumerate(chart.groups)
        for _ in group.dots
    ]
    boxes = chart.label_boxes(frame, _TEXT)
    for dot, box, color in zip(chart.dots, boxes, colors, strict=True):
        if box is None:
            continue
        axes.annotate(
            dot.label,
            (dot.batch, dot.center),
            xytext=(
                (box.left + box.right) / 2 / frame.right,
                1 - (box.top + box.bottom) / 2 / frame.bottom,
            ),
            textcoords="axes fraction",
            ha="center",
            va="center",
            fontsize=_TEXT,
            color=color,
            arrowprops={"arrowstyle": "-", "color": color, "linewidth": 0.5, "alpha": 0.5},
        )

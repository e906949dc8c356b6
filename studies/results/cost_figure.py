"""What measuring costs, in one figure: all numbers are read from docs/benchmarks.md."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

from bigbatch.log.curves import COLORS, add_grid
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, NullFormatter

from bigbatch.errors import RunError
from studies.results.markdown import markdown_table, table_of

_NUMBER = r"(-?\d+(?:\.\d+)?)"
_CELL = re.compile(
    rf"{_NUMBER}(?: \[{_NUMBER}, {_NUMBER}\])?(?:; floor {_NUMBER}, {_NUMBER} x it)?"
)
_NO_NUMBER = ("refused", "-")  # cells of what cannot be measured
_MICRO_BATCH = re.compile(r"T = (\d+)(?: x (\d+))?|(\d+) images")
_WAYS = ("default", "groups, every step", "cut, every step", "VRSGD, groups")
_STATISTICS = ("similarity", "similarity and interval", "second moment")
_LONG_STEP = 30.0  # milliseconds
_LINEAR = "linear layers"  # the network that was measured at many sizes
_LINES = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)))
_MARKERS = "osD^v"
_RATIOS = (0.6, 0.8, 1, 1.5, 2, 3)  # ticks
_PLAIN = FuncFormatter(lambda value, _: f"{value:,.10g}")

_LOOP, _STATISTIC = "The loop over a plain loop", "What measuring costs"
_SENT, _DEEPSPEED, _OPTIMIZER = "What ranks send", "Under DeepSpeed", "Optimizer steps"

Row = Mapping[str, str]


@dataclass(frozen=True)
class Cost:
    """A time or a number of bytes, over that without measuring.

    Args:
        row: the name of its row in the table.
        x: milliseconds of a plain step, or samples of a micro-batch; 0 for neither.
        ratio: the ratio; its median where it was repeated.
        low, high: least and most of a round; `ratio` where there was one.
        floor: ratio that the additional bytes alone allow; None where it is unknown.
    """

    row: str
    x: float
    ratio: float
    low: float
    high: float
    floor: float | None


Costs = Mapping[str, Sequence[Cost]]  # by what is measured, in the order of x


def loop_costs(page: str) -> Costs:
    """Step time of the loop over that of a plain loop, against the plain step in milliseconds."""
    return _read(
        page,
        _LOOP,
        lambda row: (f"{row['network']}, {row['batch']}", float(row["plain step, ms"].split()[0])),
        lambda _: {way: way for way in _WAYS},
    )


def statistic_costs(page: str) -> Costs:
    """Step time with a statistic over that without, against tokens or images of a micro-batch."""

    def place(row: Row) -> tuple[str, float]:
        network = row["network, parameters"]
        if not (match := _MICRO_BATCH.search(network)):
            raise ValueError(f"{network!r} has no size of a micro-batch")
        tokens, length, images = match.groups()
        return network, float(images or tokens) * float(length or 1)

    return _read(page, _STATISTIC, place, lambda _: {one: one for one in _STATISTICS})


def byte_costs(page: str) -> Costs:
    """Bytes that a rank sends in a step over those of a plain step, by engine."""

    def columns(row: Row) -> Mapping[str, str]:
        return {} if row["what"].startswith("plain") else {row["what"]: "sent x plain"}

    read = [
        _read(page, section, lambda row: (row["engine"], 0.0), columns)
        for section in (_SENT, _DEEPSPEED)
    ]
    names = dict.fromkeys(name for costs in read for name in costs)
    return {name: [cost for costs in read for cost in costs.get(name, ())] for name in names}


def optimizer_costs(page: str) -> Costs:
    """Time of a VR optimizer's step over its base's, by the list of tensors."""

    def columns(row: Row) -> Mapping[str, str]:
        name = row["optimizer"]
        return {name: "x base"} if re.fullmatch(r"VR-\w+", name) else {}

    return _read(page, _OPTIMIZER, lambda row: (row["list"], 0.0), columns)


def _read(
    page: str,
    section: str,
    place: Callable[[Row], tuple[str, float]],
    columns: Callable[[Row], Mapping[str, str]],
) -> Costs:
    """The costs in some columns of a table; `columns` are those of a row by what is measured.

    Raises:
        RunError: the table is missing or damaged.
    """
    costs: dict[str, list[Cost]] = {}
    with _reading(section):
        for row in table_of(page, section):
            for name, column in columns(row).items():
                if row[column] not in _NO_NUMBER:
                    costs.setdefault(name, []).append(_cost(*place(row), row[column]))
        if not costs:
            raise ValueError("it has no number that is drawn")
    return {name: sorted(ones, key=lambda one: one.x) for name, ones in costs.items()}


@contextmanager
def _reading(section: str) -> Iterator[None]:
    """Turns errors of a damaged table into a RunError that names it."""
    try:
        yield
    except KeyError as error:
        raise RunError(f"docs/benchmarks.md, table of {section!r}: {error} is missing") from None
    except ValueError as error:
        raise RunError(f"docs/benchmarks.md, table of {section!r}: {error}") from None


def _cost(row: str, x: float, cell: str) -> Cost:
    match = _CELL.fullmatch(cell)
    if match is None:
        raise ValueError(f"{cell!r} is not a ratio")
    ratio, low, high, floor, _ = (None if one is None else float(one) for one in match.groups())
    assert ratio is not None
    return Cost(
        row, x, ratio, ratio if low is None else low, ratio if high is None else high, floor
    )


def tables(page: str) -> str:
    """The median of each series of each panel, with its least and its largest ratio.

    Raises:
        RunError: a table of the page is missing or damaged.
    """
    panels: list[tuple[str, int, Costs]] = [
        ("step, over a plain loop's", 2, loop_costs(page)),
        ("step, over one without the statistic", 3, statistic_costs(page)),
        ("bytes sent, over a plain step's", 5, byte_costs(page)),
        ("optimizer step, over its base's", 2, optimizer_costs(page)),
    ]
    return markdown_table(
        [
            {
                "compared": panel,
                "with": name,
                "median": f"{_median(costs):.{digits}f}",
                "least to most": " to ".join(f"{end:.{digits}f}" for end in _ends(costs)),
                "rows": str(len(costs)),
            }
            for panel, digits, series in panels
            for name, costs in series.items()
        ]
    )


def _median(costs: Sequence[Cost]) -> float:
    return median(cost.ratio for cost in costs)


def _ends(costs: Sequence[Cost]) -> tuple[float, float]:
    ratios = [cost.ratio for cost in costs]
    return min(ratios), max(ratios)


def figure(page: str) -> Figure:
    """Four panels: step time, time of a statistic, bytes sent, and optimizer steps.

    Raises:
        RunError: a table of the page is missing or damaged.
    """
    drawn = Figure(figsize=(13, 10), layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1))
    panels: list[tuple[str, Callable[[str], Costs], Callable[[Axes, Costs], None]]] = [
        (_LOOP, loop_costs, _draw_loop),
        (_STATISTIC, statistic_costs, _draw_statistics),
        (_SENT, byte_costs, _draw_bytes),
        (_OPTIMIZER, optimizer_costs, _draw_optimizers),
    ]
    for axes, (section, costs_of, draw) in zip(drawn.subplots(2, 2).flat, panels, strict=True):
        with _reading(section):
            draw(axes, costs_of(page))
    return drawn


def _draw_loop(axes: Axes, costs: Costs) -> None:
    """One line for each network, as its batch grows."""
    for number, (name, ones) in enumerate(costs.items()):
        networks = dict.fromkeys(_network(one) for one in ones)
        for network in networks:
            line = [one for one in ones if _network(one) == network]
            xs, ys = [one.x for one in line], [one.ratio for one in line]
            axes.plot(
                xs, ys, **_style(number), label=name if network == _network(ones[0]) else None
            )
    axes.axhline(1, color="#777777", linewidth=1)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_yticks(_RATIOS)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(_PLAIN)
    axes.yaxis.set_minor_formatter(NullFormatter())
    note = "below 1: the plain loop's memory\ngoes back to the system after each step"
    axes.text(0.02, 0.03, note, transform=axes.transAxes, fontsize=8, color="#555555")
    long_steps = [one for one in costs["default"] if one.x >= _LONG_STEP]
    title = (
        f"By default a step takes {_median(costs['default']):.2f} times a plain one's time, and "
        f"{_median(long_steps):.2f} times\nfrom {_LONG_STEP:g} ms on "
        "(medians; a line: one network as its batch grows)"
    )
    _finish(axes, title, "plain step, ms", "step time over a plain loop's")


def _network(cost: Cost) -> str:
    return cost.row.rpartition(", ")[0]


def _draw_statistics(axes: Axes, costs: Costs) -> None:
    for number, (name, ones) in enumerate(costs.items()):
        style = _style(number)
        linear = [one for one in ones if one.row.startswith(_LINEAR)]
        xs = [one.x for one in linear]
        axes.plot(xs, [one.ratio for one in linear], **style, label=name)
        floors = [one.floor or one.ratio for one in linear]
        axes.plot(xs, floors, **{**style, "marker": "", "linewidth": 0.8, "alpha": 0.6})
        for one in ones:
            if one not in linear:
                marker = "*" if one.row.startswith("transformer") else "P"
                axes.plot(one.x, one.ratio, marker, color=style["color"], markersize=7)
    grey: dict[str, Any] = {"color": "#777777", "linestyle": "none", "markersize": 7}
    axes.plot([], [], color="#777777", linewidth=0.8, label="its floor: the additional bytes alone")
    axes.plot([], [], marker="*", **grey, label="transformer")
    axes.plot([], [], marker="P", **grey, label="ResNet-18, images of 32 x 32")
    axes.axhline(1, color="#777777", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(_PLAIN)
    small, *_, large = (one for one in costs["similarity"] if one.row.startswith(_LINEAR))
    title = (
        f"The larger the micro-batch, the less a statistic costs: similarity takes "
        f"{small.ratio:.2f} times\nthe step at {small.x:,.0f} tokens, {large.ratio:.2f} times at "
        f"{large.x:,.0f} (lines: linear layers)"
    )
    label = "tokens, or images, of a micro-batch"
    _finish(axes, title, label, "step time over that without the statistic")


def _draw_bytes(axes: Axes, costs: Costs) -> None:
    kinds = {name: _kind(name) for name in costs}
    rows = sorted({(one.row, kinds[name], name) for name in costs for one in costs[name]})
    for place, (engine, kind, name) in enumerate(rows):
        ratio = max(one.ratio for one in costs[name] if one.row == engine)
        axes.barh(place, ratio, 0.7, color=(*COLORS[:2], "#777777")[kind], alpha=0.6)
        axes.text(ratio + 0.03, place, f"{ratio:.5f}", va="center", fontsize=7.5)
    axes.axvline(1, color="#777777", linewidth=1)
    axes.set_yticks(range(len(rows)), [f"{engine}: {name}" for engine, _, name in rows])
    axes.invert_yaxis()
    axes.margins(x=0.1, y=0.02)
    statistics = [one for name in costs if kinds[name] == 0 for one in costs[name]]
    low, high = _ends(costs["SimiGrad, re-created"])
    title = (
        f"Measuring sends at most {100 * (_ends(statistics)[1] - 1):.2f} % more bytes, SimiGrad's "
        f"own method\n{low:.3g} to {high:.3g} times as many; VR on ZeRO-0 and 1 reduces every "
        "micro-batch"
    )
    _finish(axes, title, "bytes sent over a plain step's, most of 2 to 4 ranks", "")


def _kind(name: str) -> int:
    """0 for statistics, 1 for VR, 2 for methods of others."""
    return 2 if "re-created" in name else 1 if name.startswith("VR") else 0


def _draw_optimizers(axes: Axes, costs: Costs) -> None:
    lists = list(dict.fromkeys(one.row for ones in costs.values() for one in ones))
    for number, name in enumerate(lists):
        shift = 0.12 * (number - (len(lists) - 1) / 2)
        for place, ones in enumerate(costs.values()):
            for one in ones:
                if one.row == name:
                    errors = [[one.ratio - one.low], [one.high - one.ratio]]
                    style = {**_style(number), "linestyle": "none"}
                    axes.errorbar(
                        place + shift, one.ratio, errors, **style, label=None if place else name
                    )
    axes.set_xticks(range(len(costs)), list(costs))
    axes.set_ylim(bottom=0.8)
    axes.axhline(1, color="#777777", linewidth=1)
    medians = {name: _median(ones) for name, ones in costs.items()}
    low, high = min(medians, key=medians.__getitem__), max(medians, key=medians.__getitem__)
    title = (
        f"A VR step takes {medians[low]:.1f} ({low}) to {medians[high]:.1f} ({high}) times its "
        "base's\ntime (medians; bars: least and most of a round)"
    )
    _finish(axes, title, "", "time of step() over the base optimizer's")


def _style(number: int) -> dict[str, Any]:
    """Colour, line and marker of a series."""
    return {
        "color": COLORS[number],
        "linestyle": _LINES[number],
        "marker": _MARKERS[number],
        "markersize": 4,
        "linewidth": 1.2,
    }


def _finish(axes: Axes, title: str, x_label: str, y_label: str) -> None:
    axes.set_title(title, fontsize=9.5, loc="left")
    axes.set_xlabel(x_label, fontsize=9)
    axes.set_ylabel(y_label, fontsize=9)
    axes.tick_params(labelsize=8)
    add_grid(axes)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize=8)

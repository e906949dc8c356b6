"""Figures 1 and 3 of the paper, redrawn for every input distribution and both upper clips."""

from collections.abc import Sequence

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from bigbatch_recipes.linear_regression.experiment import (
    CLIPS,
    GAMMA,
    GROUPS,
    METHODS,
    TRUTH,
    Findings,
    Trace,
    arms_along,
)

_COLORS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7")
_PAPER_OPTIMA = {"gamma": (0.04, 0.2), "k": (32, 256)}  # the ranges that its figure shows
_DEFAULTS = {"gamma": GAMMA, "k": GROUPS}
_TICKS: dict[str, list[float]] = {
    "gamma": [0.01, 0.04, 0.1, 0.2, 0.5, 1],
    "k": [2, 8, 32, 64, 256, 1024],
}
_FLOOR = 1e-30  # a smaller loss is 0 in float64, and has no place on a logarithmic axis
_PLAIN = FuncFormatter(lambda value, _: f"{value:g}")


def figure1(findings: Sequence[Findings]) -> Figure:
    """A row for each distribution: losses, weights under VR-SGD, and r of each weight and step."""
    figure = Figure(figsize=(17, 3.1 * len(findings)), layout="constrained")
    rows = figure.subplots(len(findings), 5, squeeze=False)
    for finding, (curves, *panels) in zip(findings, rows, strict=True):
        _plot_losses(curves, finding)
        for clip, weights, heat in zip(CLIPS, panels[:2], panels[2:], strict=True):
            trace = finding.traces[CLIPS[clip](finding.inputs.shown)]
            _plot_weights(weights, trace, f"weights ({clip})")
            image = _plot_r(heat, trace, f"r of each weight ({clip})")
        bar = figure.colorbar(image, ax=panels[2:], pad=0.01, ticks=[0.1, 0.3, 1, 3, 10])
        bar.ax.set_yticklabels(["0.1", "0.3", "1", "3", "10"], fontsize=8)
    rows[0, 0].legend(fontsize=8, frameon=False)
    for i in range(5):
        rows[0, 1].plot([], [], color=_color_of(4 - i), label=f"w{5 - i}, w{6 + i}")
    rows[0, 1].legend(fontsize=7, frameon=True, ncols=3, loc="lower right")
    return figure


def _plot_losses(axes: Axes, finding: Findings) -> None:
    lr = finding.inputs.shown
    for (name, method), color in zip(METHODS.items(), _COLORS, strict=False):
        losses = finding.traces[method(lr)].losses.clamp_min(_FLOOR)
        steps = range(losses.shape[1])
        axes.plot(steps, losses.median(0).values, color=color, linewidth=1.3, label=name)
        low, high = losses.amin(0), losses.amax(0)
        axes.fill_between(steps, low, high, color=color, alpha=0.25, linewidth=0)
    axes.set_yscale("log")
    _format(axes, f"{finding.inputs.name}, lr {lr:g}: loss", "step")


def _plot_weights(axes: Axes, trace: Trace, title: str) -> None:
    for i, weight in enumerate(trace.weights.median(0).values.T):
        axes.plot(weight, color=_color_of(i), linewidth=1.2)
    for value in TRUTH.tolist():
        axes.axhline(value, color="#999999", linewidth=0.4, linestyle=":")
    axes.set_ylim(-0.5, 11)
    axes.set_yticks([1, 3, 5, 6, 8, 10])
    _format(axes, title, "step")


def _color_of(weight: int) -> tuple[float, float, float, float]:
    """One colour for weights as far from the middle: w5 and w6 dark, w1 and w10 light."""
    distance = abs(weight - 4.5) - 0.5
    return colormaps["viridis"](distance / 4.6)


def _plot_r(axes: Axes, trace: Trace, title: str) -> ScalarMappable:
    r = trace.r.median(0).values.T.numpy()
    image = axes.imshow(
        r,
        aspect="auto",
        origin="lower",
        cmap="RdBu_r",
        norm=LogNorm(GAMMA, 1 / GAMMA),
        extent=(0.5, r.shape[1] + 0.5, 0.5, r.shape[0] + 0.5),
        interpolation="nearest",
    )
    axes.set_yticks(range(1, len(r) + 1), [f"w{i}" for i in range(1, len(r) + 1)])
    _format(axes, title, "step", grid=False)
    return image


def figure3(findings: Sequence[Findings]) -> Figure:
    """Last loss over SGD's against gamma and k: a row a clip, a column a distribution."""
    figure = Figure(figsize=(3.4 * len(findings), 12), layout="constrained")
    rows = figure.subplots(4, len(findings), squeeze=False)
    panels = [(parameter, clip) for parameter in ("gamma", "k") for clip in CLIPS]
    for row, (parameter, clip) in zip(rows, panels, strict=True):
        row[0].set_ylabel(f"{clip}: last loss / SGD's", fontsize=9)
        for axes, finding in zip(row, findings, strict=True):
            _plot_relative_losses(axes, finding, clip, parameter)
            _format(axes, finding.inputs.name, parameter)
    for axes in rows[0]:
        axes.legend(fontsize=7, title="lr", title_fontsize=7)
    return figure


def _plot_relative_losses(axes: Axes, finding: Findings, clip: str, parameter: str) -> None:
    for lr, color in zip(finding.inputs.lrs, _COLORS, strict=False):
        arms = arms_along(parameter, clip, lr)
        values, losses = list(arms), [finding.relative(arm) for arm in arms.values()]
        middle = [loss.median for loss in losses]
        axes.plot(values, middle, ".-", color=color, markersize=4, linewidth=1.1, label=f"{lr:g}")
        least, most = [loss.least for loss in losses], [loss.most for loss in losses]
        axes.fill_between(values, least, most, color=color, alpha=0.2, linewidth=0)
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    if high < 100 * low:
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(_PLAIN)
    axes.yaxis.set_minor_formatter(_PLAIN if high < 2 * low else NullFormatter())
    axes.set_xscale("log", base=10 if parameter == "gamma" else 2)
    axes.set_xticks(_TICKS[parameter])
    axes.xaxis.set_major_formatter(_PLAIN)
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.axvspan(*_PAPER_OPTIMA[parameter], color="#009e73", alpha=0.12, linewidth=0)
    axes.axvline(_DEFAULTS[parameter], color="#999999", linewidth=0.8, linestyle=":")
    axes.axhline(1, color="#999999", linewidth=0.8)


def _format(axes: Axes, title: str, x_label: str, grid: bool = True) -> None:
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel(x_label, fontsize=8)
    axes.tick_params(labelsize=8, which="both")
    if grid:
        axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)

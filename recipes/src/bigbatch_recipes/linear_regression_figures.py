"""Figures 1 and 3 of the paper, redrawn for every input distribution and both upper clips."""

from collections.abc import Iterator, Sequence

from bigbatch.log.chart import Mark, Panel, Series
from bigbatch.log.chart_svg import svg
from bigbatch_recipes.heat_map import HeatMap
from bigbatch_recipes.linear_regression import (
    CLIPS,
    GAMMA,
    GROUPS,
    INPUTS,
    METHODS,
    STEPS,
    Findings,
    Trace,
    arms_along,
)

_SIZE = (330, 210)
_FLOOR = 1e-30  # a smaller loss is 0 in float64, and has no place on a logarithmic axis
_BASES = {"gamma": 10, "k": 2}  # of the logarithmic axes
_COMPARED = {  # the default, and the ends of the range that the paper finds best
    "gamma": (Mark("ours", x=GAMMA), Mark("", x=0.04), Mark("", x=0.2)),
    "k": (Mark("ours", x=GROUPS), Mark("", x=32), Mark("", x=256)),
}


def figure1(findings: Sequence[Findings]) -> str:
    """A row for each distribution: losses, weights under VR-SGD, and r of each weight and step."""
    charts: list[Panel | HeatMap] = []
    for finding in findings:
        lr = finding.inputs.shown
        name = f"{finding.inputs.name}, lr {lr:g}"
        traces = {clip: finding.traces[arm(lr)] for clip, arm in CLIPS.items()}
        losses = [_losses(method, finding.traces[arm(lr)]) for method, arm in METHODS.items()]
        charts.append(_panel(f"{name}: loss", losses, y_log=10))
        charts += [
            _panel(f"{name}: weights ({clip})", list(_weights(trace)), y_range=(-0.5, 11))
            for clip, trace in traces.items()
        ]
        charts += [_factors(f"{name}: r ({clip})", trace) for clip, trace in traces.items()]
    return svg(charts, columns=5, key=True, standalone=True)


def _panel(
    title: str,
    series: list[Series],
    y_log: int | None = None,
    y_range: tuple[float, float] | None = None,
) -> Panel:
    return Panel(title, "step", series, y_log=y_log, y_range=y_range, size=_SIZE)


def _losses(method: str, trace: Trace) -> Series:
    losses = trace.losses.clamp_min(_FLOOR)
    return Series(
        method,
        range(losses.shape[1]),
        losses.median(0).values.tolist(),
        low=losses.amin(0).tolist(),
        high=losses.amax(0).tolist(),
    )


def _weights(trace: Trace) -> Iterator[Series]:
    for number, weights in enumerate(trace.weights.median(0).values.T.tolist(), start=1):
        pair = min(number, INPUTS + 1 - number)
        yield Series(f"w{pair}, w{INPUTS + 1 - pair}", range(len(weights)), weights)


def _factors(title: str, trace: Trace) -> HeatMap:
    r = trace.r.median(0).values.T.flip(0).tolist()  # w10 above
    return HeatMap(
        title,
        [f"w{number}" for number in range(INPUTS, 0, -1)],
        r,
        x_range=(0.5, STEPS + 0.5),
        x_label="step",
        low=GAMMA,
        high=1 / GAMMA,
        width=_SIZE[0],
    )


def figure3(findings: Sequence[Findings]) -> str:
    """Last loss over SGD's against gamma and k: a row a clip, a column a distribution."""
    charts = [
        Panel(
            f"{finding.inputs.name}, {clip}: loss / SGD's",
            parameter,
            [_relative_losses(finding, parameter, clip, lr) for lr in finding.inputs.lrs],
            x_log=_BASES[parameter],
            y_log=10,
            marks=(Mark("", y=1.0), *_COMPARED[parameter]),
            size=_SIZE,
        )
        for parameter in ("gamma", "k")
        for clip in CLIPS
        for finding in findings
    ]
    return svg(charts, columns=len(findings), key=True, standalone=True)


def _relative_losses(finding: Findings, parameter: str, clip: str, lr: float) -> Series:
    arms = arms_along(parameter, clip, lr)
    losses = [finding.relative(arm) for arm in arms.values()]
    return Series(
        f"lr {lr:g}",
        list(arms),
        [loss.median for loss in losses],
        low=[loss.least for loss in losses],
        high=[loss.most for loss in losses],
        markers=True,
    )

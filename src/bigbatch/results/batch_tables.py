"""Tables and figure of a comparison of batch sizes."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean, stdev

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bigbatch.results.markdown import markdown_table
from bigbatch.results.measured_batch import (
    BASE,
    CONTROLLED,
    DEVICES,
    DOUBLING,
    equal_steps,
    replay_of,
)
from bigbatch.results.run_log import RunLog
from bigbatch.results.time_to_target import fastest, times_to, tuned_score
from bigbatch.runs.curves import COLORS, add_grid
from bigbatch.runs.paired_differences import PairedDifference, paired_difference

_MARGIN = {True: -1.0, False: 0.05}  # of the target, by whether a higher score is better


def target_of(log: RunLog) -> float:
    """The target score: that of fixed 64 in tuning, less one point, or plus 0.05 bits."""
    return tuned_score(log, BASE) + _MARGIN[log.higher_is_better]


def tables(log: RunLog) -> str:
    """The arms, their modelled times to the target, and the differences from their controls."""
    target = target_of(log)
    words = f"Target: {log.score} {target:.2f}. Step of a plain loop: "
    words += (
        f"{1000 * log.step_cost.fixed:.2f} ms + {1e6 * log.step_cost.per_sample:.1f} us a sample."
    )
    references = [
        f"{_devices(devices)}: {fastest(log, fixed_arms(log), target, devices)}"
        for devices in DEVICES
    ]
    return "\n\n".join(
        [
            words,
            markdown_table([_arm_cells(log, arm, target) for arm in log.arms]),
            f"Fixed batches that the times are relative to: {'; '.join(references)}.",
            markdown_table([_control_cells(log, arm) for arm in CONTROLLED]),
        ]
    )


def fixed_arms(log: RunLog) -> list[str]:
    """The fixed batches that were chosen before the run."""
    return [arm for arm in log.arms if arm.startswith("fixed ")]


def scores_of(log: RunLog, arm: str, score: str | None = None) -> dict[int, float | None]:
    """The last scores of the fresh runs of an arm, by seed."""
    return {run.seed: run.score(score or log.score) for run in log.fresh(arm)}


def time_ratio(log: RunLog, arm: str, target: float, devices: int) -> PairedDifference:
    """ln of an arm's time to the target over that of the fastest fixed batch, by seed."""
    reference = fastest(log, fixed_arms(log), target, devices)
    return times_to(log, arm, target, devices).log_ratio_to(
        times_to(log, reference, target, devices)
    )


def _arm_cells(log: RunLog, arm: str, target: float) -> dict[str, str]:
    runs = log.fresh(arm)
    loss = [name for name in runs[0].scores if "loss" in name]
    cells = {
        "arm": arm,
        "rate": f"{log.rate(arm):g}" + " (edge)" * log.at_edge(arm),
        log.score: mean_cell(
            list(scores_of(log, arm).values()), 2 + 2 * (not log.higher_is_better)
        ),
        **{name: mean_cell(list(scores_of(log, arm, name).values()), 4) for name in loss},
        "steps": f"{fmean(run.steps for run in runs):,.0f}",
        "batch": f"{fmean(run.average_batch for run in runs):,.0f}",
        "reached": f"{times_to(log, arm, target, 1).reached} of {len(runs)}",
    }
    return cells | {
        f"time, {_devices(devices)}": _ratio(time_ratio(log, arm, target, devices))
        for devices in DEVICES
    }


def _control_cells(log: RunLog, arm: str) -> dict[str, str]:
    own = scores_of(log, arm)
    others = {
        "its replay": replay_of(arm),
        "fixed, equal steps": equal_steps(arm),
        "doubling": DOUBLING,
        "fixed 64": BASE,
    }
    return {"arm": arm} | {
        f"minus {name}": difference_cell(paired_difference(own, scores_of(log, other)), log)
        for name, other in others.items()
    }


def _devices(count: int) -> str:
    return f"{count} device" + "s" * (count > 1)


def mean_cell(values: Sequence[float | None], digits: int) -> str:
    """Mean and standard deviation of the values that are known, and the number of the others."""
    known = [value for value in values if value is not None]
    if not known:
        return "none"
    spread = stdev(known) if len(known) > 1 else 0.0
    lost = len(values) - len(known)
    return f"{fmean(known):.{digits}f} ± {spread:.{digits}f}" + f" ({lost} failed)" * bool(lost)


def _ratio(difference: PairedDifference) -> str:
    if difference.interval is None:
        return "1" if difference.center == 0 and len(difference.by_seed) > 1 else "-"
    low, high = difference.interval
    text = f"{math.exp(difference.center or 0):.2f} [{math.exp(low):.2f}, {math.exp(high):.2f}]"
    return f"**{text}**" if low > 0 or high < 0 else text


def difference_cell(difference: PairedDifference, log: RunLog) -> str:
    """Mean and interval, bold where it excludes 0; in words where there is no interval."""
    if difference.interval is None:
        return difference.result
    low, high = difference.interval
    digits = 2 if log.higher_is_better else 3
    text = f"{difference.center:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"
    return f"**{text}**" if low > 0 or high < 0 else text


def figure(log: RunLog) -> Figure:
    """For every arm: score less that of fixed 64, and time to the target over the best fixed."""
    target, arms = target_of(log), [arm for arm in log.arms if not arm.startswith("fixed, steps")]
    drawn = Figure(figsize=(12, 0.9 + 0.27 * len(arms)), layout="constrained")
    panels = drawn.subplots(1, 1 + len(DEVICES), sharey=True)
    base = scores_of(log, BASE)
    _forest(
        panels[0],
        arms,
        lambda arm: paired_difference(scores_of(log, arm), base),
        f"{log.score}, less that of {BASE}",
        0.0,
    )
    for axes, devices in zip(panels[1:], DEVICES, strict=True):
        ratio_of = partial(time_ratio, log, target=target, devices=devices)
        title = f"time to the target over the\nbest fixed batch's, {_devices(devices)}"
        _forest(axes, arms, ratio_of, title, 1.0, math.exp)
        axes.set_xscale("log", base=2)
    panels[0].set_yticks(range(len(arms)), arms, fontsize=8)
    panels[0].invert_yaxis()
    return drawn


def _forest(
    axes: Axes,
    arms: Sequence[str],
    difference_of: Callable[[str], PairedDifference],
    title: str,
    equal: float,
    scale: Callable[[float], float] = float,
) -> None:
    axes.axvline(equal, color="#777777", linewidth=1)
    for place, arm in enumerate(arms):
        difference = difference_of(arm)
        color = _color(arm)
        if difference.center is not None:
            axes.plot(scale(difference.center), place, "o", color=color, markersize=4)
        if difference.interval is not None:
            low, high = map(scale, difference.interval)
            axes.plot([low, high], [place, place], color=color, linewidth=1.5)
    axes.set_title(title, fontsize=9, loc="left")
    axes.tick_params(labelsize=8)
    add_grid(axes)


def _color(arm: str) -> str:
    """Grey for fixed batches, orange for schedules, blue for policies that measure."""
    if arm.startswith("fixed"):
        return "#777777"
    return COLORS[1] if arm.startswith((DOUBLING, "replay")) else COLORS[0]

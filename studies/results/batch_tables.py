"""Tables and figure of a comparison of batch sizes."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean, stdev

import numpy
from bigbatch.log.curves import COLORS, add_grid
from bigbatch.log.line_styles import style_of
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from bigbatch.log.paired_differences import PairedDifference, paired_difference
from studies.results.markdown import markdown_table
from studies.results.measured_batch import DEVICES, DOUBLING, devices_text, equal_steps, replay_of
from studies.results.run_log import LoggedRun, RunLog
from studies.results.time_to_target import fastest, times_to, to_target, tuned_score

_MARGIN = {True: -1.0, False: 0.05}  # of the target, by whether a higher score is better
_EASIER = (2, 4)  # margins of further targets that the rule does not name


def base_of(log: RunLog) -> str:
    """The first arm, a fixed batch: the reference of all others."""
    return log.planned_arms[0]


def target_of(log: RunLog) -> float:
    """The target score: that of the first arm in tuning, less one point, or plus 0.05 bits."""
    return tuned_score(log, base_of(log)) + _MARGIN[log.higher_is_better]


def tables(log: RunLog) -> str:
    """The arms, their modelled times to the target, and the differences from their controls.

    Arms without a finished run are left out, and the runs that are missing are counted.
    """
    arms = finished_arms(log)
    missing = [_missing_words(log)] if log.missing else []
    if base_of(log) not in arms:
        return "\n\n".join([f"There is no target before {base_of(log)} has a run.", *missing])
    target = target_of(log)
    words = f"Target: {log.score} {target:.2f}. Step of a plain loop: "
    words += (
        f"{1000 * log.step_cost.fixed:.2f} ms + {1e6 * log.step_cost.per_sample:.1f} us a sample."
    )
    references = "No fixed batch reaches the target, so there are no times relative to one."
    if _fixed_reaches(log, target):
        references = "Fixed batches that the times are relative to: " + "; ".join(
            f"{devices_text(devices)}: {fastest(log, fixed_arms(log), target, devices)}"
            for devices in DEVICES
        )
        references += "."
    return "\n\n".join(
        [
            words,
            *missing,
            _table_of_known([_arm_cells(log, arm, target) for arm in arms]),
            references,
            _table_of_known([_control_cells(log, arm) for arm in arms if replay_of(arm) in arms]),
            "Not in the rule, looked at afterwards: easier targets on 8 devices.",
            _table_of_known([_easier_cells(log, arm) for arm in arms]),
        ]
    )


def finished_arms(log: RunLog) -> list[str]:
    """The arms of which a shown run has ended or failed."""
    return [arm for arm in log.arms if log.fresh(arm)]


def _missing_words(log: RunLog) -> str:
    planned, finished = len(log.planned_arms), len(finished_arms(log))
    return (
        f"**Not complete.** Missing runs: {sum(log.missing.values())}. "
        f"Arms without a finished run, which are left out: {planned - finished} of {planned}."
    )


def _easier_cells(log: RunLog, arm: str) -> dict[str, str]:
    """Times on 8 devices to targets that are further below the first arm's score in tuning."""
    cells = {"arm": arm}
    for factor in _EASIER:
        target = tuned_score(log, base_of(log)) + factor * _MARGIN[log.higher_is_better]
        reference = fastest(log, fixed_arms(log), target, 8)
        cells[f"{target:.2f}, over {reference}"] = _ratio(time_ratio(log, arm, target, 8))
    return cells


def fixed_arms(log: RunLog) -> list[str]:
    """The fixed batches that were chosen before the run, with a finished run."""
    return [arm for arm in finished_arms(log) if arm.startswith("fixed ")]


def scores_of(log: RunLog, arm: str, score: str | None = None) -> dict[int, float | None]:
    """The last scores of the fresh runs of an arm, by seed."""
    return {run.seed: run.score(score or log.score) for run in log.fresh(arm)}


def _fixed_reaches(log: RunLog, target: float) -> bool:
    """Whether a run of a fixed batch reaches the target, which times may then be relative to."""
    return any(times_to(log, arm, target, 1).reached for arm in fixed_arms(log))


def time_ratio(log: RunLog, arm: str, target: float, devices: int) -> PairedDifference:
    """ln of an arm's time to the target over that of the fastest fixed batch, by seed."""
    reference = fastest(log, fixed_arms(log), target, devices)
    return times_to(log, arm, target, devices).log_ratio_to(
        times_to(log, reference, target, devices)
    )


def _arm_cells(log: RunLog, arm: str, target: float) -> dict[str, str]:
    runs = log.fresh(arm)
    valid = [run for run in runs if run.score(log.score) is not None]
    losses = [name for name in log.score_names if "loss" in name]
    cells = {
        "arm": arm,
        "rate": f"{log.rate(arm):g}" + " (edge)" * log.at_edge(arm),
        log.score: mean_cell(
            list(scores_of(log, arm).values()), 2 + 2 * (not log.higher_is_better)
        ),
        **{name: mean_cell(list(scores_of(log, arm, name).values()), 4) for name in losses},
        "steps": f"{fmean(run.steps for run in valid):,.0f}" if valid else "none",
        "batch": f"{fmean(run.average_batch for run in valid):,.0f}" if valid else "none",
        "reached": f"{times_to(log, arm, target, 1).reached} of {len(runs)}",
        "steps, samples to it": _position_cell(log, arm, target),
    }
    return cells | {
        f"time, {devices_text(devices)}": _ratio(time_ratio(log, arm, target, devices))
        for devices in DEVICES
    }


def _position_cell(log: RunLog, arm: str, target: float) -> str:
    """Mean steps and samples to the target, of the runs that reach it."""
    higher = log.higher_is_better
    found = [to_target(run, target, higher_is_better=higher) for run in log.fresh(arm)]
    if not (known := [position for position in found if position is not None]):
        return "none"
    return ", ".join(f"{fmean(values):,.0f}" for values in zip(*known, strict=True))


def _table_of_known(rows: Sequence[dict[str, str]]) -> str:
    """A table without the columns that no row has a value in."""
    columns = [name for name in (rows or [{}])[0] if any(row[name] != "none" for row in rows)]
    return markdown_table([{name: row[name] for name in columns} for row in rows])


def _control_cells(log: RunLog, arm: str) -> dict[str, str]:
    """Differences from the controls."""
    own = scores_of(log, arm)
    others = {
        "its replay": replay_of(arm),
        "fixed, equal steps": equal_steps(arm),
        "doubling": DOUBLING,
        base_of(log): base_of(log),
    }
    return {"arm": arm} | {
        f"minus {name}": difference_cell(paired_difference(own, scores_of(log, other)), log)
        for name, other in others.items()
    }


def mean_cell(values: Sequence[float | None], digits: int) -> str:
    """Mean and standard deviation of the values that are known, and the number of the others."""
    known = [value for value in values if value is not None]
    if not known:
        return "none"
    spread = stdev(known) if len(known) > 1 else 0.0
    lost = len(values) - len(known)
    return f"{fmean(known):.{digits}f} ± {spread:.{digits}f}" + f" ({lost} failed)" * bool(lost)


def _ratio(difference: PairedDifference) -> str:
    return _cell(difference, lambda value: f"{math.exp(value):.2f}")


def difference_cell(difference: PairedDifference, log: RunLog) -> str:
    """Mean and interval of a difference of main scores, as `_cell` writes them."""
    digits = 2 if log.higher_is_better else 3
    return _cell(difference, lambda value: f"{value:+.{digits}f}")


def _cell(difference: PairedDifference, text_of: Callable[[float], str]) -> str:
    """Mean and interval, bold if it excludes 0; where pairs lack a value, their number instead.

    The pairs that have one are then those of the better runs.
    """
    if difference.center is None:
        return "none"
    text = text_of(difference.center)
    if difference.interval is not None:
        low, high = difference.interval
        text = f"{text} [{text_of(low)}, {text_of(high)}]"
        excludes_zero = low > 0 or high < 0
        text = f"**{text}**" if excludes_zero and not difference.missing else text
    pairs = f" ({len(difference.by_seed)} of {difference.pairs} pairs)"
    return text + pairs * bool(difference.missing)


def figure(log: RunLog) -> Figure:
    """For every arm: score less that of the first, and time to the target over the best fixed.

    Without the times where no fixed batch reaches the target.
    """
    base = base_of(log)
    if base not in finished_arms(log):
        return Figure(figsize=(4, 1))
    target = target_of(log)
    arms = [arm for arm in finished_arms(log) if not arm.startswith("fixed, steps")]
    timed = DEVICES if _fixed_reaches(log, target) else ()
    drawn = Figure(figsize=(12, 0.9 + 0.27 * len(arms)), layout="constrained")
    panels = drawn.subplots(1, 1 + len(timed), sharey=True, squeeze=False)[0]
    _forest(
        panels[0],
        arms,
        lambda arm: paired_difference(scores_of(log, arm), scores_of(log, base)),
        f"{log.score},\nless that of {base}",
        0.0,
    )
    for axes, devices in zip(panels[1:], timed, strict=True):
        ratio_of = partial(time_ratio, log, target=target, devices=devices)
        title = f"time to the target over the\nbest fixed batch's, {devices_text(devices)}"
        _forest(axes, arms, ratio_of, title, 1.0, math.exp)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    hollow = "; hollow: over those seeds alone that reach the target" * bool(timed)
    drawn.supxlabel(f"line: 95 % interval{hollow}", fontsize=8)
    panels[0].set_yticks(range(len(arms)), arms, fontsize=8)
    panels[0].invert_yaxis()
    return drawn


def score_over_steps(log: RunLog, arms: tuple[str, str]) -> Figure:
    """The main score of two arms against optimizer steps: mean and range over the seeds.

    Over those that neither failed nor diverged; empty where an arm has none.
    """
    drawn = Figure(figsize=(7, 3.6), layout="constrained")
    valid = [[run for run in log.fresh(arm) if run.score(log.score) is not None] for arm in arms]
    if not all(valid):
        return drawn
    axes = drawn.subplots()
    styles = (("#555555", style_of(1).line), (COLORS[0], "solid"))
    for arm, runs, (color, line) in zip(arms, valid, styles, strict=True):
        samples = [point[0] for point in runs[0].curve]
        steps = [fmean(_at(run, 1, x) for run in runs) for x in samples]
        scores = [[_at(run, 3, x) for run in runs] for x in samples]
        means = [fmean(of_x) for of_x in scores]
        axes.plot(steps, means, color=color, linestyle=line, linewidth=1.8)
        axes.fill_between(
            steps, list(map(min, scores)), list(map(max, scores)), color=color, alpha=0.2
        )
        axes.annotate(
            f"{arm}\n{steps[-1]:,.0f} steps",
            (steps[-1], fmean(scores[-1])),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            color=color,
            fontsize=9,
        )
    axes.set_xlabel("optimizer steps; every training sees the same samples", fontsize=9)
    axes.set_title(log.score, fontsize=10, loc="left")
    axes.set_xlim(right=1.17 * axes.dataLim.x1)
    axes.set_ylim(bottom=max(scores[0]) + 0.6 * (fmean(scores[-1]) - max(scores[0])))
    add_grid(axes)
    return drawn


def _at(run: LoggedRun, column: int, samples: int) -> float:
    """A column of a run's curve at a number of samples, interpolated."""
    known = numpy.array([point for point in run.curve if point[3] is not None], dtype=float)
    return float(numpy.interp(samples, known[:, 0], known[:, column]))


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
            fill = "white" if difference.missing else color
            axes.plot(scale(difference.center), place, "o", color=color, mfc=fill, ms=5, zorder=3)
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
